"""Published tables, recomputed and compared cell by cell.

If a published cell does not follow from the formula that its neighbours follow, the formula is not adapted: the cell is
shown with both values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

import msgspec

from holdfast import formulas

MISFIT = "the formula gives another; nor does it fit table 5"
CUT = "cut, not rounded"


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One published figure, and the same figure computed."""

    table: str
    """Number and title of the table."""
    row: str
    """The heading of its row."""
    column: str
    """The heading of its column."""
    published: float
    """The published value."""
    computed: float
    """The value of the formula, rounded as in the table."""
    exact: float
    """The same before rounding."""
    note: str = ""
    """A remark if the published figure is irregular."""

    @property
    def equal(self) -> bool:
        """Whether the formula gives the published figure."""
        return self.computed == self.published


def compare(published: Mapping[str, Any]) -> list[Cell]:
    """Every cell of every table. published: the content of `published.json`."""
    return [
        *_rates(published["observed_failure_rates"]),
        *_mtbf(published["table1_mtbf_hours"]),
        *_phases("2: 90th percentile of downtime, s", published["table2_p90_downtime_seconds"]),
        *_typical(published["table3_typical_minutes"]),
        *_saved(published["table4_training_time_saved_percent"]),
        *_days(published["table5_days"]),
        *_cost(published["table6_cost"], published["table5_days"]["inputs"]),
    ]


def _rates(runs: list[Mapping[str, Any]]) -> Iterator[Cell]:
    for run in runs:
        # Four digits, as published: the comparison is of cells, and a cell that agrees to fewer digits does
        # not agree.
        exact = 100 * formulas.rate_per_node_hour(run["failures"], run["instances"], run["hours"])
        yield Cell(
            table="observed failure rates",
            row=run["run"],
            column="% per node-hour",
            published=run["rate_percent"],
            computed=round(exact, 4),
            exact=exact,
        )


def _mtbf(table: Mapping[str, Any]) -> Iterator[Cell]:
    for rate, row in table["rows"].items():
        for nodes, published in zip(table["instances"], row, strict=True):
            exact = formulas.mtbf_hours(nodes, float(rate) / 100)
            # The table rounds up, so 2500 computed as a little more in floating point would become 2501: exact fractions.
            up = math.ceil(1 / (nodes * Fraction(rate) / 100))
            yield Cell(
                table="1: MTBF of the cluster, h",
                row=f"{rate}%",
                column=f"{nodes} nodes",
                published=published,
                computed=up,
                exact=exact,
            )


def _phases(name: str, table: Mapping[str, Any]) -> Iterator[Cell]:
    for nodes, row in table["rows"].items():
        total = sum(row[:-1])
        yield Cell(
            table=name,
            row=f"{nodes} nodes",
            column="total",
            published=row[-1],
            computed=total,
            exact=total,
        )


def _typical(table: Mapping[str, Any]) -> Iterator[Cell]:
    rows = table["rows"]
    for i, column in enumerate(table["columns"]):
        total = sum(rows[phase][i] for phase in ("root_cause", "replace", "resume"))
        yield Cell(
            table="3: typical downtime, min",
            row="total",
            column=column,
            published=rows["total"][i],
            computed=total,
            exact=total,
        )


def _saved(table: Mapping[str, Any]) -> Iterator[Cell]:
    for rate, row in table["rows"].items():
        for nodes, published in zip(table["instances"], row, strict=True):
            exact = 100 * formulas.share_saved(nodes, float(rate) / 100, 40 / 60, 280 / 60)
            note = "" if round(exact) == published else MISFIT
            yield Cell(
                table="4: training time saved, %",
                row=f"{rate}%",
                column=f"{nodes} nodes",
                published=published,
                computed=round(exact),
                exact=exact,
                note=note,
            )


def _days(table: Mapping[str, Any]) -> Iterator[Cell]:
    given = table["inputs"]
    nodes, rate = given["instances"], given["rate_percent"] / 100
    days = formulas.productive_days(given["gpu_hours"], nodes * given["gpus_per_instance"])
    lost = {
        who: formulas.days_lost(nodes, rate, days, given[f"downtime_minutes_{who}"] / 60)
        for who in ("managed", "self_managed")
    }
    name, row = "5: days", "10 million GPU-hours"
    for who, exact in lost.items():
        label = who.replace("_", "-")
        # This table truncates where the others round. Both values are shown, with a note where it matters,
        # instead of a rule that fits every cell by design.
        cut = math.floor(exact)
        note = CUT if cut != round(exact) else ""
        yield Cell(
            table=name,
            row=row,
            column=f"lost, {label}",
            published=table[f"days_lost_{who}"],
            computed=cut,
            exact=exact,
            note=note,
        )
        yield Cell(
            table=name,
            row=row,
            column=f"in all, {label}",
            published=table[f"days_{who}"],
            computed=round(days + exact),
            exact=days + exact,
        )
    less = lost["self_managed"] - lost["managed"]
    share = 100 * less / (days + lost["self_managed"])
    yield Cell(
        table=name,
        row=row,
        column="improvement, %",
        published=table["improvement_percent"],
        computed=round(share),
        exact=share,
    )
    yield Cell(
        table=name,
        row=row,
        column="saved",
        published=table["days_saved"],
        computed=round(less),
        exact=less,
    )


def _cost(table: Mapping[str, Any], job: Mapping[str, Any]) -> Iterator[Cell]:
    given = table["inputs"]
    gpus = job["instances"] * job["gpus_per_instance"]
    exact = formulas.cost(given["days_saved"], gpus, given["usd_per_gpu_hour"])
    yield Cell(
        table="6: cost saved, USD",
        row=f"{given['days_saved']} days",
        column=f"{gpus} GPUs",
        published=table["usd_saved"],
        computed=exact,
        exact=exact,
    )
