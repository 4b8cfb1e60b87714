"""What the page needs of the core's state. The cost does not grow with the job, but for the table of ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from holdfast.checkpoint.policy import Retention
from holdfast.coordinator.health import stragglers
from holdfast.coordinator.kernel import incidents
from holdfast.coordinator.kernel.index import Index
from holdfast.coordinator.kernel.phases import JobPhase, NodePhase, WorkerPhase
from holdfast.coordinator.kernel.state import CoreState
from holdfast.coordinator.membership import pace, script_metrics, step_accounting
from holdfast.coordinator.service import goodput
from holdfast.coordinator.service.report import is_restoring, saving, shown_blame
from holdfast.protocol import units
from holdfast.protocol.snapshots import DurableTier

OPEN_SHOWN = 8
SLOW_SHOWN = 20
CHUNK = 500
"""So many workers are looked at before others have their turn: half a millisecond."""
_WORDS = {"member": "training", "ready": "spare", "parked": "recovering", "attached": "building the model"}


def facts(state: CoreState, index: Index, now: float, recent: Mapping[str, Any]) -> dict[str, Any]:
    """recent: what the ledger says of the newest steps, see `page_reader.recent`."""
    membership = state.membership
    saved, paced = saving(state, now), pace.shown(state, now)
    in_service = index.count_nodes(NodePhase.IN_SERVICE)
    usable = (WorkerPhase.READY, WorkerPhase.MEMBER, WorkerPhase.PARKED)
    return {
        "job": state.spec.name,
        "engine": state.spec.engine,
        "phase": membership.phase.value,
        "outcome": membership.outcome,
        "reason": membership.stop_reason,
        "level": membership.level,
        "generation": membership.number,
        "world": membership.generation.strength if membership.generation else 0,
        "target": state.target,
        "least": {
            "nodes": max(state.spec.min_nodes, state.least_nodes),
            "wanted": state.wanted_nodes,
            "most": state.spec.max_nodes,
        },
        "step": _newest(state.step, recent),
        "until": membership.until,
        "pace": paced,
        "samples_folder": membership.samples,
        "steps": step_accounting.shown(state),
        "goodput": goodput.shown(state, now),
        "micro_batches": membership.micro_batches,
        "t_s": round(now - state.began_s, 3),
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
        "asks": [msgspec.to_builtins(a) for a in state.health.asks],
        "tiers": saved["tiers"],
        "snapshot": saved["snapshot"],
        "incidents": [incidents.shown(state, i) for i in incidents.open_ones(state)[-OPEN_SHOWN:]],
        "slow": [stragglers.shown(x) for x in state.health.slow if x.until_step is None][-SLOW_SHOWN:],
        "figures": script_metrics.shown(state),
        "blame": shown_blame(membership.blame) if membership.blame else None,
        "ledger": recent["ledger"],
        "began_utc_s": recent["began_utc_s"],
        "ledger_seq": recent["ledger_seq"],
        "loss": recent["loss"],
        "weight_per_s": _weight_per_s(paced["steps_per_s"], recent["weight"]),
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


def _newest(step: int | None, recent: Mapping[str, Any]) -> int | None:
    """Committed steps: those of the state, which is written when something happens, or those of the ledger."""
    told = None if recent["step"] is None else recent["step"] + 1
    return max((x for x in (step, told) if x is not None), default=None)


def kept(saved: Sequence[Mapping[str, Any]], tiers: Iterable[DurableTier]) -> list[Mapping[str, Any]]:
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


async def ranks(state: CoreState) -> list[dict[str, Any]]:
    """A row for each worker that is not gone, in no order: putting thousands in order holds up whoever does it."""
    membership = state.membership
    places: dict[str, int] = {}
    members = membership.generation.members if membership.generation else ()
    for begin in range(0, len(members), 4 * CHUNK):
        places.update((x.worker, x.rank) for x in members[begin : begin + 4 * CHUNK])
        await asyncio.sleep(0)
    slow = {x.worker: x.ratio for x in state.health.slow if x.until_step is None}
    blames = membership.blames
    rows: list[dict[str, Any]] = []
    # A list of its own: in the pauses the core adds and removes workers, which an iteration of
    # the dict would not survive.
    for number, w in enumerate(list(membership.workers.values())):
        if number % CHUNK == CHUNK - 1:
            await asyncio.sleep(0)
        if w.phase is WorkerPhase.GONE:
            continue
        restoring = is_restoring(state, w)
        rows.append(
            {
                "rank": places.get(w.name),
                "worker": w.name,
                "node": w.node,
                "state": "fetching the state" if restoring else _WORDS.get(w.phase.value, w.phase.value),
                "step": w.committed,
                "median_s": w.median_s,
                "ratio": slow.get(w.name),
                "restored": w.restored if restoring else None,
                "cause": str(blames[w.name].cause) if w.name in blames else None,
            }
        )
    return rows


def urgency(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """The slow ones first, then those that should train and do not, then members by rank, spares last: a key to sort rows by."""
    # Every other state is one of a worker that should train and does not, so it comes first.
    order = {"training": 1, "spare": 2}.get(row["state"], 0)
    return -(row["ratio"] or 0.0), order, row["rank"] is None, row["rank"] or 0, row["worker"]
