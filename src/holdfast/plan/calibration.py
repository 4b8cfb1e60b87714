"""Rates and phase times of one's own past runs, with how sure they are, as input for the next plan. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from holdfast.errors import UsageError
from holdfast.plan import formulas
from holdfast.protocol.causes import CauseKind, kind_of_text

FEW = 10
"""With fewer events than this a rate is little more than a guess, and it is said."""

SPARE = "spare"
"""The rung of an incident in which a spare took the place; `spare_s` is how long that took."""

PHASES = (
    "detect_s",
    "decide_s",
    "spare_s",
    "replace_s",
    "join_s",
    "restore_s",
    "first_step_s",
    "stall_s",
    "full_strength_s",
)

KINDS = {CauseKind.HANG: "hang", CauseKind.NODE: "node", CauseKind.PROCESS: "worker"}
"""Kinds of causes, and what kind of failure each is, as `plan simulate` counts them. All others are `other`."""


class Run(msgspec.Struct, frozen=True):
    """One past run: its report, and the workers on each node."""

    report: Mapping[str, Any]
    per_node: int = 1


class Rate(msgspec.Struct, frozen=True):
    """Failures of one kind. low, high: 95% confidence interval of the rate per node-hour."""

    kind: str
    failures: int
    rate: float
    low: float
    high: float

    @property
    def few(self) -> bool:
        """Too few events to rely on."""
        return self.failures < FEW


class Time(msgspec.Struct, frozen=True):
    """One phase, in seconds, over incidents that have it."""

    phase: str
    count: int
    median_s: float
    p90_s: float


class Calibration(msgspec.Struct, frozen=True):
    """What past runs say. injected: incidents that were made on purpose: they count for times, not for rates."""

    runs: int
    node_hours: float
    rates: list[Rate]
    times: list[Time]
    injected: int
    step_s: float | None


def calibrate(runs: Sequence[Run]) -> Calibration:
    """Estimates from reports.

    Raises:
        UsageError: nothing can be learned from them.
    """
    hours = sum(_node_hours(r) for r in runs)
    if hours <= 0:
        raise UsageError("these runs have no time in them: world.history and goodput.wall_s are empty")
    incidents = [i for r in runs for i in r.report.get("incidents", [])]
    natural = [i for i in incidents if not i.get("injected")]
    counts: dict[str, int] = {}
    for incident in natural:
        counts[_kind(incident)] = counts.get(_kind(incident), 0) + 1
    rates = [_rate(kind, n, hours) for kind, n in sorted(counts.items())]
    steps = [r.report["steps"]["median_s"] for r in runs if (r.report.get("steps") or {}).get("median_s")]
    return Calibration(
        len(runs),
        hours,
        [*rates, _rate("all", len(natural), hours)],
        [t for phase in PHASES if (t := _time(phase, incidents)) is not None],
        len(incidents) - len(natural),
        statistics.median(steps) if steps else None,
    )


def fields(found: Calibration) -> dict[str, Any]:
    """The same as fields of `plan run` and `plan simulate`. Without failures the upper limit stands for the rate: it is
    all that is known."""
    times = {t.phase: t.median_s for t in found.times}
    every = found.rates[-1]
    made: dict[str, Any] = {"rate": f"{100 * (every.rate if every.failures else every.high):.6f}%"}
    if "detect_s" in times:
        made["detect"] = f"{times['detect_s']:.3f}s"
    if "replace_s" in times:
        made["replace"] = f"{times['replace_s']:.3f}s"
    if "spare_s" in times:
        made["spare"] = "0s"  # it is part of what training stood still for
    if "stall_s" in times:
        made["peer"] = f"{max(0.0, times['stall_s'] - times.get('detect_s', 0.0)):.3f}s"
    if found.step_s is not None:
        made["step"] = f"{found.step_s:.4f}s"
    return made


def _node_hours(run: Run) -> float:
    """World sizes over time, up to the end."""
    report = run.report
    history = [(float(t), float(w)) for t, w in (report.get("world") or {}).get("history") or []]
    end_s = float((report.get("goodput") or {}).get("wall_s") or 0.0)
    ends = [*(t for t, _ in history[1:]), end_s][: len(history)]
    worker_s = sum(w * max(0.0, end - t) for (t, w), end in zip(history, ends, strict=True))
    return worker_s / max(1, run.per_node) / formulas.HOUR_S


def _kind(incident: Mapping[str, Any]) -> str:
    """Reports of older versions have a cause's words alone."""
    kind = incident.get("cause_kind") or kind_of_text(str(incident.get("cause") or ""))
    return KINDS.get(kind, "other")


def _rate(kind: str, failures: int, node_hours: float) -> Rate:
    low, high = formulas.rate_interval(failures, node_hours)
    return Rate(kind, failures, failures / node_hours, low, high)


def _time(phase: str, incidents: Sequence[Mapping[str, Any]]) -> Time | None:
    values = sorted(float(v) for i in incidents if (v := _phase(phase, i)) is not None)
    if not values:
        return None
    return Time(
        phase, len(values), statistics.median(values), values[min(len(values) - 1, int(0.9 * len(values)))]
    )


def _phase(phase: str, incident: Mapping[str, Any]) -> float | None:
    """A spare that was there says nothing of how long a new node takes."""
    if phase in ("spare_s", "replace_s"):
        found = incident.get("replace_s")
        return found if (incident.get("rung") == SPARE) == (phase == "spare_s") else None
    return incident.get(phase)
