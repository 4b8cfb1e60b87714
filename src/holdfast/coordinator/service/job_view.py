"""A job as its status (`protocol.job_view`), its report and the page show it, made of the core's state. A figure that appears
in several of them is computed by one function."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from holdfast.checkpoint.policy import Retention
from holdfast.coordinator.kernel import incidents
from holdfast.coordinator.kernel.index import PhaseIndex
from holdfast.coordinator.kernel.state import (
    CoreState,
    Incident,
    JobPhase,
    Node,
    NodePhase,
    RootCause,
    Slow,
    Worker,
    WorkerPhase,
)
from holdfast.coordinator.membership import queries, resize, wall_time
from holdfast.coordinator.service.all_starts import goodput_totals, time_shares, unknown_classes
from holdfast.coordinator.service.tally import StepSummary
from holdfast.coordinator.storage.queries import has_all, how_far
from holdfast.protocol import units
from holdfast.protocol.job_report import (
    FinalState,
    InMemory,
    JobReport,
    ReportSteps,
    ReportWorld,
    SnapshotCounts,
)
from holdfast.protocol.job_view import (
    Goodput,
    HealthView,
    IncidentView,
    JobView,
    Logged,
    NodeRow,
    Pace,
    RootCauseView,
    SavingView,
    SlowRank,
    SnapshotView,
    StepCounts,
    TierView,
    TimeShares,
    WorkerRow,
)
from holdfast.protocol.snapshots import DurableTier

INCIDENTS_SHOWN = 20
UNREAD_SHOWN = 8
OPEN_SHOWN = 8
SLOW_SHOWN = 20
RANKS_AT_ONCE = 500
"""So many workers are looked at before others have their turn: half a millisecond."""
_STATE_WORDS = {
    "member": "training",
    "ready": "spare",
    "parked": "recovering",
    "attached": "building the model",
}


def build_status(state: CoreState, now: float) -> JobView:
    """The job at this moment."""
    members = state.membership.generation.members if state.membership.generation else ()
    ranks = {x.worker: x.rank for x in members}
    latest = Latest()
    for worker in state.membership.workers.values():
        latest.add(worker, worker.name in ranks)
    return msgspec.structs.replace(
        status_head(state, now, *latest.told()),
        nodes=[node_row(n) for n in state.membership.nodes.values()],
        workers=[
            worker_row(state, w, ranks.get(w.name))
            for w in state.membership.workers.values()
            if w.phase is not WorkerPhase.GONE
        ],
    )


def status_left(state: CoreState, now: float, last_step: int | None) -> JobView:
    """The job as its coordinator left it, of which nothing runs any more. last_step: the newest in the ledger."""
    view = build_status(state, now)
    phase, outcome = how_left(state)
    return msgspec.structs.replace(view, phase=phase, outcome=outcome, step=newest_step(view.step, last_step))


def how_left(state: CoreState) -> tuple[str, str]:
    """Phase and outcome of a job of which nothing runs any more."""
    # A coordinator that ends a job writes the outcome before it leaves. There is none: it was killed.
    if state.membership.outcome is None:
        return JobPhase.ENDED.value, "killed"
    return state.membership.phase.value, state.membership.outcome


def newest_step(step: int | None, last_step: int | None) -> int | None:
    """Committed steps: those of the state, which is written when something happens, or those of the ledger."""
    told = None if last_step is None else last_step + 1
    return max((x for x in (step, told) if x is not None), default=None)


def status_head(state: CoreState, now: float, loss: float | None, median_s: float | None) -> JobView:
    """The status but for the rows of nodes and workers. It costs the same in a large job as in a small one."""
    membership = state.membership
    return JobView(
        job=state.spec.name,
        phase=membership.phase.value,
        outcome=membership.outcome,
        reason=membership.stop_reason,
        cause=membership.stop_cause,
        level=membership.level,
        generation=membership.number,
        world=membership.generation.strength if membership.generation else 0,
        target=state.target,
        step=state.step,
        until=membership.until,
        pace=pace_of(state, now),
        steps=step_counts(state),
        goodput=goodput_of(state, now),
        loss=loss,
        median_s=median_s,
        t_s=round(now - state.began_s, 3),
        health=HealthView(
            asks=list(state.health.asks),
            # A copy: who compares two moments must not be given the same dict for both.
            quarantine=dict(state.health.quarantine),
        ),
        incidents=[_incident(state, i) for i in state.incidents[-INCIDENTS_SHOWN:]],
        slow=[slow_rank(x) for x in state.health.slow if x.until_step is None],
        figures=logged(state),
        blame=root_cause_view(membership.root_cause) if membership.root_cause else None,
        saving=saving(state, now),
    )


def _incident(state: CoreState, incident: Incident) -> IncidentView:
    return incidents.describe(state, incident, IncidentView)


def node_row(node: Node) -> NodeRow:
    """A node in the status."""
    return NodeRow(
        node=node.name,
        host=node.host,
        place=list(node.place),
        alive=node.alive,
        failures=node.failures,
        left=node.left and not node.alive,
        held=node.held or None,
        identity=node.identity,
        unknown=sorted(node.health.unknown) if node.alive else [],
    )


def worker_row(state: CoreState, worker: Worker, rank: int | None) -> WorkerRow:
    """A worker in the status. rank: None: it is no member."""
    restoring = is_restoring(state, worker)
    return WorkerRow(
        worker=worker.name,
        node=worker.node,
        rank=rank,
        state="restoring" if restoring else worker.phase.value,
        restored=worker.restored if restoring else None,
        step=worker.committed,
        log=worker.log,
    )


def root_cause_view(found: RootCause) -> RootCauseView:
    """A root cause for the status, with the cause in words."""
    return RootCauseView(
        cause=str(found.cause),
        rank=found.rank,
        node=found.node,
        step=found.step,
        traceback=found.traceback,
        tail=found.tail,
        log=found.log,
        cause_kind=found.cause.kind,
    )


class Latest:
    """Of all workers, what the head of the status tells of their steps. `add` takes them in the job's order."""

    def __init__(self) -> None:
        self._loss: float | None = None
        self._loss_of_member: float | None = None
        self._median_s: float | None = None

    def add(self, worker: Worker, is_member: bool) -> None:
        """One more."""
        # Spares also report a loss, which they had when they last trained: it counts only where no member has one.
        if worker.loss is not None:
            if is_member:
                self._loss_of_member = worker.loss
            else:
                self._loss = worker.loss
        # The slowest member's: the others wait for it.
        if is_member and worker.median_s is not None:
            self._median_s = max(self._median_s or 0.0, worker.median_s)

    def told(self) -> tuple[float | None, float | None]:
        """Loss and median time of a step, as `status_head` takes them."""
        return self._loss if self._loss_of_member is None else self._loss_of_member, self._median_s


