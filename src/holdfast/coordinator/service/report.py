"""What a job tells about itself: its status while it runs, and the report of what it trained and what failed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from holdfast.coordinator.health import stragglers
from holdfast.coordinator.kernel import incidents
from holdfast.coordinator.kernel.membership_state import Blame, Node, Worker
from holdfast.coordinator.kernel.phases import WorkerPhase
from holdfast.coordinator.kernel.state import CoreState
from holdfast.coordinator.membership import pace, queries, resize, script_metrics, step_accounting
from holdfast.coordinator.service import goodput
from holdfast.coordinator.service.step_summary import StepSummary
from holdfast.coordinator.storage.queries import has_all, how_far

SCHEMA = 1
INCIDENTS_SHOWN = 20
UNREAD_SHOWN = 8


def build_report(
    state: CoreState, steps: StepSummary, now: float, told: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    """The report as `--report` writes it. Unknown is None, never 0. Durations in seconds.

    told: incidents as the ledger has them, see `Store.incidents`; those are taken that the state has no more.
    """
    ended = [w for w in state.membership.workers.values() if w.digest is not None]
    digests, states = _by_shard(state, ended)
    return {
        "schema": SCHEMA,
        "job": state.spec.name,
        "engine": state.spec.engine,
        "outcome": state.membership.outcome,
        "reason": state.membership.stop_reason,
        "cause": state.membership.stop_cause,
        "world": {
            "target": state.target,
            "history": [list(h) for h in state.membership.history],
            "micro_batches": state.membership.micro_batches,
            "idle": _idle(state),
        },
        "steps": step_accounting.shown(state, steps.count)
        | {
            "median_s": _median_s(state, steps.median_s),
            "skipped": steps.skipped,
        },
        "pace": pace.shown(state, now),
        "dropped": steps.dropped,
        "incidents": [
            *(x for x in told if x["id"] <= state.forgotten),
            *(incidents.shown(state, i) for i in state.incidents),
        ],
        "changes": [msgspec.structs.asdict(resize.describe(state, c)) for c in state.membership.changes],
        "slow": [stragglers.shown(x) for x in state.health.slow],
        "figures": script_metrics.shown(state),
        "goodput": goodput.shown(state, now),
        "final": {
            "loss": steps.loss,
            "params_xxh3": ":".join(d[0] for d in digests) if all(len(d) == 1 for d in digests) else None,
            # Unknown where nobody said a digest, and false as soon as two differ: a job of one replica is
            # equal to itself, which says that its state was summed up, and no more.
            "replicas_equal": all(len(d) <= 1 for d in digests + states) if ended else None,
            "state_xxh3": ":".join(d[0] for d in states)
            if ended and all(len(d) == 1 for d in states)
            else None,
            "covered": list(ended[0].covered) if ended and ended[0].covered else None,
            "left_out": list(ended[0].left_out) if ended and ended[0].covered else None,
        },
        "saved": msgspec.to_builtins(state.storage.durable) if state.storage.durable else None,
        "unread": state.storage.unread[:UNREAD_SHOWN],
        "in_memory": _in_memory(state),
        "unsaved": state.membership.unsaved,
        "snapshots": {
            "complete": state.storage.totals.snapshots,
            "skipped": state.storage.totals.skipped,
        },
        "samples_folder": state.membership.samples,
    }


def _in_memory(state: CoreState) -> dict[str, int | None] | None:
    """What no durable tier has and stays in the nodes' memory for the next start. step None: of a run before, and not all
    nodes have said what they hold."""
    if not state.membership.keeps_memory:
        return None
    newest = max((x.step for x in state.storage.snapshots if has_all(x)), default=None)
    saved = state.storage.durable.step if state.storage.durable else 0
    return {"step": newest if newest is not None and newest > saved else None}


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


def build_status(state: CoreState, now: float) -> dict[str, Any]:
    """The job at this moment. Unknown is None. Durations in seconds."""
    members = state.membership.generation.members if state.membership.generation else ()
    ranks = {x.worker: x.rank for x in members}
    latest = Latest()
    for worker in state.membership.workers.values():
        latest.add(worker, worker.name in ranks)
    return status_head(state, now, *latest.told()) | {
        "nodes": [node_row(n) for n in state.membership.nodes.values()],
        "workers": [
            worker_row(state, w, ranks.get(w.name))
            for w in state.membership.workers.values()
            if w.phase is not WorkerPhase.GONE
        ],
    }


def status_head(state: CoreState, now: float, loss: float | None, median_s: float | None) -> dict[str, Any]:
    """The status but for the rows of nodes and workers. It costs the same in a large job as in a small one."""
    return {
        "job": state.spec.name,
        "phase": state.membership.phase.value,
        "outcome": state.membership.outcome,
        "reason": state.membership.stop_reason,
        "cause": state.membership.stop_cause,
        "level": state.membership.level,
        "generation": state.membership.number,
        "world": state.membership.generation.strength if state.membership.generation else 0,
        "target": state.target,
        "step": state.step,
        "until": state.membership.until,
        "pace": pace.shown(state, now),
        "steps": step_accounting.shown(state),
        "goodput": goodput.shown(state, now),
        "loss": loss,
        "median_s": median_s,
        "t_s": round(now - state.began_s, 3),
        "health": {
            "asks": [msgspec.to_builtins(a) for a in state.health.asks],
            # A copy: who compares two moments must not be given the same dict for both.
            "quarantine": dict(state.health.quarantine),
        },
        "incidents": [incidents.shown(state, i) for i in state.incidents[-INCIDENTS_SHOWN:]],
        "slow": [stragglers.shown(x) for x in state.health.slow if x.until_step is None],
        "figures": script_metrics.shown(state),
        "blame": shown_blame(state.membership.blame) if state.membership.blame else None,
        "saving": saving(state, now),
    }


def node_row(node: Node) -> dict[str, Any]:
    """A node in the status."""
    return (
        {
            "node": node.name,
            "host": node.host,
            "place": list(node.place),
            "alive": node.alive,
            "failures": node.failures,
        }
        | ({"left": True} if node.left and not node.alive else {})
        | ({"held": node.held} if node.held else {})
        | ({"identity": node.identity} if node.identity else {})
        | ({"unknown": sorted(node.unknown)} if node.alive and node.unknown else {})
    )


def worker_row(state: CoreState, worker: Worker, rank: int | None) -> dict[str, Any]:
    """A worker in the status. rank: None: it is no member."""
    restoring = is_restoring(state, worker)
    return {
        "worker": worker.name,
        "node": worker.node,
        "rank": rank,
        "state": "restoring" if restoring else worker.phase.value,
        "restored": worker.restored if restoring else None,
        "step": worker.committed,
        "log": worker.log,
    }


def shown_blame(blame: Blame) -> dict[str, Any]:
    """Who is to blame, for a person: the cause in words."""
    words = {"cause": str(blame.cause), "cause_kind": blame.cause.kind.value}
    return {**msgspec.to_builtins(blame), **words}


def is_restoring(state: CoreState, worker: Worker) -> bool:
    """It is a member, and fetches the state. At level 0 it is known only of what takes its time."""
    if worker.phase is not WorkerPhase.MEMBER:
        return False
    if not state.membership.counts_steps:
        return worker.restored is not None and worker.restored[0] < worker.restored[1]
    generation, seat = state.membership.generation, state.membership.seats.get(worker.name)
    if generation is None or seat is None or not seat.restore:
        return False
    # What it says when it has the state is lost with a coordinator that is replaced just then; a step is not.
    trains = worker.committed is not None and worker.committed > generation.start
    return worker.joined_generation < state.membership.number and not trains


def saving(state: CoreState, now: float) -> dict[str, Any]:
    """What is saved where, and how old it is. Durations in seconds; None: nothing yet."""
    complete = [s for s in state.storage.snapshots if s.complete]
    newest = max(complete, key=lambda s: (s.step, s.generation), default=None)
    tiers = []
    for tier in state.spec.saving.tiers:
        last = state.storage.stored.get(tier.url)
        there = last is not None and last.took_s is not None
        under_way = next((s for s in state.storage.storing if s.tier == tier.url and not s.void), None)
        slow = any(s.tier == tier.url and s.slow for s in state.storage.storing)
        tiers.append(
            {
                "url": tier.url,
                "step": last.step if last is not None and there else None,
                "age_s": round(now - last.began_s, 3) if last is not None and there else None,
                "took_s": last.took_s if last is not None else None,
                "under_way": under_way.step if under_way else None,
                "written": how_far(under_way) if under_way else None,
                "failing": tier.url in state.storage.failing_tiers,
                "slow": slow,
            }
        )
    return {
        "snapshot": None
        if newest is None
        else {
            "step": newest.step,
            "nodes": min((len(set(h.nodes)) for h in newest.shards), default=0),
            "nbytes": sum({h.copy.shard.blob.xxh3: h.copy.shard.blob.nbytes for h in newest.shards}.values()),
            "took_s": round((newest.complete_s or now) - newest.began_s, 4),
            "age_s": round(now - (newest.complete_s or now), 3),
        },
        "skipped": state.storage.skipped,
        "tiers": tiers,
    }
