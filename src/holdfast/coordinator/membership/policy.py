"""Decisions as pure functions: the members of a generation, how a broken step is resolved, which worker is at fault, and which
one holds up a script that does not know of Holdfast."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from holdfast.coordinator.kernel.incidents import EXIT, SIGNAL, ScriptFault
from holdfast.coordinator.kernel.state import TRAINED_S, Failure, RootCause
from holdfast.coordinator.membership import rank_assignment
from holdfast.health import stacks as health_stacks
from holdfast.protocol.messages import Exited, Generation, WorkerView
from holdfast.protocol.phases import OUTSIDE_PHASES, WAITING_PHASES, GroupReading, Phase


class Report(msgspec.Struct, frozen=True):
    """What a surviving member reports that it holds, after its generation ended."""

    committed: int | None
    """Committed steps of its state; None: no usable state."""
    prepared: bool = False
    """It holds the complete reduced gradient of step `committed`."""


class StepResolution(msgspec.Struct, frozen=True):
    """How the step in flight is resolved when a generation ends."""

    start: int | None
    """Committed steps that all go on from; None: no survivor holds state."""
    apply: frozenset[str] = frozenset()
    """Workers that commit their prepared step now."""
    restore: frozenset[str] = frozenset()
    """Workers that need the state from a holder."""
    holders: frozenset[str] = frozenset()
    """Workers that have the state of `start`, those that apply first among them."""


def resolve(reports: Mapping[str, Report]) -> StepResolution:
    """Resolves the step in flight: it is committed if any member committed it or if all could, and computed again otherwise.
    docs/architecture/step.md has the argument."""
    # The vote. Every worker made its update only after it knew that all others could make it too
    # ("prepared"): so if anyone committed, everyone that is alive has the gradient, and the step can be
    # completed everywhere. If nobody committed, either all have it (commit together) or some do not (compute
    # it again). There is no third case, and that is why a fault costs at most the step in flight.
    held = {w: r for w, r in reports.items() if r.committed is not None}
    if not held:
        return StepResolution(start=None, restore=frozenset(reports))
    newest = max(r.committed for r in held.values() if r.committed is not None)
    at_newest = {w for w, r in held.items() if r.committed == newest}
    # All stand at the same step and all hold its complete reduced gradient. The step counts, although nobody
    # had committed: dropping it would be correct as well, but would cost a step on every fault in the window
    # between reduction and update.
    if len(at_newest) == len(held) and all(r.prepared for r in held.values()):
        apply, start = frozenset(held), newest + 1
        holders = apply
    else:
        # Somebody is one step ahead, so the step happened. Those that prepared it apply it now and are equal
        # bit by bit, because all reduced the same sum in the same order. One without it cannot make it up,
        # and gets the state from a holder.
        apply = frozenset(w for w, r in held.items() if r.committed == newest - 1 and r.prepared)
        holders, start = apply | at_newest, newest
    return StepResolution(start=start, apply=apply, restore=frozenset(reports) - holders, holders=holders)


def assign_ranks(
    previous: Generation | None,
    survivors: Sequence[str],
    newcomers: Sequence[str],
    paths: Mapping[str, rank_assignment.Path] | None = None,
) -> list[str]:
    """Workers in the order of their new ranks.

    At an unchanged world size survivors keep their ranks and newcomers fill the holes: the order of every
    reduction stays what it was, so a replaced replica changes no bit. Otherwise survivors close ranks, and
    those who stand close together get ranks that follow each other.

    Args:
        paths: where they and the members before stand; None: of no node that is known.
    """
    # Ranks decide the order in which gradients are added, and floating-point addition depends on the order. A
    # survivor that changed its rank would change the loss in the last bits, and the promise of a
    # bit-identical curve with it.
    old = {m.worker: m.rank for m in previous.members} if previous else {}
    staying = sorted(survivors, key=lambda w: old.get(w, len(old)))
    size = len(survivors) + len(newcomers)
    # At another size the order of the sum is another one anyway, so nothing is gained by holes; closing them
    # keeps ranks dense, which every collective needs.
    if previous is None or size != len(previous.members):
        everyone = [*staying, *newcomers]
        return everyone if paths is None else rank_assignment.in_order(everyone, paths)
    slots: list[str | None] = [None] * size
    extra: list[str] = []
    for worker in staying:
        rank = old.get(worker)
        if rank is None:
            extra.append(worker)
        else:
            slots[rank] = worker
    # A survivor without an old rank comes before newcomers: it holds a state already, so it can be a donor
    # for them.
    if paths is not None:
        for some in (extra, newcomers):
            vacant = {r: paths[previous.members[r].worker] for r, w in enumerate(slots) if w is None}
            for rank, worker in rank_assignment.match(vacant, some, paths).items():
                slots[rank] = worker
        return [worker for worker in slots if worker is not None]
    waiting = iter([*extra, *newcomers])
    return [worker if worker is not None else next(waiting) for worker in slots]


class HangVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The workers that hold up the others, and the evidence."""

    workers: tuple[str, ...]
    """Empty: nobody differs."""
    reason: str
    """For people."""
    one_of: bool = False
    """One of them does, and which cannot be told."""
    collective: str | None = None
    """At level 0 and 1: what they have not entered while others wait in it, as `all_reduce 21 of default_pg`; None: not known."""
    stood_at_step: int | None = None
    """At level 0 and 1: optimizer steps in this start of the one that has fewest; None: not known."""
    again: bool = False
    """Nor can be told whether it is any of them, before another generation has failed in the same way."""


