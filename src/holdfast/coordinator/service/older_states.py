"""States of the core that older versions wrote."""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.coordinator.kernel.deadlines import Timer
from holdfast.coordinator.kernel.membership_state import MembershipState
from holdfast.coordinator.kernel.phases import NodePhase
from holdfast.coordinator.kernel.state import CoreState
from holdfast.coordinator.kernel.storage_state import StorageState
from holdfast.protocol import causes

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
    """A snapshot of this or of an older version. Raises msgspec.ValidationError for anything else."""
    written = msgspec.msgpack.decode(snapshot)
    if isinstance(written, dict) and "membership" not in written:
        written = _divided(_with_causes(written))
    if isinstance(written, dict):
        for node in written.get("membership", {}).get("nodes", {}).values():
            _give_phase(node)
    # Only after the state of this version failed to decode: so the usual start costs nothing, and an unknown
    # error is raised as it is.
    return msgspec.convert(written, type=CoreState)


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
