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
"""The recovery action of an incident in which a spare took the failed node's place; `spare_s` is how long that took."""

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
"""Kinds of causes, and the kind of failure as which `plan simulate` counts each. All others are `other`."""


class PastRun(msgspec.Struct, frozen=True):
    """One past run: its report, and the workers on each node."""

    report: JobReport
    per_node: int = 1


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """Failures of one kind, per node-hour."""

    kind: str
    """`node`, `worker`, `hang`, `other`, or `all`."""
    failures: int
    """Number of failures."""
    rate: float
    """Failures per node-hour."""
    low: float
    """The lower end of the rate's 95% confidence interval."""
    high: float
    """The upper end."""

    @property
    def few(self) -> bool:
        """Whether there are too few failures to rely on."""
        return self.failures < FEW


class Time(msgspec.Struct, frozen=True):
    """The duration of one phase, in seconds, over the incidents that have it."""

    phase: str
    count: int
    median_s: float
    p90_s: float


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """The results from past runs."""

    runs: int
    """Number of runs."""
    node_hours: float
    """Node-hours of all runs."""
    rates: list[Rate]
    """By kind; the last one is for all kinds together."""
    times: list[Time]
    """By phase, for the phases that occurred."""
    injected: int
    """Number of injected incidents: they count for times, but not for rates."""
    step_s: float | None
    """The median of the runs' median step times; None: no run has one."""
    spent_s: dict[str, float]
    """Wall time by the classes of `TimeClass`, over all runs whose reports have them."""
    goodput: float | None
    """The share of that wall time in steps that were kept. None: it is not known for every such run, or there is no
    such run."""


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
    # A person chose the time of an injected fault, so it says nothing about the rate of natural ones.
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
        # The recovery from an injected fault is the same as from a natural one, so its times count.
        times=[t for phase in PHASES if (t := _time(phase, incidents)) is not None],
        injected=len(incidents) - len(natural),
        step_s=statistics.median(steps) if steps else None,
        spent_s=spent_s,
        goodput=goodput,
    )


def _spent(runs: Sequence[PastRun]) -> tuple[dict[str, float], float | None]:
    """Wall time by class, and the share that was productive."""
    measured = [g for r in runs if (g := r.report.goodput) is not None and g.classes]
    spent_s = {
        kind.value: total
        for kind in TimeClass
        if (total := math.fsum(g.classes.get(kind, 0.0) for g in measured)) > 0
    }
    # If for one run only the script knows which steps were kept, the sum is unknown, not smaller.
    productive = [s for g in measured if (s := g.productive_s) is not None]
    if not measured or len(productive) < len(measured):
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
        made["spare"] = "0s"  # included in `peer` below: the stall lasts until training continues
    if "stall_s" in times:
        made["peer"] = f"{max(0.0, times['stall_s'] - times.get('detect_s', 0.0)):.3f}s"
    if found.step_s is not None:
        made["step"] = f"{found.step_s:.4f}s"
    return made


def why_no_rate(found: Calibration) -> str:
    """Why a plan cannot use a failure rate from these runs; empty: it can."""
    every = found.rates[-1]
    # A rate of 0 would give a plan without spares and checkpoints. The upper end of the interval is no
    # estimate: for an hour on one node it is more than three failures per hour.
    if not every.failures:
        return f"no failure in {found.node_hours:,.1f} node-hours"
    if every.rate > 1:
        return f"{100 * every.rate:,.0f}% per node-hour is not a plausible rate for a cluster"
    return ""


def _node_hours(run: PastRun) -> float:
    """Node-hours of a run: the world size over time, up to its end."""
    world, goodput = run.report.world, run.report.goodput
    history = world.history if world is not None else []
    end_s = (goodput.wall_s or 0.0) if goodput is not None else 0.0
    # Each size is valid until the next one was formed, the last one until the end. Time before the first does
    # not count: there was no training that a failure could stop.
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
    """The duration of one phase of an incident; None if the incident does not have it."""
    # One field has both times, distinguished by how the incident was resolved: the time that a spare takes
    # says nothing about the time that a new node takes.
    if phase in ("spare_s", "replace_s"):
        found = incident.replace_s
        return found if (incident.rung == SPARE) == (phase == "spare_s") else None
    one: float | None = getattr(incident, phase)
    return one