# ---------------------------------------------------------------- positions
# Who holds up scripts that do not know of Holdfast: how far each rank is, in optimizer steps and collectives. Pure.
#
# Such a script says nothing of the phases of its steps. But its optimizer steps are counted, and torch remembers which
# collective each rank entered last. All members of a group enter the same ones in the same order, so a rank that has
# entered fewer is waited for by those that stand in the next one.


def find_culprits(
    views: Sequence[WorkerView],
    allowed_s: Mapping[str, float],
    stacks: Mapping[str, str],
    complete: bool = True,
    ranks: Mapping[str, int] | None = None,
) -> HangVerdict:
    """Who of the members of a generation that stands still is the odd one out.

    In this order: stopped processes; workers that have not even begun to join; workers that stand still while they
    compute, when others wait; while they connect, who calls nobody; two that wait for each other; the worker that is
    furthest behind among those that wait; the ones whose stacks differ from those of most.

    allowed_s: per worker, how long it may stand still where it is. complete: every member was seen; without that
    nobody is called behind, for the one that all wait for may be the one that was not seen. ranks: of the workers.
    """
    # The order of these tests is the order of certainty. A stopped process is a fact that the kernel reports;
    # everything below is an inference from who waits for whom. A test further up must never be wrong where
    # one further down would be right.
    stopped = tuple(v.worker for v in views if v.process in ("T", "t", "X", "Z"))
    if stopped:
        return HangVerdict(workers=stopped, reason="its process is stopped")
    # Each worker has its own limit: the first step compiles, a checkpoint may wait for a slow tier. One limit
    # for all would either kill compiling workers or find real hangs minutes late.
    still = [v for v in views if v.idle_s >= allowed_s[v.worker]]
    # Its agent passed JoinGeneration on and the worker did not act on it. It is at fault for certain,
    # although its peers, who wait in the connecting phase, look just as still.
    absent = tuple(v.worker for v in still if v.page.generation < v.formed)
    if absent:
        return HangVerdict(workers=absent, reason="did not act on the order to join the generation")
    waiting = [v for v in views if _waits(v)]
    busy = [v for v in still if not _waits(v)]
    # One computes while others wait for it. Waiting itself is never a fault: everyone who waits has told the
    # page for whom, so the chain ends at somebody who does not wait.
    if busy and waiting and all(v.page.phase in OUTSIDE_PHASES for v in busy):
        return HangVerdict(workers=tuple(v.worker for v in busy), reason=_OUTSIDE)
    if busy and waiting:
        names = ", ".join(sorted({Phase(v.page.phase).name.lower() for v in busy}))
        return HangVerdict(
            workers=tuple(v.worker for v in busy),
            reason=f"makes no progress in {names} while others wait for it",
        )
    # From here on the verdict is "who is furthest behind", a comparison. If a member was not seen, it may be
    # the one that is behind, and the worst of those that were seen would be taken out for nothing.
    if not complete:
        return HangVerdict(workers=(), reason="not every worker reported its position")
    if len(busy) == len(views) == 1:
        return HangVerdict(
            workers=(busy[0].worker,), reason=f"makes no progress in {Phase(busy[0].page.phase).name.lower()}"
        )
    # Somebody still moves. What looks like a hang may be the others' wait for a slow step, and time will
    # tell: the next stall report asks again.
    at_work = {v.page.phase for v in views if v not in still and not _waits(v)}
    if at_work:
        return HangVerdict(
            workers=(),
            reason=f"some workers are still busy: {', '.join(sorted(Phase(p).name.lower() for p in at_work))}",
        )
    connecting = [v for v in still if v.page.phase in _CONNECTING and _waits(v)]
    if len(connecting) == len(views) and (verdict := _unreached(connecting, ranks or {})):
        return verdict
    if waiting and len(still) == len(views):
        # (generation, committed, phase, collectives) grows along a step, so the smallest is where the step
        # stopped. All workers run the same sequence, therefore whoever is behind holds up everyone who is
        # ahead, and never the other way round.
        least = min(_advance(v) for v in waiting)
        behind = tuple(v.worker for v in waiting if _advance(v) == least)
        pair = _waiting_for_each_other(waiting, ranks or {})
        # Two that wait for each other are both "behind", and neither is stuck by itself: packets between them
        # are lost. Taking out both would cost two workers where one is enough, so it is one of them, and the
        # other one's turn comes if the hang does.
        if pair and set(behind) >= set(pair):
            names = " and ".join(str((ranks or {})[w]) for w in pair)
            return HangVerdict(
                workers=pair,
                reason=f"ranks {names} wait for each other, so the network between them is suspect",
                one_of=True,
            )
        if len(behind) < len(waiting):
            workers = _first_behind(behind, waiting, ranks or {})
            return HangVerdict(workers=workers, reason="waits at an earlier point than the others")
    # Stacks are compared only of a job that stands still as a whole. Of a job that moves they are taken at
    # different moments, differ by chance, and the odd one would be innocent.
    if len(still) < len(views):  # they may have gone on while they were looked at, each with another stack
        return HangVerdict(workers=(), reason="some workers make progress again")
    return odd_stack(views, stacks)


