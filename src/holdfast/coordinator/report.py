"""The report of a job: what was trained, what failed, what it cost."""

from __future__ import annotations

import statistics
from typing import Any

from holdfast.coordinator import incidents
from holdfast.coordinator.state import CoreState
from holdfast.coordinator.store import StepRow

SCHEMA = 1


def build_report(state: CoreState, steps: list[StepRow], now: float) -> dict[str, Any]:
    """The report as `--report` writes it. Unknown is None, never 0. Durations in seconds."""
    wall_s = now - state.began_s
    took = [s.took_s for s in steps if s.took_s is not None]
    productive_s = sum(took) if took else None
    digests = {w.digest for w in state.workers.values() if w.digest is not None}
    losses = [s.loss for s in steps if s.loss is not None]
    return {
        "schema": SCHEMA,
        "job": state.spec.name,
        "engine": state.spec.engine,
        "outcome": state.outcome,
        "reason": state.stop_reason,
        "world": {"target": state.spec.target, "history": [list(h) for h in state.history]},
        "steps": {
            "committed": state.committed,
            "lost": state.lost_steps,
            "median_s": round(statistics.median(took), 5) if took else None,
        },
        "incidents": [incidents.describe(state, i) for i in state.incidents],
        "goodput": {
            "wall_s": round(wall_s, 3),
            "productive_s": None if productive_s is None else round(productive_s, 3),
            "share": None if productive_s is None else round(min(1.0, productive_s / max(wall_s, 1e-9)), 4),
        },
        "final": {
            "loss": losses[-1] if losses else None,
            "params_xxh3": next(iter(digests)) if len(digests) == 1 else None,
            "replicas_equal": len(digests) == 1 if digests else None,
        },
    }
