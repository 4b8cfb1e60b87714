"""Compares workers with their peers: which one is slow, since when, and what it costs; and whose losses, gradients or state are
wrong.

The measurements are in `Peers`, which is no part of the state: a coordinator that takes over measures anew. What was found is
in the state.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from holdfast.coordinator.health import findings, notes
from holdfast.coordinator.kernel.context import Context, EvictWorkers, NoteWaits
from holdfast.coordinator.kernel.state import Slow, Worker
from holdfast.health import checksums, reductions
from holdfast.health.losses import Losses, WorkerLosses
from holdfast.health.reductions import Reductions
from holdfast.health.stragglers import StragglerChange, Stragglers
from holdfast.protocol import causes
from holdfast.protocol import messages as m
from holdfast.protocol.health import Condition, Finding, Remedy, Severity
from holdfast.protocol.phases import BLOCK_STEPS, Spent

LOSS_JUMP = "loss-jump"
PART_APART = "part-apart"
NOT_FINITE = "part-not-finite"
STATE_APART = "state-apart"
GRADIENT_APART = "gradient-apart"

TIMES = 3
"""At so many different steps a node alone brings what is not finite, until a person is asked for: by chance, as the
data's doing, that is one in the square of the nodes."""


# ---------------------------------------------------------------- silent corruption
# What losses and gradients say of the workers that brought them: a jump of the loss, and a node whose part is wrong again
# and again, which may be a processor that computes wrongly without noticing.


@dataclass
class Curves:
    """The losses and figures received so far. Not part of the state: a coordinator that takes over collects them anew."""

    losses: Losses = field(default_factory=Losses)
    parts: WorkerLosses = field(default_factory=WorkerLosses)
    told_in: int = -1
    """The generation in which replicas were last said to differ: whatever differs differs in every block from then on."""


def on_trial(context: Context, rule: str) -> bool:
    """The user put it there, by its name or a pattern as in `slow-*`."""
    return any(fnmatchcase(rule, pattern) for pattern in context.spec.health.dry_run)


def losses_heard(context: Context, worker: Worker, losses: tuple[m.ReportedStep, ...]) -> None:
    """Handles the losses of committed steps, as rank 0 reports them."""
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
            _report_losses(context, worker, LOSS_JUMP, Severity.WARNING, Remedy.WATCH, what, shared=True)


def compared(context: Context, spent: dict[str, Spent]) -> None:
    """Compares the times of one block of steps of all workers."""
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
    """Compares the checksums of the state after one block of steps. A worker whose bits differ from those of most others with
    the same shard is removed, and gets its state from them."""
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
    context: Context, committed: int, worker: Worker, sums: dict[str, int], found: checksums.DifferingReplicas
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
    """Handles the report that a worker's own part of the gradient was not finite before the reduction."""
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
        _report_losses(context, worker, NOT_FINITE, Severity.WARNING, Remedy.WATCH, told)
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
    _report_losses(
        context, worker, rule, Severity.ERROR, remedy, f"{told}. Run `holdfast check --deep {worker.node}`"
    )