_OUTSIDE = (
    "makes no progress between two steps, in the script's own code, while others wait for it; if this code takes "
    "long on purpose, put it into `with run.relaxed_watchdog():`"
)


_CONNECTING = frozenset({Phase.JOIN, Phase.TRANSFER})
"""Phases in which a worker that waits for a rank has called it, or waits for its call."""


def _waits(view: WorkerView) -> bool:
    """For others. A newcomer that fetches its state does so until the donor has sent all."""
    page = view.page
    return page.phase in WAITING_PHASES or (page.phase == Phase.TRANSFER and page.waits_for >= 0)


def _unreached(connecting: Sequence[WorkerView], ranks: Mapping[str, int]) -> HangVerdict | None:
    """The members do not get connected. Whoever is missed is asked, too: it may be calling those who miss it, and their
    ports do not take its call. So only who calls nobody is at fault for certain. Where each one misses another, it may be
    either's port or the network, and whatever blocks it may have gone by the next generation; if it has not, the one
    that most of them miss is taken, and of a pair one. None: nobody says whom it waits for."""
    worker_of = {rank: worker for worker, rank in ranks.items()}
    misses = {v.worker: worker_of.get(v.page.waits_for, "") for v in connecting}
    # Nobody waits for one that fetches its state by its own doing: its donors have not sent it yet.
    fetching = {v.worker for v in connecting if v.page.phase == Phase.TRANSFER}
    missed = Counter(w for w in misses.values() if w and w not in fetching)
    if not missed:
        return None
    # Being missed is no proof: a worker that misses others may itself be unreachable. Calling nobody is a
    # proof, because everyone starts to call at once.
    if deaf := tuple(sorted(w for w in missed if not misses.get(w))):
        return HangVerdict(workers=deaf, reason="does not open a connection while others wait for it")
    most = tuple(sorted(w for w in missed if missed[w] == max(missed.values())))
    missing = ", ".join(
        f"rank {ranks[a]} waits for rank {ranks[b]}" for a, b in sorted(misses.items()) if b and a in ranks
    )
    return HangVerdict(
        workers=most,
        reason=f"the workers cannot connect to each other: {missing}",
        one_of=len(most) > 1,
        again=True,
    )


