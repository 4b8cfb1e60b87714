"""What losses and gradients say of the workers that brought them: a jump of the loss, and a node whose part is wrong again
and again, which may be a processor that computes wrongly without noticing."""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from holdfast.coordinator.health import findings, notes
from holdfast.coordinator.kernel.context import Context
from holdfast.coordinator.kernel.membership_state import Worker
from holdfast.coordinator.kernel.requests import EvictWorkers
from holdfast.health import checksums
from holdfast.health.losses import Losses, WorkerLosses
from holdfast.protocol import causes
from holdfast.protocol import messages as m
from holdfast.protocol.health import Finding, Remedy, Severity
from holdfast.protocol.phases import Spent

LOSS_JUMP = "loss-jump"
PART_APART = "part-apart"
NOT_FINITE = "part-not-finite"
STATE_APART = "state-apart"
GRADIENT_APART = "gradient-apart"

TIMES = 3
"""At so many different steps a node alone brings what is not finite, until a person is asked for: by chance, as the
data's doing, that is one in the square of the nodes."""


@dataclass
class Curves:
    """What was heard. No part of the state: a successor hears more."""

    losses: Losses = field(default_factory=Losses)
    parts: WorkerLosses = field(default_factory=WorkerLosses)
    told_in: int = -1
    """The generation in which replicas were last said to differ: whatever differs differs in every block from then on."""


def on_trial(context: Context, rule: str) -> bool:
    """The user put it there, by its name or a pattern as in `slow-*`."""
    return any(fnmatchcase(rule, pattern) for pattern in context.spec.health.dry_run)


def heard(context: Context, worker: Worker, losses: tuple[m.StepTold, ...]) -> None:
    """The job's losses of the steps that were committed, from rank 0."""
    if not context.spec.health.watch:
        return
    for told in losses:
        # A step without an update changes nothing that a later loss could show. With fp16's scaler they are
        # normal, and a scaled loss that overflows is no finding.
        if told.skipped:
            continue
        step, loss = told.step, told.loss
        jump = context.transient(Curves).losses.take(step, loss)
        if jump is not None:
            what = f"the loss of step {step} is {loss:.4g}, compared with {jump.usual:.4g} in the steps before it"
            _say(context, worker, LOSS_JUMP, Severity.WARNING, Remedy.WATCH, what, shared=True)


def compared(context: Context, spent: dict[str, Spent]) -> None:
    """One block of steps of all workers."""
    apart = context.transient(Curves).parts.look(
        {name: s.loss for name, s in spent.items() if s.loss is not None}
    )
    if apart is None:
        return
    told = (
        f"its local loss is {apart.loss:.4g} against a median of {apart.usual:.4g}, {apart.times} times and not on "
        "any other rank: possible silent data corruption"
    )
    _suspect(context, context.state.membership.workers[apart.worker], PART_APART, told)


def same_state(context: Context, committed: int, spent: dict[str, Spent]) -> None:
    """The state after one block of steps of all workers. Who holds other bits than most others of its shard is taken out; it
    gets its state from those."""
    generation, curves = context.state.membership.generation, context.transient(Curves)
    # Once in a generation: what differs goes on to differ in each block, and the same finding again would
    # look like another fault.
    if generation is None or curves.told_in == generation.number:
        return
    shards: dict[int, dict[str, int]] = {}
    for name, block in spent.items():
        rank = generation.rank_of(name)
        if block.state is not None and rank is not None:
            shards.setdefault(generation.members[rank].shard_index, {})[name] = block.state
    for sums in shards.values():
        found = checksums.apart(sums)
        if found is None:
            continue
        curves.told_in = generation.number
        for name in found.workers:
            _differs(context, committed, context.state.membership.workers[name], sums, found)


