"""The loss curve as a picture, with the incidents marked on it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.errors import UsageError
from holdfast.protocol.job_view import IncidentView
from holdfast.protocol.units import clip, seconds

Point = tuple[int, float, float]
"""Step, seconds since the job's start, loss."""

SIZE_INCHES = (11.0, 6.0)
DPI = 110
LABELLED = 10
_CURVE, _BASELINE, _INCIDENT, _WEAK = "#1f5fa8", "#e08a1e", "#c0392b", "#f2b8b0"


def draw_curve(
    steps: Sequence[Point],
    incidents: Sequence[IncidentView],
    path: Path,
    baseline: Sequence[Point] | None = None,
) -> None:
    """Writes a PNG: the loss over the job's time, a band from each fault to full strength, and a legend of them.

    Args:
        steps: committed steps in their order.
        incidents: as in the report.
        path: the file to write.
        baseline: a second curve. Two runs have no common clock, so both are then drawn over steps.

    Raises:
        UsageError: matplotlib is missing, there is nothing to draw, or the file cannot be written.
    """
    if not steps:
        raise UsageError(
            "there is no loss to draw, because the script did not report one (holdfast.Run does, plain DDP does not)"
        )
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("the picture needs matplotlib: pip install 'holdfast-train[plot]'") from None
    # Not `pyplot`: it would choose a window system, and keep every figure until the process ends.
    figure = Figure(figsize=SIZE_INCHES, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    over_steps = baseline is not None
    if baseline is not None:
        axes.plot(
            [p[0] for p in baseline],
            [p[2] for p in baseline],
            color=_BASELINE,
            lw=3.5,
            label="undisturbed run",
        )
    x = [p[0] if over_steps else p[1] for p in steps]
    axes.plot(x, [p[2] for p in steps], color=_CURVE, lw=1.3, label="with faults" if over_steps else "loss")
    for number, incident in enumerate(incidents):
        _mark(axes, incident, steps[-1][1], over_steps, number % 2)
    axes.set_xlabel("step" if over_steps else "seconds since the start")
    axes.set_ylabel("loss")
    axes.margins(x=0.02)
    axes.set_ylim(top=axes.get_ylim()[1] + 0.12 * (axes.get_ylim()[1] - axes.get_ylim()[0]))
    axes.grid(visible=True, color="#e6e6e6", lw=0.6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if not over_steps:
        _steps_above(axes, steps)
    _legend(figure, axes, incidents)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error


def _mark(axes: Any, incident: IncidentView, end_s: float, over_steps: bool, row: int) -> None:
    """Marks an incident: a line where the fault occurred, a dark band while training stood still, a light one until
    full strength."""
    began_s = incident.t_s
    at = incident.at_step if over_steps else began_s
    # Only scripts that report steps have a step for an incident.
    if at is None:
        return
    axes.axvline(at, color=_INCIDENT, lw=1.0)
    if not over_steps and began_s is not None:
        full = incident.full_strength_s
        axes.axvspan(began_s, end_s if full is None else began_s + full, color=_WEAK, alpha=0.45, lw=0)
        if incident.stall_s is not None:
            axes.axvspan(began_s, began_s + incident.stall_s, color=_INCIDENT, alpha=0.35, lw=0)
    axes.annotate(
        str(incident.id),
        (at, 0.975 - 0.055 * row),
        xycoords=("data", "axes fraction"),
        ha="center",
        va="center",
        fontsize=9,
        color="white",
        bbox={"boxstyle": "circle,pad=0.25", "fc": _INCIDENT, "ec": "none"},
    )


def _steps_above(axes: Any, steps: Sequence[Point]) -> None:
    """A second axis on top, with the step numbers."""
    above = axes.secondary_xaxis("top")
    count = min(8, len(steps))
    picked = [steps[round(i * (len(steps) - 1) / max(1, count - 1))] for i in range(count)]
    above.set_xticks([p[1] for p in picked], [str(p[0]) for p in picked], fontsize=8, color="#777777")
    above.set_xlabel("step", fontsize=8, color="#777777")
    above.tick_params(length=2, color="#aaaaaa")
    above.spines["top"].set_visible(False)


def _legend(figure: Any, axes: Any, incidents: Sequence[IncidentView]) -> None:
    """Below the picture: the curves, and every incident with its number, fault, stall and full strength."""
    from matplotlib.lines import Line2D

    handles, labels = axes.get_legend_handles_labels()
    for incident in incidents[:LABELLED]:
        handles.append(Line2D([], [], color="none", marker="o", mfc=_INCIDENT, mec="none"))
        labels.append(_label(incident))
    if len(incidents) > LABELLED:
        handles.append(Line2D([], [], color="none"))
        labels.append(f"… and {len(incidents) - LABELLED} more incidents")
    figure.legend(handles, labels, fontsize=8, loc="outside lower center", ncols=2, frameon=False)


def _label(incident: IncidentView) -> str:
    what = clip(incident.fault or incident.cause, 34)
    full = incident.full_strength_s
    end = "never back at full strength" if full is None else f"full strength {seconds(full)}"
    return f"{incident.id}  {what}: stall {seconds(incident.stall_s)}, {end}"