def _advance(view: WorkerView) -> tuple[int, int, int, int]:
    page = view.page
    return page.generation, page.committed, page.phase, page.collectives


def _waiting_for_each_other(waiting: Sequence[WorkerView], ranks: Mapping[str, int]) -> tuple[str, ...]:
    """The only two of several workers of which each waits for the other's words: what they send does not arrive."""
    # Exactly one pair, and more than two workers. With two workers each waits for the other in any hang, so
    # that would say nothing.
    worker_of = {rank: worker for worker, rank in ranks.items()}
    waits_for = {v.worker: worker_of.get(v.page.waits_for, "") for v in waiting}
    pairs = {tuple(sorted((a, b))) for a, b in waits_for.items() if waits_for.get(b) == a}
    return pairs.pop() if len(pairs) == 1 and len(waiting) > 2 else ()


def _first_behind(
    behind: tuple[str, ...], waiting: Sequence[WorkerView], ranks: Mapping[str, int]
) -> tuple[str, ...]:
    """The workers that are behind, except those that wait for another of them with a lower rank."""
    # Many members hear each other through a tree, in which a parent has a lower rank than its children
    # (`train.member_tree`). When a result is lost on its way down, a whole subtree is behind, and only its uppermost member has
    # missed it: each of the others waits for its parent, which is behind as well. The one with the lowest rank always stays.
    worst = {ranks[w] for w in behind if w in ranks}
    waits_for = {v.worker: v.page.waits_for for v in waiting}
    return tuple(w for w in behind if not (waits_for[w] in worst and waits_for[w] < ranks.get(w, 0)))


def odd_stack(views: Sequence[WorkerView], stacks: Mapping[str, str]) -> HangVerdict:
    """A verdict on workers whose stacks differ from those of most others, for a hang in which no worker makes progress."""
    groups = health_stacks.cluster({v.worker: stacks.get(v.worker, "") for v in views})
    odd = health_stacks.odd_ones(groups)
    return (
        HangVerdict(workers=(), reason="no worker differs from the others")
        if odd is None
        else HangVerdict(workers=odd.workers, reason=odd.reason)
    )


class NodeFault(msgspec.Struct, frozen=True):
    """A failure that occurred on one node only."""

    node: str


def gang_fault(failures: Sequence[Failure], nodes: int = 1) -> ScriptFault | NodeFault | None:
    """The same for level 0, where each failure ended an attempt.

    Looked at are attempts that followed each other and ended with the same error at the same step (None: before
    the first that was counted). An exception in two of them is the script's, if workers of two nodes raised it, in one
    attempt or in several, or the job has a single node; a process that just ends says less, so three are needed, none of
    which had trained for an hour: machines of a job that runs for months kill a process now and then. Three in eight
    attempts on one node of several show that it is the node's.
    """
    if not failures:
        return None
    last = failures[-1]
    exception = not last.signature.startswith((SIGNAL, EXIT))
    run: list[Failure] = []
    # One failure per attempt, the newest attempts first, without a gap. At level 0 an error kills all workers
    # of an attempt, and they would be counted as many witnesses where there was one event.
    for failure in reversed(failures):
        if failure.lasted_s >= TRAINED_S and not exception:
            break
        if run and failure.generation == run[-1].generation:
            continue
        if run and failure.generation != run[-1].generation - 1:
            break
        if (failure.step, failure.signature) != (last.step, last.signature):
            break
        run.append(failure)
    # An exit code or a signal may be the machine's, see `script_fault`; so one attempt more is needed before
    # a person is told that the script is broken.
    everywhere = len({node for f in run for node in (f.node, *f.also_on)}) >= min(2, nodes)
    if everywhere and len(run) >= (2 if exception else 3):
        return ScriptFault(f"the same error in {len(run)} attempts in a row")
    key = (last.node, last.step, last.signature)
    # Not in a row this time: a bad node fails now and then, with attempts in between in which it was a spare
    # or got through.
    recent = [f for f in failures if f.generation > last.generation - 8]
    attempts = {f.generation for f in recent if (f.node, f.step, f.signature) == key}
    return NodeFault(last.node) if len(attempts) >= 3 and nodes > 1 else None


