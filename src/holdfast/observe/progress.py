"""The sentence that says how far a job is, also before it trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.observe.units import count, loss, plural
from holdfast.observe.units import rate as speed
from holdfast.protocol.job import JobSpec


def progress_line(spec: JobSpec, status: Mapping[str, Any] | None, rate: float | None = None) -> str:
    """`training: step 80, loss 2.6190, 4.9 steps/s, 2 of 2 workers`; while it starts, what it waits for."""
    if status is None or status["generation"] == 0:
        return _starting(spec, status)
    if status["phase"] == "gathering":
        return f"waiting for workers: {_ready(status)} of {status['target']} are ready"
    words = {"running": "training", "breaking": "recovering"}
    return (
        f"{words.get(status['phase'], status['phase'])}: step {count(status['step'])}, "
        f"loss {loss(status['loss'])}, {speed(rate)}, {status['world']} of {status['target']} workers"
    )


def _starting(spec: JobSpec, status: Mapping[str, Any] | None) -> str:
    wanted = spec.max_nodes + spec.spares
    here = [n for n in status["nodes"] if n["alive"]] if status else []
    if len(here) < wanted:
        modules = f": importing {', '.join(spec.preload)}" if spec.preload else ""
        return f"nodes warming up{modules} ({len(here)} of {wanted} are here)"
    assert status is not None
    return f"workers start the script ({_ready(status)} of {plural(spec.target, 'worker')} ready)"


def _ready(status: Mapping[str, Any]) -> int:
    able = sum(w["state"] in ("ready", "parked", "member") for w in status["workers"])
    return min(able, int(status["target"]))