def is_restoring(state: CoreState, worker: Worker) -> bool:
    """It is a member, and fetches the state. At level 0 it is known only of what takes its time."""
    if worker.phase is not WorkerPhase.MEMBER:
        return False
    if not state.membership.counts_steps:
        return worker.restored is not None and worker.restored[0] < worker.restored[1]
    generation, assignment = state.membership.generation, state.membership.assignments.get(worker.name)
    if generation is None or assignment is None or not assignment.restore:
        return False
    # What it says when it has the state is lost with a coordinator that is replaced just then; a step is not.
    trains = worker.committed is not None and worker.committed > generation.start
    return worker.joined_generation < state.membership.number and not trains


def saving(state: CoreState, now: float) -> SavingView:
    """What is saved where, and how old it is."""
    complete = [s for s in state.storage.snapshots if s.complete]
    newest = max(complete, key=lambda s: (s.step, s.generation), default=None)
    snapshot = None
    if newest is not None:
        blobs = {h.copy.shard.blob.xxh3: h.copy.shard.blob.nbytes for h in newest.shards}
        complete_s = newest.complete_s or now
        snapshot = SnapshotView(
            step=newest.step,
            nodes=min((len(set(h.nodes)) for h in newest.shards), default=0),
            nbytes=sum(blobs.values()),
            took_s=round(complete_s - newest.began_s, 4),
            age_s=round(now - complete_s, 3),
        )
    tiers = [_tier(state, tier.url, now) for tier in state.spec.saving.tiers]
    return SavingView(snapshot=snapshot, skipped=state.storage.skipped, tiers=tiers)


