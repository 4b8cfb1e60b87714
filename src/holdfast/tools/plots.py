"""Draws the planner's pictures: with matplotlib as PNG or SVG, and as characters in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from holdfast.errors import UsageError
from holdfast.tools.plan.candidates import Curve

SIZE_INCHES = (9.0, 5.0)
DPI = 110
HEIGHT, WIDTH = 14, 64
MARKS = "●▲■◆○△"


def draw_curves(
    path: Path, title: str, curves: Sequence[Curve], x: str, y: str, log: bool = False, percent: bool = False
) -> None:
    """Writes one picture. A curve of one point is drawn as a mark. log: the x axis is logarithmic.

    Raises:
        UsageError: matplotlib is missing, or the file cannot be written.
    """
    figure, axes = _figure(title)
    for curve in curves:
        xs, ys = zip(*curve.points, strict=True)
        axes.plot(xs, ys, marker="o" if len(xs) == 1 else None, ms=9, label=curve.name, lw=1.6)
    if log:
        axes.set_xscale("log", base=10)
    if percent:
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f}%")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(visible=True, color="#e6e6e6", lw=0.6)
    axes.legend(frameon=False, fontsize=8)
    _write(figure, path)


def draw_waterfall(path: Path, title: str, parts: Sequence[tuple[str, float]], unit: str) -> None:
    """Writes the parts of a whole as a waterfall.

    Raises:
        UsageError: matplotlib is missing, or the file cannot be written.
    """
    figure, axes = _figure(title)
    begin = 0.0
    for i, (_, size) in enumerate(parts):
        axes.bar(i, size, bottom=begin, color="#1f5fa8" if i == 0 else "#c0392b")
        axes.annotate(f"{size:.1f}", (i, begin + size), ha="center", va="bottom", fontsize=9)
        begin += size
    axes.set_xticks(range(len(parts)), [name for name, _ in parts])
    axes.set_ylabel(unit)
    axes.margins(y=0.1)
    _write(figure, path)


def print_curves(stream: IO[str], title: str, curves: Sequence[Curve], x: str, percent: bool = False) -> None:
    """Draws the curves with characters: a mark for every curve, x in the order of its points."""
    lines = [c for c in curves if len(c.points) > 1]
    xs = [p[0] for p in lines[0].points]
    values = [y for c in lines for _, y in c.points]
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    grid = [[" "] * WIDTH for _ in range(HEIGHT)]
    for number, curve in enumerate(lines):
        for i, (_, value) in enumerate(curve.points):
            column = round(i * (WIDTH - 1) / max(1, len(xs) - 1))
            grid[HEIGHT - 1 - round((value - low) / span * (HEIGHT - 1))][column] = MARKS[number % len(MARKS)]

    def label(value: float) -> str:
        return f"{100 * value:6.1f}%" if percent else f"{value:12,.0f}"

    stream.write(f"\n{title}\n")
    for row, marks in enumerate(grid):
        edge = label(high) if row == 0 else label(low) if row == HEIGHT - 1 else " " * len(label(low))
        stream.write(f"{edge} │{''.join(marks).rstrip()}\n")
    stream.write(" " * len(label(low)) + " └" + "─" * WIDTH + "\n")
    first, last = f"{xs[0]:,.0f}", f"{xs[-1]:,.0f} {x}"
    stream.write(" " * (len(label(low)) + 2) + first + last.rjust(WIDTH - len(first)) + "\n")
    stream.write("  ".join(f"{MARKS[n % len(MARKS)]} {c.name}" for n, c in enumerate(lines)) + "\n")


def _figure(title: str) -> tuple[Any, Any]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("the picture needs matplotlib: pip install 'holdfast-train[plot]'") from None
    figure = Figure(figsize=SIZE_INCHES, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(title=title)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _write(figure: Any, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format=path.suffix.lstrip(".") or "png")
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be written: {error}") from error
