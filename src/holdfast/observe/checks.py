"""Formats the results of checks: as a table, and as lines while the checks run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from holdfast.protocol import units
from holdfast.protocol.health import CheckResult, Condition

STYLES = {Condition.HEALTHY: "green", Condition.FAULTY: "bold red", Condition.UNKNOWN: "yellow"}
ALL_ROWS_UP_TO = 4
"""With more nodes than this, every node has one line, and only results that are not healthy have rows."""

Results = Mapping[str, Sequence[CheckResult]]


def checks_table(by_node: Results, conditions: Mapping[str, Condition]) -> Table:
    """A table with one row for every result, worst nodes first."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("node", overflow="fold", max_width=16)
    table.add_column("check", overflow="fold", max_width=22)
    table.add_column("", no_wrap=True)
    table.add_column("measured", justify="right", no_wrap=True)
    table.add_column("least", justify="right", no_wrap=True)
    table.add_column("", overflow="fold", ratio=1)
    brief = len(by_node) > ALL_ROWS_UP_TO
    order = (Condition.FAULTY, Condition.UNKNOWN, Condition.HEALTHY)
    for node in sorted(by_node, key=lambda n: order.index(conditions[n])):
        results = [r for r in by_node[node] if not brief or r.condition is not Condition.HEALTHY]
        if not results:
            passed = units.plural(len(by_node[node]), "result")
            table.add_row(
                node, "", _word(conditions[node]), "", "", Text(f"{passed}, all healthy", style="dim")
            )
        for i, r in enumerate(results):
            table.add_row(
                node if not i else "",
                _name(r),
                _word(r.condition),
                measured(r),
                floor(r),
                Text(notes(r), style="dim"),
            )
    return table


def notes(result: CheckResult) -> str:
    """The text beside the figures: the other node, and the detail."""
    to = f"to {result.with_node}" if result.with_node else ""
    return "; ".join(filter(None, (to, result.detail)))


def measured(result: CheckResult) -> str:
    """The measured value, with its unit."""
    return "" if result.value is None else figure(result.value, result.unit)


def floor(result: CheckResult) -> str:
    """The limit: at least, or at most, this."""
    if result.floor is None:
        return ""
    return ("≤ " if result.lower else "") + figure(result.floor, result.unit)


def figure(value: float, unit: str) -> str:
    """`2.21 GB/s`, `21.4 GB`, `12 files`."""
    if unit == "B":
        return units.size(int(value))
    if unit == "s":
        return units.seconds(value) if value >= 1e-3 or value == 0 else f"{value * 1e6:.0f} µs"
    number = f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"
    return f"{number} {unit}".strip()


def _name(result: CheckResult) -> str:
    where = f" {result.subject}" if result.subject and not result.subject.startswith("/") else ""
    return result.name + where


def _word(condition: Condition) -> Text:
    return Text(condition.value, style=STYLES[condition])