def _report_losses(
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


SLOW_RANK = "slow-rank"
SLOW_NODE = "slow-node"
SLOW_REDUCTION = "slow-reduction"

WAITS_BLOCKS = 4
"""A block is looked at when all members have said it, or somebody is so many blocks further."""

KEPT = 64
"""Slow workers that are remembered."""

REPLACEMENT_S = 10.0
"""What the replacement of a worker is taken to cost, until one was seen."""


@dataclass(kw_only=True)
class Peers:
    """The measurements received so far, and the statistical tests on them."""

    generation: int = 0
    """The number of the one that `blocks` are of."""
    size: int = 0
    """How many members it has."""
    blocks: dict[int, dict[str, Spent]] = field(default_factory=dict)
    """First step to what each worker said."""
    looked: int = -1
    """First step of the newest block that was looked at; -1: none was."""
    tests: dict[int, Stragglers] = field(default_factory=dict)
    """By the number of micro-batches that workers compute: only those with the same number are compared."""
    reductions: Reductions = field(default_factory=Reductions)


def heard(context: Context, worker: Worker, spent: tuple[Spent, ...]) -> None:
    """Handles a member's report of where the time of its last steps went."""
    generation = context.state.membership.generation
    if not spent or generation is None or not context.spec.health.watch:
        return
    peers = context.transient(Peers)
    size = len(generation.members)
    # Another generation: other members, another rhythm. Blocks of two generations must never be compared with
    # each other.
    if peers.generation != context.state.membership.number:
        peers.generation, peers.blocks, peers.looked = context.state.membership.number, {}, -1
        peers.reductions = Reductions()
        _new_members(context, size)
    for block in spent:
        # A block that was looked at without this worker is over. Its late report would be a block of its own,
        # with one member.
        if block.first > peers.looked:
            peers.blocks.setdefault(block.first, {})[worker.name] = block
    newest = max(peers.blocks, default=0)
    for first in sorted(peers.blocks):
        # Waits for all members, though not for ever: one that hangs must not keep the others from being
        # compared.
        if len(peers.blocks[first]) < size and first > newest - WAITS_BLOCKS * BLOCK_STEPS:
            break
        peers.looked = first
        _look(context, first, peers.blocks.pop(first))


def _new_members(context: Context, size: int) -> None:
    """Another generation. Of another size, all compute something else than before."""
    peers, members = context.transient(Peers), {w.name: None for w in context.members()}
    if size != peers.size:
        peers.size, peers.tests = size, {}
    for test in peers.tests.values():
        test.keep(members)
    for slow in context.state.health.slow:
        if slow.until_step is None and (slow.worker not in members or not peers.tests):
            # A worker that left is no longer slow, and what it cost stays on record.
            slow.until_step = context.state.membership.committed


def _look(context: Context, first: int, spent_by_worker: dict[str, Spent]) -> None:
    """One block. Workers are compared with those that compute as many micro-batches as they do; who computes none, beside
    the replicas, with nobody."""
    by_load: dict[int, dict[str, Spent]] = {}
    for name, spent in spent_by_worker.items():
        if spent.micros:
            # Only equal loads compare. A worker with more micro-batches is slower by design, not by fault.
            by_load.setdefault(spent.micros, {})[name] = spent
    compared(context, spent_by_worker)
    same_state(context, first + BLOCK_STEPS, spent_by_worker)
    # Only with phases: without them a wait may be for anything, such as data.
    phased = [spent for spent in spent_by_worker.values() if spent.thread_s is None]
    reduction = context.transient(Peers).reductions.look(phased)
    if reduction is not None:
        _reduction(context, reduction)
    changes: list[StragglerChange] = []
    for micros, group in by_load.items():
        test = context.transient(Peers).tests.setdefault(micros, Stragglers())
        changes += test.look(first, {name: spent.own_s for name, spent in group.items()})
        for slow in context.state.health.slow:
            if slow.until_step is None and slow.worker in group:
                _cost(context, slow, group, test.ratio(slow.worker))
    _waits(context, by_load)
    for change in changes:
        if change.slow:
            _found(context, change, by_load[spent_by_worker[change.worker].micros])
        else:
            _over(context, change)


def _waits(context: Context, by_load: dict[int, dict[str, Spent]]) -> None:
    """By how much the block's steps would have been shorter without any wait for data, and then without the slow ones."""
    own = [spent for group in by_load.values() for spent in group.values()]
    if not own:
        return
    # Only the slowest counts: while it computes, the others' data comes for nothing.
    data_s = max(x.own_s for x in own) - max(x.own_s - x.data_s for x in own)
    excess = [
        group[slow.worker].own_s - _median(group, slow.worker)
        for slow in context.state.health.slow
        for group in by_load.values()
        if slow.until_step is None and slow.worker in group and len(group) > 1
    ]
    slow_s = max(0.0, max(excess, default=0.0) - data_s)
    if data_s > 0 or slow_s > 0:
        context.request(NoteWaits(data_s * BLOCK_STEPS, slow_s * BLOCK_STEPS))


def _cost(context: Context, slow: Slow, group: dict[str, Spent], ratio: float | None) -> None:
    """Another block in which the others waited for it."""
    own = group[slow.worker]
    excess_s = own.own_s - _median(group, slow.worker)
    slow.ratio = round(ratio, 3) if ratio is not None else slow.ratio
    slow.excess_s = round(excess_s, 6)
    slow.share = round(min(1.0, max(0.0, excess_s) / max(own.step_s, 1e-9)), 4)
    # What it has cost so far. A replacement is asked for only when that exceeds the price of one, so a worker
    # that is 2% slow for an hour is not replaced for a stall of ten seconds.
    slow.lost_s += max(0.0, excess_s) * BLOCK_STEPS
    wanted = context.spec.health.replace_slow
    # Without steps of a job's own a replacement is a restart of all, from a checkpoint of unknown age.
    if not context.state.membership.counts_steps:
        return
    if not wanted or slow.ratio < wanted or slow.pair:
        return
    if slow.lost_s >= slow.asked_s + _price_s(context):  # again and again, for it may not have been possible
        slow.asked_s = slow.lost_s
        _say(context, slow, Severity.ERROR, Remedy.REPLACE)


def _price_s(context: Context) -> float:
    """What a replacement costs: as long as this one took, if there was one."""
    # What replacements cost in this job. A large model with a slow restore needs a much slower worker to be
    # worth one.
    took = [
        i.first_commit_at_s - i.detected_at_s
        for i in context.state.incidents
        if i.first_commit_at_s is not None and i.needs_newcomer
    ]
    return max([context.state.membership.join_cost_s, *took]) or REPLACEMENT_S


def _found(context: Context, change: StragglerChange, group: dict[str, Spent]) -> None:
    s = context.state
    worker = s.membership.workers[change.worker]
    own = group[change.worker]
    excess_s = own.own_s - _median(group, change.worker)
    slow = Slow(
        worker=worker.name,
        node=worker.node,
        rank=s.membership.generation.rank_of(worker.name) if s.membership.generation else None,
        ratio=round(change.ratio, 3),
        since_step=change.since,
        found_step=s.membership.committed,
        part=_part(group, change.worker),
        excess_s=round(excess_s, 6),
        share=round(min(1.0, max(0.0, excess_s) / max(own.step_s, 1e-9)), 4),
        world=len(context.members()),
        pair=change.compared == 1,
    )
    s.health.slow = [*s.health.slow[-KEPT + 1 :], slow]
    _say(context, slow, Severity.WARNING, Remedy.WATCH)


def _over(context: Context, change: StragglerChange) -> None:
    for slow in context.state.health.slow:
        if slow.worker == change.worker and slow.until_step is None:
            slow.until_step = change.since
            _say(context, slow, Severity.INFO, Remedy.WATCH, Condition.HEALTHY)


def _reduction(context: Context, change: reductions.ReductionChange) -> None:
    """The communication itself takes longer than it did. Without a rank that stands out it is nobody's node."""
    members = context.members()
    # Without a rank that stands out it is nobody's node: the network as a whole, or another job on it.
    rank = change.rank if change.rank is not None and change.rank < len(members) else None
    node = context.state.membership.nodes.get(members[rank or 0].node)
    if node is None:
        return
    told = f"the reduction takes {change.now_s * 1e3:.3g} ms a step, {change.usual_s * 1e3:.3g} ms when the generation began"
    if change.slow:
        where = ""
        if rank is not None:
            before = _neighbour(context, rank)
            where = f"; the others wait longest for rank {rank}, which gets its part from rank {before}"
        told += (
            f", since step {change.since}, and no rank computes longer: the difference is {change.share:.0%} of the time{where}. "
            "Run `holdfast check --deep` to find a bad pair of nodes"
        )
    finding = Finding(
        rule=SLOW_REDUCTION,
        severity=Severity.WARNING if change.slow else Severity.INFO,
        remedy=Remedy.WATCH,
        source="peers",
        condition=Condition.FAULTY if change.slow else Condition.HEALTHY,
        subject="" if rank is None else f"rank {rank}",
        evidence=told,
        shared=rank is None,
        dry_run=on_trial(context, SLOW_REDUCTION),
    )
    findings.found(context, node, (finding,))


def _neighbour(context: Context, rank: int) -> int:
    """From whom a rank gets its part in gloo's ring: of those that hold the same shard."""
    generation = context.state.membership.generation
    assert generation is not None
    group = generation.replica_group(generation.members[rank].shard_index)
    # Gloo's ring sends from each rank to the one before it, among those that hold the same shard.
    return group[(group.index(rank) + 1) % len(group)]


def _say(
    context: Context, slow: Slow, severity: Severity, remedy: Remedy, condition: Condition = Condition.FAULTY
) -> None:
    node = context.state.membership.nodes.get(slow.node)
    if node is None:
        return
    rule, subject = SLOW_RANK, f"rank {slow.rank}"
    ours = {w.name for w in context.members() if w.node == slow.node}
    # All workers of a node are slow: one cause, so one finding about the node, and not eight about its ranks.
    if len(ours) > 1 and ours <= {x.worker for x in context.state.health.slow if x.until_step is None}:
        rule, subject = SLOW_NODE, "all ranks"
    finding = Finding(
        rule=rule,
        severity=severity,
        remedy=remedy,
        source="peers",
        condition=condition,
        subject=subject,
        worker=slow.worker if rule == SLOW_RANK else "",
        evidence=describe(slow)
        if condition is Condition.FAULTY
        else f"as fast as its peers since step {slow.until_step}",
        dry_run=on_trial(context, rule),
    )
    findings.found(context, node, (finding,))


def describe(slow: Slow) -> str:
    """A slow worker in words: how slow it is, in what, since when, and the cost."""
    peers = "the only other rank (which may be unusually fast)" if slow.pair else "its peers"
    return (
        f"computes {slow.ratio:.2f} times as long as {peers}, {slow.excess_s * 1e3:.3g} ms more a step, mostly in "
        f"{slow.part}, since step {slow.since_step}; the others wait {slow.share:.0%} of the time: "
        f"{slow.share * slow.world:.2g} worker-hours an hour"
    )


def _median(group: dict[str, Spent], without: str) -> float:
    return statistics.median(spent.own_s for name, spent in group.items() if name != without)


def _part(group: dict[str, Spent], worker: str) -> str:
    """The phase in which it needs most more than its peers."""
    own = group[worker]
    if own.thread_s is not None:
        return "the training thread"
    others = [spent for name, spent in group.items() if name != worker]

    def excess_s(field: str) -> float:
        values: list[float] = [getattr(spent, field) for spent in others]
        return float(getattr(own, field)) - statistics.median(values)

    parts = {
        "data_s": "loading data",
        "forward_s": "the forward pass",
        "backward_s": "the backward pass",
        "update_s": "the update",
    }
    return parts[max(parts, key=excess_s)]
