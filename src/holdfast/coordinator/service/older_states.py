"""States of the core that older versions wrote."""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.coordinator.kernel.state import CoreState
from holdfast.protocol import causes


def state_of(snapshot: bytes) -> CoreState:
    """A snapshot of this or of an older version. Raises msgspec.ValidationError for anything else."""
    try:
        return msgspec.msgpack.decode(snapshot, type=CoreState)
    except msgspec.ValidationError:
        return msgspec.convert(_with_causes(msgspec.msgpack.decode(snapshot)), type=CoreState)


def _with_causes(state: dict[str, Any]) -> dict[str, Any]:
    """Up to version 0.1 causes were text."""
    blames = [state.get("blame"), *state.get("blames", {}).values()]
    for holder in (*state.get("incidents", []), *(b for b in blames if b)):
        holder["cause"] = _cause(holder["cause"])
    return state | {"broke_cause": _cause(state.get("broke_cause"))}


def _cause(written: Any) -> Any:
    return msgspec.to_builtins(causes.of_text(written)) if isinstance(written, str) else written
