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
    TimeClass.COMPUTED: "steps; only the script knows which of them it did again",
    TimeClass.PRODUCTIVE: "steps that stayed",
    TimeClass.RECOMPUTED: "steps that were rolled back and done again",
    TimeClass.SLOW_RANKS: "in steps, until slow ranks had computed",
    TimeClass.DATA_WAIT: "in steps, until the last one's data had come",
    TimeClass.SNAPSHOT_STALL: "in steps, until the state was copied",
    TimeClass.FEWER_WORKERS: "the missing share of steps with fewer workers than wanted",
    TimeClass.IDLE_DIVISION: "the idle share of steps that do not divide evenly",
    TimeClass.PAUSED: "the script's own work between steps",
    TimeClass.INTERRUPTED: "steps that a fault ended",
    TimeClass.DETECT: "until a fault was noticed",
    TimeClass.DECIDE: "until all workers had left what a fault disturbed",
    TimeClass.REPLACE: "until there were workers enough",
    TimeClass.JOIN: "until they were connected",
    TimeClass.RESTORE: "until they had the state",
    TimeClass.FIRST_STEP: "until the first step after a fault",
    TimeClass.RESTART: "from a new start of all workers to its first step",
    TimeClass.PLANNED: "around planned changes of the membership",
    TimeClass.SAVING: "after the last step",
    TimeClass.UNEXPLAINED: "not known: the script told Holdfast of no step",
}


def goodput_words(goodput: Mapping[str, Any]) -> str:
    """`85.8% of 93.2 s wall time`; where it is not known, what is, and why."""
    if goodput.get("unknown") and goodput.get("wall_s") is None:
        return f"{units.UNKNOWN}: what an earlier start did cannot be read"
    wall = f"{units.seconds(goodput.get('wall_s'))} wall time"
    if goodput.get("share") is not None or not goodput.get("unknown"):
        return f"{units.share(goodput.get('share'))} of {wall}{_recent_words(goodput)}"
    if "unexplained" in goodput["classes"]:
        return f"{units.UNKNOWN} of {wall}: the script told Holdfast of no step"
    computed = units.seconds(goodput["computed_s"])
    return f"{units.UNKNOWN} of {wall}: of {computed} of steps only the script knows which it did again"


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