def refuses_the_job(refused: bool, told_to_end: bool, trained: bool, got_past: bool) -> bool:
    """Whether a worker's error ends the job at once, instead of being handled like any other failure.

    refused: Holdfast refused what the script asks for. told_to_end: the worker was to end anyway. trained: the job has trained
    in this start. got_past: a worker waits to become a member.
    """
    # Until the job has trained, a refusal needs no second witness. Nothing is lost when the job ends, and whoever
    # started it reads at once what to change. A job that trains, or a worker that got past this place, proves that
    # what the script asks for can be done. Then the refusal is about one node, which may have another version of a
    # library, and must not end the others' work.
    return refused and not told_to_end and not trained and not got_past


def raised(root_cause: RootCause) -> str:
    """The last line of the traceback, which names the exception; empty: none was reported."""
    lines = root_cause.traceback.strip().splitlines()
    return lines[-1] if lines else ""


def failure_signature(root_cause: RootCause, exited: Exited) -> str:
    """The text by which two failures are compared: the exception if one was reported, else how the process ended."""
    if root_cause.traceback:
        return raised(root_cause)
    return f"{SIGNAL} {-exited.code}" if exited.code < 0 else f"{EXIT} {exited.code}"


def find_culprits_by_position(
    views: Sequence[WorkerView],
    allowed_s: Mapping[str, float],
    stacks: Mapping[str, str],
    complete: bool = True,
    ranks: Mapping[str, int] | None = None,
) -> HangVerdict:
    """Who of the workers of a script at level 0 or 1 the others wait for.

    In this order: stopped processes; workers that have not entered a collective in which others wait, and wait for
    nobody themselves; a worker that does not answer while all others wait in a collective of all ranks; the fewest
    optimizer steps; the ones whose stacks differ from those of most. Arguments as of `policy.find_culprits`.
    """
    verdict = _judge(views, allowed_s, stacks, complete, len(ranks or {}))
    # 0 is not known: a rank in its first step, or a script without torch's optimizers.
    steps = [v.page.committed for v in views if v.worker in verdict.workers and v.page.committed]
    return msgspec.structs.replace(verdict, stood_at_step=min(steps, default=None))


def _judge(
    views: Sequence[WorkerView],
    allowed_s: Mapping[str, float],
    stacks: Mapping[str, str],
    complete: bool,
    world: int,
) -> HangVerdict:
    # Of a stopped process no collective is known. It may have been stopped inside of the one in which the others wait.
    stopped = tuple(v.worker for v in views if v.process in ("T", "t", "X", "Z"))
    if stopped:
        return HangVerdict(workers=stopped, reason="its process is stopped")
    # Everything below compares. The one that was not seen may be the one that all wait for, and one that still
    # moves will soon be where the others are.
    if not complete:
        return HangVerdict(workers=(), reason="not every worker reported its position")
    if any(v.idle_s < allowed_s[v.worker] for v in views):
        return HangVerdict(workers=(), reason="some workers still do optimizer steps")
    waiting = _waiting(views, stacks)
    return (
        _behind_in_collectives(views, waiting)
        or _without_answer(views, waiting, world)
        or _behind_in_steps(views, waiting)
        or odd_stack(views, stacks)
    )