def _tier(state: CoreState, url: str, now: float) -> TierView:
    last = state.storage.stored.get(url)
    there = last is not None and last.took_s is not None
    under_way = next((s for s in state.storage.storing if s.tier == url and not s.void), None)
    return TierView(
        url=url,
        step=last.step if last is not None and there else None,
        age_s=round(now - last.began_s, 3) if last is not None and there else None,
        took_s=last.took_s if last is not None else None,
        under_way=under_way.step if under_way else None,
        written=how_far(under_way) if under_way else None,
        failing=url in state.storage.failing_tiers,
        slow=any(s.tier == url and s.slow for s in state.storage.storing),
    )


def pace_of(state: CoreState, now: float) -> Pace:
    """How fast the job gets on, and when it will be done. Of an ended job nothing is to come."""
    rate, until = wall_time.steps_per_s(state, now), state.membership.until
    left = None
    if until and state.membership.phase is not JobPhase.ENDED:
        left = max(0, until - (state.step or 0))
    return Pace(
        steps_per_s=None if rate is None else round(rate, 6),
        until=until,
        left=left,
        eta_s=None if left is None or not rate else round(left / rate, 3),
    )


def step_counts(state: CoreState, committed: int | None = None) -> StepCounts:
    """committed: at level 2, what the ledger has."""
    if state.membership.counts_steps:
        lost = state.membership.lost_steps
        return StepCounts(
            committed=state.membership.committed,
            lost=lost,
            computed=None if committed is None else committed + lost,
        )
    counted = state.membership.counted
    known = counted.known and counted.base is not None
    # A script without torch's optimizers has no count.
    computed = counted.earlier + state.membership.committed or None
    if not state.membership.number:
        computed = 0  # nothing was ever started
    lost_known = counted.lost if known else None
    return StepCounts(
        committed=None if computed is None or lost_known is None else computed - lost_known,
        lost=lost_known,
        computed=computed,
    )


def slow_rank(slow: Slow) -> SlowRank:
    """A slow rank in the status and the report."""
    return SlowRank(
        rank=slow.rank,
        node=slow.node,
        worker=slow.worker,
        ratio=slow.ratio,
        part=slow.part,
        since_step=slow.since_step,
        found_step=slow.found_step,
        until_step=slow.until_step,
        excess_s=slow.excess_s,
        share=slow.share,
        worker_hours_per_hour=round(slow.share * slow.world, 3),
        lost_s=round(slow.lost_s, 3),
    )


def logged(state: CoreState) -> dict[str, Logged]:
    """The newest value of each name that the script logs."""
    return {name: Logged(step=step, value=value) for name, (step, value) in state.membership.figures.items()}


def goodput_of(state: CoreState, now: float) -> Goodput:
    """Over all starts of the job's workers."""
    recent = wall_time.recent(state, now)
    found = wall_time.classes(state, now)
    return Goodput(
        **goodput_totals(found, unknown_classes(state, found)),
        recent=TimeShares(**time_shares(recent, unknown_classes(state, recent))),
    )


def build_report(
    state: CoreState, steps: StepSummary, now: float, told: Sequence[dict[str, Any]] = ()
) -> JobReport:
    """What the job trained and what failed.

    told: incidents as the ledger has them, see `Store.incidents`; those are taken that the state has no more.
    """
    ended = [w for w in state.membership.workers.values() if w.digest is not None]
    digests, states = _by_shard(state, ended)
    membership = state.membership
    forgotten = [IncidentView(**x) for x in told if x["id"] <= state.forgotten]
    return JobReport(
        job=state.spec.name,
        engine=state.spec.engine,
        outcome=membership.outcome,
        reason=membership.stop_reason,
        cause=membership.stop_cause,
        world=ReportWorld(
            target=state.target,
            history=list(membership.history),
            micro_batches=membership.micro_batches,
            idle=_idle(state),
        ),
        steps=ReportSteps(
            **msgspec.structs.asdict(step_counts(state, steps.count)),
            median_s=_median_s(state, steps.median_s),
            skipped=steps.skipped,
        ),
        pace=pace_of(state, now),
        dropped=steps.dropped,
        incidents=[*forgotten, *(_incident(state, i) for i in state.incidents)],
        changes=[resize.describe(state, change) for change in membership.changes],
        slow=[slow_rank(x) for x in state.health.slow],
        figures=logged(state),
        goodput=goodput_of(state, now),
        final=FinalState(
            loss=steps.loss,
            params_xxh3=":".join(d[0] for d in digests) if all(len(d) == 1 for d in digests) else None,
            # Unknown where nobody said a digest, and false as soon as two differ: a job of one replica is
            # equal to itself, which says that its state was summed up, and no more.
            replicas_equal=all(len(d) <= 1 for d in digests + states) if ended else None,
            state_xxh3=":".join(d[0] for d in states) if ended and all(len(d) == 1 for d in states) else None,
            covered=list(ended[0].covered) if ended and ended[0].covered else None,
            left_out=list(ended[0].left_out) if ended and ended[0].covered else None,
        ),
        saved=state.storage.durable,
        unread=state.storage.unread[:UNREAD_SHOWN],
        in_memory=_in_memory(state),
        unsaved=membership.unsaved,
        snapshots=SnapshotCounts(
            complete=state.storage.totals.snapshots, skipped=state.storage.totals.skipped
        ),
        samples_folder=membership.samples,
        blame=_root_cause_of_end(state),
    )


