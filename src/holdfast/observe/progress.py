"""The sentence about a job's progress, also before it trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.observe.dashboard import remaining_words, step_words, steps_per_s, written
from holdfast.protocol.job import JobSpec
from holdfast.protocol.units import count, loss, plural, size
from holdfast.protocol.units import rate as speed


def progress_line(spec: JobSpec, status: Mapping[str, Any] | None) -> str:
    """`step 80, loss 2.6190, 4.9 steps/s, 3 min 05 s left`: 56 columns, as `[holdfast]` and the time need 24 of a terminal's 80.
    While the job starts or recovers, what it waits for; with fewer workers than wanted, how many."""
    if status is None or status["generation"] == 0:
        return _starting(spec, status)
    if status["phase"] == "gathering":
        return f"waiting for workers: {_ready(status)} of {status['target']} are ready"
    fetching = [w for w in status["workers"] if w["state"] == "restoring"]
    if fetching:
        return _restoring(fetching, status)
    if status["phase"] in ("running", "stopping") and not status["workers"]:
        return _last(status)
    words = {"running": "", "breaking": "recovering: "}
    parts = [step_words(status), f"loss {loss(status['loss'])}", speed(steps_per_s(status))]
    if status["world"] < status["target"]:
        parts.append(f"{status['world']} of {status['target']} workers")
    if left := remaining_words(status):
        parts.append(left)
    return words.get(status["phase"], f"{status['phase']}: ") + ", ".join(parts)


def _restoring(fetching: Sequence[Mapping[str, Any]], status: Mapping[str, Any]) -> str:
    """`1 of 3 workers fetches the state of step 80: 3.20 GB of 12.0 GB`: of the slowest."""
    # The slowest, because training continues only when all have the state.
    known = [w["restored"] for w in fetching if w["restored"]]
    slowest = min(known, key=lambda r: r[0] / max(1, r[1]), default=None)
    far = f": {size(slowest[0])} of {size(slowest[1])}" if slowest else ""
    fetch = "fetches" if len(fetching) == 1 else "fetch"
    of = f"{len(fetching)} of {plural(status['world'], 'worker')}"
    step = f" of step {count(status['step'])}" if status["level"] == 2 else ""
    return f"{of} {fetch} the state{step}{far}"


def _last(status: Mapping[str, Any]) -> str:
    """All workers are gone: what is left to do."""
    tiers = [t for t in (status.get("saving") or {}).get("tiers", []) if t["under_way"] is not None]
    line = "; ".join(f"saving step {count(t['under_way'])} in {t['url']}{written(t)}" for t in tiers)
    return line or ("all steps are done" if status["phase"] == "running" else "all workers have ended")


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
    # Spares get ready too, and with them there may be more than the job wants: `5 of 4 are ready` would read as a fault.
    return min(able, int(status["target"]))
