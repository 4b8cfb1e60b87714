"""Published tables, computed anew and compared cell by cell.

Where a published cell does not follow from the formula that its own neighbours follow, the formula is not bent: the
cell is shown with both values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

import msgspec

from holdfast.plan import formulas

MISFIT = "the formula gives another; nor does it fit table 5"
CUT = "cut, not rounded"


class Cell(msgspec.Struct, frozen=True):
    """One published figure. computed: rounded as the table rounds; exact: before that. note: what is odd about it."""

    table: str
    row: str
    column: str
    published: float
    computed: float
    exact: float
    note: str = ""

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
        exact = 100 * formulas.rate_per_node_hour(run["failures"], run["instances"], run["hours"])
        yield Cell(
            "observed failure rates",
            run["run"],
            "% per node-hour",
            run["rate_percent"],
            round(exact, 4),
            exact,
        )


def _mtbf(table: Mapping[str, Any]) -> Iterator[Cell]:
    for rate, row in table["rows"].items():
        for nodes, said in zip(table["instances"], row, strict=True):
            exact = formulas.mtbf_hours(nodes, float(rate) / 100)
            # 1/(256 * 0.0004) is 9.7656..., but 1/(4 * 0.0001) is 2500
            up = math.ceil(1 / (nodes * Fraction(rate) / 100))
            yield Cell("1: MTBF of the cluster, h", f"{rate}%", f"{nodes} nodes", said, up, exact)


def _phases(name: str, table: Mapping[str, Any]) -> Iterator[Cell]:
    for nodes, row in table["rows"].items():
        total = sum(row[:-1])
        yield Cell(name, f"{nodes} nodes", "total", row[-1], total, total)


def _typical(table: Mapping[str, Any]) -> Iterator[Cell]:
    rows = table["rows"]
    for i, column in enumerate(table["columns"]):
        total = sum(rows[phase][i] for phase in ("root_cause", "replace", "resume"))
        yield Cell("3: typical downtime, min", "total", column, rows["total"][i], total, total)


def _saved(table: Mapping[str, Any]) -> Iterator[Cell]:
    for rate, row in table["rows"].items():
        for nodes, said in zip(table["instances"], row, strict=True):
            exact = 100 * formulas.share_saved(nodes, float(rate) / 100, 40 / 60, 280 / 60)
            note = "" if round(exact) == said else MISFIT
            yield Cell(
                "4: training time saved, %", f"{rate}%", f"{nodes} nodes", said, round(exact), exact, note
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
        words = who.replace("_", "-")
        cut = math.floor(exact)
        note = CUT if cut != round(exact) else ""
        yield Cell(name, row, f"lost, {words}", table[f"days_lost_{who}"], cut, exact, note)
        yield Cell(name, row, f"in all, {words}", table[f"days_{who}"], round(days + exact), days + exact)
    less = lost["self_managed"] - lost["managed"]
    share = 100 * less / (days + lost["self_managed"])
    yield Cell(name, row, "improvement, %", table["improvement_percent"], round(share), share)
    yield Cell(name, row, "saved", table["days_saved"], round(less), less)


def _cost(table: Mapping[str, Any], job: Mapping[str, Any]) -> Iterator[Cell]:
    given = table["inputs"]
    gpus = job["instances"] * job["gpus_per_instance"]
    exact = formulas.cost(given["days_saved"], gpus, given["usd_per_gpu_hour"])
    yield Cell(
        "6: cost saved, USD", f"{given['days_saved']} days", f"{gpus} GPUs", table["usd_saved"], exact, exact
    )
