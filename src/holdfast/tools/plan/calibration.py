"""Failure rates and phase times of past runs, with confidence intervals, as input for the next plan. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import msgspec

from holdfast import formulas
from holdfast.errors import UsageError
from holdfast.protocol.causes import CauseKind
from holdfast.protocol.job_report import JobReport
from holdfast.protocol.job_view import IncidentView
from holdfast.protocol.phases import TimeClass

FEW = 10
"""With fewer failures than this, a rate is little more than a guess, and the output warns of it."""

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


class PastRun(msgspec.Struct, frozen=True):
    """One past run: its report, and the workers on each node."""

    report: JobReport
    per_node: int = 1


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """Failures of one kind, per node-hour."""

    kind: str
    """`node`, `worker`, `hang`, `other`, or `all`."""
    failures: int
    """How many were seen."""
    rate: float
    """Failures per node-hour."""
    low: float
    """The lower end of the rate's 95% confidence interval."""
    high: float
    """The upper end."""

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


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """What past runs tell."""

    runs: int
    """How many were read."""
    node_hours: float
    """Over all runs."""
    rates: list[Rate]
    """By kind; the last one is of all kinds together."""
    times: list[Time]
    """By phase, of those that occurred."""
    injected: int
    """Incidents that were injected: they count for times, but not for rates."""
    step_s: float | None
    """The median of the runs' median steps; None: no run has any."""
    spent_s: dict[str, float]
    """Wall time by the classes of `TimeClass`, over all runs whose reports have them."""
    goodput: float | None
    """Of that wall time, the share of steps that stayed. None: not known of every such run, or there is none."""


def calibrate(runs: Sequence[PastRun]) -> Calibration:
    """Estimates from reports.

    Raises:
        UsageError: nothing can be learned from them.
    """
    hours = sum(_node_hours(r) for r in runs)
    if hours <= 0:
        raise UsageError(
            "these runs have no duration: world.history and goodput.wall_s are empty in their reports"
        )
    incidents = [i for r in runs for i in r.report.incidents]
    # Somebody chose when an injected fault strikes, so it tells nothing about how often faults come by themselves.
    natural = [i for i in incidents if not i.injected]
    counts: dict[str, int] = {}
    for incident in natural:
        counts[_kind(incident)] = counts.get(_kind(incident), 0) + 1
    rates = [_rate(kind, n, hours) for kind, n in sorted(counts.items())]
    steps = [s.median_s for r in runs if (s := r.report.steps) is not None and s.median_s]
    spent_s, goodput = _spent(runs)
    return Calibration(
        runs=len(runs),
        node_hours=hours,
        rates=[*rates, _rate("all", len(natural), hours)],
        # An injected fault is recovered from as a real one is, so its times count.
        times=[t for phase in PHASES if (t := _time(phase, incidents)) is not None],
        injected=len(incidents) - len(natural),
        step_s=statistics.median(steps) if steps else None,
        spent_s=spent_s,
        goodput=goodput,
    )


def _spent(runs: Sequence[PastRun]) -> tuple[dict[str, float], float | None]:
    """Wall time by class, and the share that was productive."""
    told = [g for r in runs if (g := r.report.goodput) is not None and g.classes]
    spent_s = {
        kind.value: total
        for kind in TimeClass
        if (total := math.fsum(g.classes.get(kind, 0.0) for g in told)) > 0
    }
    # One run in which only the script knows which steps stayed makes the sum unknown, not smaller.
    productive = [s for g in told if (s := g.productive_s) is not None]
    if not told or len(productive) < len(told):
        return spent_s, None
    return spent_s, math.fsum(productive) / max(math.fsum(spent_s.values()), 1e-9)


def fields(found: Calibration) -> dict[str, Any]:
    """The same as fields of `plan run` and `plan simulate`."""
    times = {t.phase: t.median_s for t in found.times}
    every = found.rates[-1]
    made: dict[str, Any] = {} if why_no_rate(found) else {"rate": f"{100 * every.rate:.6f}%"}
    if "detect_s" in times:
        made["detect"] = f"{times['detect_s']:.3f}s"
    if "replace_s" in times:
        made["replace"] = f"{times['replace_s']:.3f}s"
    if "spare_s" in times:
        made["spare"] = "0s"  # `peer` below has it: the stall lasts until training continues, spare included
    if "stall_s" in times:
        made["peer"] = f"{max(0.0, times['stall_s'] - times.get('detect_s', 0.0)):.3f}s"
    if found.step_s is not None:
        made["step"] = f"{found.step_s:.4f}s"
    return made


def why_no_rate(found: Calibration) -> str:
    """Why these runs say nothing that a plan could use about how often nodes fail; empty: they do."""
    every = found.rates[-1]
    # 0 would be a plan without spares and checkpoints. The upper end of the interval is no estimate: of an hour on one node it
    # is more than three failures per hour.
    if not every.failures:
        return f"no failure in {found.node_hours:,.1f} node-hours"
    if every.rate > 1:
        return f"{100 * every.rate:,.0f}% per node-hour is not a plausible rate for a cluster"
    return ""


def _node_hours(run: PastRun) -> float:
    """The world size over time, up to the end of the run."""
    world, goodput = run.report.world, run.report.goodput
    history = world.history if world is not None else []
    end_s = (goodput.wall_s or 0.0) if goodput is not None else 0.0
    # Each size holds until the next one was formed, the last until the end. Time before the first does not
    # count: there was no training that a failure could stop.
    ends = [*(t for t, _ in history[1:]), end_s][: len(history)]
    worker_s = sum(w * max(0.0, end - t) for (t, w), end in zip(history, ends, strict=True))
    return worker_s / max(1, run.per_node) / formulas.HOUR_S


def _kind(incident: IncidentView) -> str:
    """The kind of failure, as `plan simulate` names it."""
    return "other" if incident.cause_kind is None else KINDS.get(incident.cause_kind, "other")


def _rate(kind: str, failures: int, node_hours: float) -> Rate:
    low, high = formulas.rate_interval(failures, node_hours)
    return Rate(kind=kind, failures=failures, rate=failures / node_hours, low=low, high=high)


def _time(phase: str, incidents: Sequence[IncidentView]) -> Time | None:
    values = sorted(float(v) for i in incidents if (v := _phase(phase, i)) is not None)
    if not values:
        return None
    return Time(
        phase, len(values), statistics.median(values), values[min(len(values) - 1, int(0.9 * len(values)))]
    )


def _phase(phase: str, incident: IncidentView) -> float | None:
    """One phase of an incident; None if the incident has none."""
    # One field has both times, told apart by how the incident was resolved: how long a spare took says nothing about how
    # long a new node takes.
    if phase in ("spare_s", "replace_s"):
        found = incident.replace_s
        return found if (incident.rung == SPARE) == (phase == "spare_s") else None
    one: float | None = getattr(incident, phase)
    return one