def _root_cause_of_end(state: CoreState) -> RootCauseView | None:
    """Why a job failed. Of faults that it has survived the incidents tell: the last of them is no news of a job that ended well, and
    would be read as the reason of its end."""
    found = state.membership.root_cause
    return root_cause_view(found) if state.membership.outcome == "failed" and found is not None else None


def _in_memory(state: CoreState) -> InMemory | None:
    if not state.membership.keeps_memory:
        return None
    newest = max((x.step for x in state.storage.snapshots if has_all(x)), default=None)
    saved = state.storage.durable.step if state.storage.durable else 0
    return InMemory(step=newest if newest is not None and newest > saved else None)


def _idle(state: CoreState) -> list[tuple[int, float]]:
    """World sizes that the job had and that do not divide its micro-batches, and the share that each leaves idle."""
    sizes = sorted({world for _, world in state.membership.history})
    return [(world, round(idle, 4)) for world in sizes if (idle := queries.idle(state, world))]


def _median_s(state: CoreState, median_s: float | None) -> float | None:
    """Of the steps in the ledger; at level 0, where it holds none, as the slowest worker counted."""
    if median_s is not None:
        return round(median_s, 5)
    counted = [w.median_s for w in state.membership.workers.values() if w.median_s is not None]
    return round(max(counted), 5) if counted else None


def _by_shard(state: CoreState, ended: list[Worker]) -> tuple[list[list[str]], list[list[str]]]:
    """The digests of the parameters and of the whole state that holders of each shard told, each once."""
    # By shard: replicas are equal if all holders of each shard agree. A digest over all workers would differ
    # between shards by design.
    digests: list[set[str]] = [set() for _ in range(state.membership.shard_count)]
    states: list[set[str]] = [set() for _ in range(state.membership.shard_count)]
    for worker in ended:
        if worker.shard_index < len(digests):
            digests[worker.shard_index].add(str(worker.digest))
            states[worker.shard_index].add(str(worker.state_digest))
    return [sorted(d) for d in digests], [sorted(s) for s in states]


def page_status(state: CoreState, index: PhaseIndex, now: float, recent: Mapping[str, Any]) -> dict[str, Any]:
    """recent: what the ledger says of the newest steps, see `page._recent_steps`."""
    membership = state.membership
    head = status_head(state, now, recent["loss"], None)
    in_service = index.count_nodes(NodePhase.IN_SERVICE)
    usable = (WorkerPhase.READY, WorkerPhase.MEMBER, WorkerPhase.PARKED)
    shown = msgspec.structs.replace(
        head,
        step=newest_step(state.step, recent["step"]),
        incidents=[_incident(state, i) for i in incidents.open_ones(state)[-OPEN_SHOWN:]],
        slow=head.slow[-SLOW_SHOWN:],
    )
    return {
        **msgspec.to_builtins(shown),
        "engine": state.spec.engine,
        "least": {
            "nodes": max(state.spec.min_nodes, state.least_nodes),
            "wanted": state.wanted_nodes,
            "most": state.spec.max_nodes,
        },
        "samples_folder": membership.samples,
        "micro_batches": membership.micro_batches,
        "nodes": {
            phase.value: index.count_nodes(phase) for phase in NodePhase if phase is not NodePhase.LOST
        },
        "phases": {
            phase.value: index.count_workers(phase) for phase in WorkerPhase if phase is not WorkerPhase.GONE
        },
        "spares": max(0, in_service - state.wanted_nodes),
        "wants_spares": state.spec.spares > 0,
        "ready": sum(index.count_workers(phase) for phase in usable),
        "coming": membership.replacing,
        "leave": may_leave(state, max(0, in_service - state.wanted_nodes)),
        "ledger": recent["ledger"],
        "began_utc_s": recent["began_utc_s"],
        "ledger_seq": recent["ledger_seq"],
        "weight_per_s": _weight_per_s(head.pace.steps_per_s, recent["weight"]),
        "last_step_t_s": recent["t_s"],
    }


