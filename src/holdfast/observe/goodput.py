"""Goodput in words: what the wall time was spent on, and what of it cannot be known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from holdfast.protocol import units
from holdfast.protocol.time_classes import TimeClass

LARGEST_SHOWN = 3
LATELY_S = 60.0
"""A job that is hardly older than the window needs no second share."""

WORDS = {
    TimeClass.START: "until the job's first step",
    TimeClass.COMPUTED: "steps, of which the script may have repeated some: only it knows",
    TimeClass.PRODUCTIVE: "steps whose result was kept",
    TimeClass.RECOMPUTED: "steps that were rolled back and repeated",
    TimeClass.SLOW_RANKS: "in steps, waiting for slow ranks",
    TimeClass.DATA_WAIT: "in steps, waiting for the data of the last rank",
    TimeClass.SNAPSHOT_STALL: "in steps, waiting until the state was copied",
    TimeClass.FEWER_WORKERS: "share of steps lost to having fewer workers than wanted",
    TimeClass.IDLE_DIVISION: "share of steps in which workers are idle, because micro-batches do not divide evenly",
    TimeClass.PAUSED: "the script's own work between steps",
    TimeClass.INTERRUPTED: "steps that were interrupted by a fault",
    TimeClass.DETECT: "until a fault was noticed",
    TimeClass.DECIDE: "from there until all workers had left the broken generation",
    TimeClass.REPLACE: "from there until there were enough workers",
    TimeClass.JOIN: "from there until the workers were connected",
    TimeClass.RESTORE: "from there until the workers had the state",
    TimeClass.FIRST_STEP: "from there until the first step was done",
    TimeClass.RESTART: "from a new start of all workers to its first step",
    TimeClass.PLANNED: "around planned changes of the membership",
    TimeClass.SAVING: "after the last step",
    TimeClass.UNEXPLAINED: "not known: the script did not report steps to Holdfast",
}


def goodput_words(goodput: Mapping[str, Any]) -> str:
    """`85.8% of 93.2 s wall time`; where it is not known, what is, and why."""
    if goodput.get("unknown") and goodput.get("wall_s") is None:
        return f"{units.UNKNOWN}: the record of an earlier start cannot be read"
    wall = f"{units.seconds(goodput.get('wall_s'))} wall time"
    if goodput.get("share") is not None or not goodput.get("unknown"):
        return f"{units.share(goodput.get('share'))} of {wall}{_recent_words(goodput)}"
    if "unexplained" in goodput["classes"]:
        return f"{units.UNKNOWN} of {wall}: the script did not report steps to Holdfast"
    computed = units.seconds(goodput["computed_s"])
    return (
        f"{units.UNKNOWN} of {wall}: only the script knows which steps it repeated in {computed} of computing"
    )


def _recent_words(goodput: Mapping[str, Any]) -> str:
    """`, 91.2% of the last 60 min`, if the job is older than that and it is known."""
    recent = goodput.get("recent") or {}
    if recent.get("share") is None or goodput["wall_s"] - recent["wall_s"] < LATELY_S:
        return ""
    return f", {units.share(recent['share'])} of the last {recent['wall_s'] / 60:.0f} min"


def goodput_line(goodput: Mapping[str, Any]) -> Text:
    """`goodput  85.8% of 93.2 s wall time; 6.10 s start, 4.20 s recomputed, 1.10 s restart`: the largest losses."""
    # What a step took is no loss, also where only the script knows whether it did that step again.
    lost = {k: s for k, s in goodput["classes"].items() if k not in ("productive", "computed")}
    largest = sorted(lost, key=lambda kind: -lost[kind])[:LARGEST_SHOWN]
    parts = ", ".join(f"{units.seconds(lost[kind])} {_name(kind)}" for kind in largest)
    words = f"goodput  {goodput_words(goodput)}" + (f"; {parts}" if parts else "")
    return Text(words, style="dim", overflow="ellipsis", no_wrap=True)


def goodput_table(goodput: Mapping[str, Any]) -> Table:
    """Every class with its seconds and its share of the wall time."""
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        title="Wall time",
        title_justify="left",
        title_style="bold",
    )
    table.add_column("class", no_wrap=True)
    table.add_column("what it was spent on", overflow="fold", ratio=1)
    for name in ("time", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    # Every second of the wall time is in exactly one class, so the shares add up to all of it. A class that
    # is left out here would be time that nobody accounts for.
    wall_s = max(goodput["wall_s"], 1e-9)
    for kind, seconds in goodput["classes"].items():
        table.add_row(_name(kind), WORDS.get(kind, ""), units.seconds(seconds), units.share(seconds / wall_s))
    return table


def _name(kind: str) -> str:
    return kind.replace("_", " ")