def _waiting(views: Sequence[WorkerView], stacks: Mapping[str, str]) -> frozenset[str]:
    """Workers that wait for others: by what torch says, or by where their main thread stands. (Messages between two ranks
    are in no record of gloo's.)"""
    groups = health_stacks.cluster({v.worker: stacks.get(v.worker, "") for v in views})
    by_stack = {w for g in groups if g.waits for w in g.workers}
    return frozenset(by_stack | {v.worker for v in views if any(g.waits for g in v.groups or ())})


@dataclass
class _Group:
    """What all of its members that answered say of one process group."""

    readings: dict[str, GroupReading] = field(default_factory=dict)
    """By worker."""

    @property
    def furthest(self) -> GroupReading | None:
        """Of those that wait in it, the one that is furthest. None: nobody waits there."""
        # Whoever is further without waiting proves nothing: a broadcast is complete for its source long before all
        # have entered it.
        return max((r for r in self.readings.values() if r.waits), key=lambda r: r.entered, default=None)


def _named(at: GroupReading) -> str:
    return f"{at.operation or 'collective'} {at.entered} of {at.label}"


def _groups(views: Sequence[WorkerView]) -> list[_Group]:
    """In an order that does not depend on who answered first."""
    found: dict[str, _Group] = {}
    for view in views:
        for reading in view.groups or ():
            found.setdefault(reading.group, _Group()).readings[view.worker] = reading
    return [found[name] for name in sorted(found)]


def _behind_in_collectives(views: Sequence[WorkerView], waiting: frozenset[str]) -> HangVerdict | None:
    """A chain of waiting ends at somebody who waits for nobody. Where it does not end, because ranks wait for each other in
    different groups, nobody is to be told from the others by this."""
    behind: dict[str, str] = {}
    for group in _groups(views):
        at = group.furthest
        if at is None:
            continue
        for worker, reading in group.readings.items():
            # Who waits elsewhere is held up itself, and is no cause. Named here, it would be replaced, and
            # the job would hang again at the one for which it waits.
            if reading.entered < at.entered and worker not in waiting:
                behind.setdefault(worker, _named(at))
    if not behind:
        return None
    workers = tuple(v.worker for v in views if v.worker in behind)
    collective = behind[workers[0]]
    return HangVerdict(
        workers=workers, reason=f"has not entered {collective}, in which others wait", collective=collective
    )


def _without_answer(views: Sequence[WorkerView], waiting: frozenset[str], world: int) -> HangVerdict | None:
    """One does not say where it is: it may hold its interpreter, which a thread that waits in a collective does not. If all
    others stand in the same collective of all ranks, that is what it has not entered."""
    silent = tuple(v.worker for v in views if v.groups is None)
    # Two that are silent cannot be told apart: the one may be held up by the other, and a healthy worker
    # would be ended.
    if len(silent) != 1 or silent[0] in waiting:
        return None
    for group in _groups(views):
        at = group.furthest
        if at is None or at.size != world or len(group.readings) != world - 1:
            continue
        if all(r.waits and r.entered == at.entered for r in group.readings.values()):
            reason = f"did not report its position, while all others wait in {_named(at)}"
            return HangVerdict(workers=silent, reason=reason, collective=_named(at))
    return None


def _behind_in_steps(views: Sequence[WorkerView], waiting: frozenset[str]) -> HangVerdict | None:
    """Ranks that train together make their optimizer steps together."""
    # A rank without any has no optimizer of torch's, or none that steps: it is not behind.
    steps = {v.worker: v.page.committed for v in views if v.page.committed}
    if not steps or min(steps.values()) == max(steps.values()):
        return None
    least, most = min(steps.values()), max(steps.values())
    behind = tuple(w for w, count in steps.items() if count == least and w not in waiting)
    if not behind:
        return None
    return HangVerdict(workers=behind, reason=f"did {least} optimizer steps, others {most}")