def _weight_per_s(steps_per_s: float | None, weight: float | None) -> float | None:
    return None if steps_per_s is None or weight is None else round(steps_per_s * weight, 3)


def may_leave(state: CoreState, spares: int) -> dict[str, Any] | None:
    """Whether a node may be taken away now without harm, and what then happens. None: nothing trains."""
    generation = state.membership.generation
    if generation is None or state.membership.phase is not JobPhase.RUNNING:
        return None
    after = len(generation.members) - state.spec.nproc
    if spares:
        words = f"a spare node replaces it; {units.plural(spares, 'spare')} available"
    elif after >= state.needed:
        words = f"training continues with {units.plural(after, 'worker')} until another node joins"
    else:
        least = units.plural(state.needed, "worker")
        return {
            "yes": False,
            "text": (
                f"it continues to train until another node has joined, because at least {least} are needed"
            ),
        }
    return {"yes": True, "text": f"{words}, and no committed step is lost"}


def kept_checkpoints(
    saved: Sequence[Mapping[str, Any]], tiers: Iterable[DurableTier]
) -> list[Mapping[str, Any]]:
    """Of checkpoints, oldest first, those that their tiers have not let go of: the newest first."""
    retentions = {t.url: Retention(t.keep, t.keep_every) for t in tiers}
    there: dict[str, dict[int, Mapping[str, Any]]] = {}
    for one in saved:
        mine = there.setdefault(one["url"], {})
        # One of the same step is written over: training went back, and came there again.
        mine[one["step"]] = one
        if one["url"] in retentions:
            for step in retentions[one["url"]].superfluous(mine, spare=one["step"]):
                del mine[step]
    left = {id(one) for mine in there.values() for one in mine.values()}
    return [one for one in reversed(saved) if id(one) in left]


async def rank_rows(state: CoreState) -> list[dict[str, Any]]:
    """A row for each worker that is not gone, in no order: putting thousands in order holds up whoever does it."""
    membership = state.membership
    places: dict[str, int] = {}
    members = membership.generation.members if membership.generation else ()
    for begin in range(0, len(members), 4 * RANKS_AT_ONCE):
        places.update((x.worker, x.rank) for x in members[begin : begin + 4 * RANKS_AT_ONCE])
        await asyncio.sleep(0)
    slow = {x.worker: x.ratio for x in state.health.slow if x.until_step is None}
    root_causes = membership.root_causes
    rows: list[dict[str, Any]] = []
    # A list of its own: in the pauses the core adds and removes workers, which an iteration of
    # the dict would not survive.
    for number, w in enumerate(list(membership.workers.values())):
        if number % RANKS_AT_ONCE == RANKS_AT_ONCE - 1:
            await asyncio.sleep(0)
        if w.phase is WorkerPhase.GONE:
            continue
        restoring = is_restoring(state, w)
        rows.append(
            {
                "rank": places.get(w.name),
                "worker": w.name,
                "node": w.node,
                "state": "fetching the state"
                if restoring
                else _STATE_WORDS.get(w.phase.value, w.phase.value),
                "step": w.committed,
                "median_s": w.median_s,
                "ratio": slow.get(w.name),
                "restored": w.restored if restoring else None,
                "cause": str(root_causes[w.name].cause) if w.name in root_causes else None,
            }
        )
    return rows


def by_urgency(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """The slow ones first, then those that should train and do not, then members by rank, spares last: a key to sort rows by."""
    # Every other state is one of a worker that should train and does not, so it comes first.
    order = {"training": 1, "spare": 2}.get(row["state"], 0)
    return -(row["ratio"] or 0.0), order, row["rank"] is None, row["rank"] or 0, row["worker"]
