"""States of the core that older versions wrote."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from holdfast.coordinator.kernel.deadlines import Timer
from holdfast.coordinator.kernel.membership_state import MembershipState
from holdfast.coordinator.kernel.phases import NodePhase
from holdfast.coordinator.kernel.state import CoreState
from holdfast.coordinator.kernel.storage_state import StorageState
from holdfast.protocol import causes
from holdfast.protocol.decoding import decode

_PARTS: dict[str, type[msgspec.Struct]] = {
    "membership": MembershipState,
    "storage": StorageState,
}
_HEALTH = ("slow", "brought")
_TIMERS = {
    "break_deadline_s": Timer.LEAVE,
    "stop_deadline_s": Timer.STOP,
    "inspect_deadline_s": Timer.INSPECT,
    "wait_deadline_s": Timer.WAIT,
    "form_deadline_s": Timer.FORM,
    "form_after_s": Timer.FORM_AFTER,
    "start_after_s": Timer.START_AFTER,
    "ask_after_s": Timer.ASK_AFTER,
}


def state_of(snapshot: bytes) -> CoreState:
    """A snapshot of this or of an older version. Raises Damaged for anything else."""
    return decode(_read, snapshot, "the state in it is damaged")


def _read(snapshot: bytes) -> CoreState:
    written = msgspec.msgpack.decode(snapshot)
    if isinstance(written, dict):
        _rename(written)
        # By its shape and not by a version number: what a state has tells which version wrote it, also where
        # somebody forgot to count one up.
        if "membership" not in written:
            written = _divided(_with_causes(written))
        for node in written.get("membership", {}).get("nodes", {}).values():
            _give_phase(node)
            _give_place(node)
    return msgspec.convert(written, type=CoreState)


# msgspec skips names that it does not know, and every field below has a default. So an old name that is not mapped
# raises nothing: a job would go on with shard 0 for every worker, or connect groups again that are connected.
def _rename(state: dict[str, Any]) -> None:
    """Up to version 0.1 some fields had other names. A field that is not there keeps its default."""
    # Before the state is divided: what is flat there is taken by its name in this version.
    membership, storage = state.get("membership", state), state.get("storage", state)
    generation = membership.get("generation") or {}
    checkpoints = [*storage.get("storing", []), *storage.get("stored", {}).values()]
    checkpoints += storage.get("doubtful", {}).values()
    workers = membership.get("workers", {}).values()
    ready = [w["ready"] for w in workers if w.get("ready")]
    renamed: list[tuple[str, str, Iterable[dict[str, Any]]]] = [
        ("joined", "nodes_joined", [membership]),
        ("rows", "groups_connected_in", [generation]),
        ("begun", "agreement", workers),
        ("position", "shard_index", [*generation.get("members", []), *workers, *ready]),
        ("joined", "joined_generation", workers),
        ("joined", "newcomers", membership.get("changes", [])),
        ("rows", "shared_blobs", checkpoints),
        ("said", "reported_at_s", [state.get("health", {})]),
        ("whole", "complete", storage.get("snapshots", [])),
        ("whole_s", "complete_s", storage.get("snapshots", [])),
        ("told_whole", "told_complete", [storage]),
    ]
    for old, new, holders in renamed:
        for holder in holders:
            if old in holder:
                # The new name wins where both are there: a newer version wrote it, and what is under the old
                # one is what it was read from.
                holder.setdefault(new, holder.pop(old))


def _give_phase(node: dict[str, Any]) -> None:
    """Up to version 0.1 a node had no phase: whether it was lost was said apart."""
    if "phase" in node:
        return
    if not node.get("alive", True):
        node["phase"] = NodePhase.LOST.value
    elif node.get("leaving") is not None:
        node["phase"] = NodePhase.LEAVING.value
    elif node.get("held") is not None:
        node["phase"] = NodePhase.HELD.value


def _give_place(node: dict[str, Any]) -> None:
    """Up to version 0.1 only the rack of a node was known."""
    if rack := node.pop("rack", None):
        node.setdefault("place", [rack])


def _divided(state: dict[str, Any]) -> dict[str, Any]:
    """Up to version 0.1 all fields stood beside each other."""
    parts: dict[str, Any] = {
        part: {field: state[field] for field in kind.__struct_encode_fields__ if field in state}
        for part, kind in _PARTS.items()
    }
    health = state.get("health", {}) | {field: state[field] for field in _HEALTH if field in state}
    at_s = {timer: state[field] for field, timer in _TIMERS.items() if state.get(field) is not None}
    return state | parts | {"health": health, "deadlines": {"at_s": at_s}}


def _with_causes(state: dict[str, Any]) -> dict[str, Any]:
    """Up to version 0.1 causes were text."""
    blames = [state.get("blame"), *state.get("blames", {}).values()]
    for holder in (*state.get("incidents", []), *(b for b in blames if b)):
        holder["cause"] = _cause(holder["cause"])
    return state | {"broke_cause": _cause(state.get("broke_cause"))}


def _cause(written: Any) -> Any:
    return msgspec.to_builtins(causes.of_text(written)) if isinstance(written, str) else written