def _differs(
    context: Context, committed: int, worker: Worker, sums: dict[str, int], found: checksums.Apart
) -> None:
    others = ", ".join(name for name in sums if name != worker.name)
    if not found.proven:
        told = (
            f"after step {committed - 1} its state differs from that of {others}, and there is no majority that "
            "would show whose is right: possible silent data corruption"
        )
        _suspect(context, worker, STATE_APART, told)
        return
    agree = len(sums) - len(found.workers)
    told = (
        f"after step {committed - 1} its state differs from that of {agree} others of its shard: silent data "
        "corruption"
    )
    _proven(context, worker, STATE_APART, told)
    node = context.state.membership.nodes.get(worker.node)
    if node is not None and not on_trial(context, STATE_APART):
        cause = causes.StatesDiffer(step=committed, workers=found.workers, agree=agree)
        context.request(EvictWorkers(node, [worker], cause))


def miscomputed(context: Context, worker: Worker, cause: causes.GradientsDiffer) -> None:
    """A worker was taken out for a gradient that two others have proven wrong. What is at fault is still in the node."""
    if context.spec.health.watch:
        told = f"its gradient in step {cause.step} differs from that of {len(cause.agree)} others: silent data corruption"
        _proven(context, worker, GRADIENT_APART, told)


def _proven(context: Context, worker: Worker, rule: str, told: str) -> None:
    """The worker's successor may start on the same node, so its node is for a person, or is replaced."""
    node = context.state.membership.nodes.get(worker.node)
    if node is None or context.spec.health.replace_suspect or on_trial(context, rule):
        _suspect(context, worker, rule, told)
    else:
        # No finding, which would be the cause of the incident that follows: here the cause is known, and has a type.
        # What to do comes first: the text is cut where it is kept.
        notes.ask(context, node, rule, f"run `holdfast check --deep {node.name}`: of {worker.name}, {told}")


def brought(context: Context, worker: Worker, message: m.Failed) -> None:
    """A rank's own part was not finite, before anything was added to it."""
    if not context.spec.health.watch or message.step is None:
        return
    steps = context.state.health.brought.setdefault(worker.node, [])
    if message.step in steps:
        # A step that is computed again brings the same NaN, if the data or the script makes it. That is one
        # occurrence, not two.
        return  # the same once more: the data of that step, or the script
    steps.append(message.step)
    del steps[:-TIMES]
    told = f"its local gradient or loss of step {message.step} is not finite"
    # Three different steps on one node, and nobody else's: a script that diverges gives NaN on all nodes
    # sooner or later, so a second node clears the first.
    if len(steps) < TIMES or any(
        s for node, s in context.state.health.brought.items() if node != worker.node
    ):
        _say(context, worker, NOT_FINITE, Severity.WARNING, Remedy.WATCH, told)
    else:
        steps.clear()
        _suspect(
            context,
            worker,
            NOT_FINITE,
            f"{told}, at {TIMES} different steps and not on any other node: possible silent data corruption",
        )


def _suspect(context: Context, worker: Worker, rule: str, told: str) -> None:
    # Asking is the default. Nothing here proves a broken processor, and a deep check does.
    remedy = Remedy.REPLACE if context.spec.health.replace_suspect else Remedy.ASK
    _say(context, worker, rule, Severity.ERROR, remedy, f"{told}. Run `holdfast check --deep {worker.node}`")


def _say(
    context: Context,
    worker: Worker,
    rule: str,
    severity: Severity,
    remedy: Remedy,
    told: str,
    shared: bool = False,
) -> None:
    node = context.state.membership.nodes.get(worker.node)
    if node is None:
        return
    rank = (
        context.state.membership.generation.rank_of(worker.name)
        if context.state.membership.generation
        else None
    )
    subject = "" if shared or rank is None else f"rank {rank}"
    name = "" if shared else worker.name
    finding = Finding(
        rule=rule,
        severity=severity,
        remedy=remedy,
        source="worker",
        subject=subject,
        worker=name,
        evidence=told,
        shared=shared,
        dry_run=on_trial(context, rule),
    )
    findings.found(context, node, (finding,))
