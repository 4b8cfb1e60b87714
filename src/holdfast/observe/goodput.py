"""Formats goodput: what the wall time was spent on, and which part of it is not known."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from holdfast.protocol import units
from holdfast.protocol.phases import TimeClass

LARGEST_SHOWN = 3
LATELY_S = 60.0
"""For a job that is hardly older than the window, the share within the window is not shown."""

WORDS = {
    TimeClass.START: "until the job's first step",
    TimeClass.COMPUTED: "steps; only the script knows whether it repeated some of them",
    TimeClass.PRODUCTIVE: "steps whose result was kept",
    TimeClass.RECOMPUTED: "steps that were rolled back and repeated",
    TimeClass.SLOW_RANKS: "in steps, waiting for slow ranks",
    TimeClass.DATA_WAIT: "in steps, waiting for the data of the last rank",
    TimeClass.SNAPSHOT_STALL: "in steps, waiting until the state was copied",
    TimeClass.FEWER_WORKERS: "share of steps lost to having fewer workers than wanted",
    TimeClass.IDLE_DIVISION: "share of steps in which workers are idle, because micro-batches do not divide evenly",
    TimeClass.PAUSED: "the script's own work between steps",
    TimeClass.INTERRUPTED: "steps that were interrupted by a fault",
    TimeClass.DETECT: "from a fault until it was noticed",
    TimeClass.DECIDE: "from its detection until all workers had left the broken generation",
    TimeClass.REPLACE: "until there were enough workers for the next generation",
    TimeClass.JOIN: "until the workers of the next generation were connected",
    TimeClass.RESTORE: "until those that are new had the state",
    TimeClass.FIRST_STEP: "until the first step of the next generation was done",
    TimeClass.RESTART: "from a new start of all workers to its first step",
    TimeClass.PLANNED: "around planned changes of the membership",
    TimeClass.SAVING: "after the last step",
    TimeClass.UNEXPLAINED: "not known: the script did not report steps to Holdfast",
}

LARGE_LOSS = 0.1
"""From this share of the wall time on, a loss that a setting can reduce is listed as something to do."""
LEAST_WALL_S = 60.0
"""In a shorter time a single fault is a large share, which says nothing about the setting."""
# In the order in which equally large losses are listed. A class is here only if a setting of the job or a
# line of the script makes it smaller: for other classes a person would read that time was lost, and could do
# nothing about it.
_MENDED_BY = {
    TimeClass.IDLE_DIVISION: (
        "workers wait in each step, because the micro-batches do not divide evenly among them. "
        "Set a smaller micro_batch in run.steps, or a number of workers (with shards: of replicas) that divides them",
        "holdfast plan division --global-batch N --micro-batch M",
    ),
    TimeClass.DATA_WAIT: (
        "steps wait for data. Let more processes prepare it: holdfast.data.shuffled(..., workers=N)",
        "",
    ),
    TimeClass.SNAPSHOT_STALL: (
        "copying the state holds up the steps. Take snapshots less often",
        "holdfast run --snapshot-every TIME",
    ),
    TimeClass.RECOMPUTED: (
        "steps were rolled back and are done again. Take snapshots more often; at levels 0 and 1, save more often",
        "holdfast run --snapshot-every TIME",
    ),
    TimeClass.SLOW_RANKS: (
        "workers wait for slow ranks. Let nodes that stay slow be replaced",
        "holdfast run --replace-slow 1.3",
    ),
    TimeClass.FEWER_WORKERS: (
        "fewer workers train than wanted. Add nodes, or keep spares ready",
        "holdfast run --spares N",
    ),
    TimeClass.REPLACE: (
        "training waits until lost nodes are replaced. Keep spares ready",
        "holdfast run --spares N",
    ),
    TimeClass.DETECT: (
        "faults are noticed late. Shorten the time after which a silent node or a stalled worker counts as lost",
        "holdfast run --detection SECONDS --stall-factor FACTOR",
    ),
    TimeClass.RESTART: (
        "after each fault all workers start again. Let warm processes import in advance, or train in process (level 2), where "
        "workers survive a fault",
        "holdfast run --preload MODULE,...",
    ),
    TimeClass.PAUSED: (
        "the script works between steps, for example on an evaluation. Do that less often in the script",
        "",
    ),
}


def losses(part: Mapping[str, Any], micro_batches: int | None = None) -> list[dict[str, Any]]:
    """Large losses of wall time that a setting can reduce, the largest first: class, share, text, and how, a command or
    empty.

    part: `wall_s` and `classes`, of the whole job or of its last hour. micro_batches: per step, if known.
    """
    wall_s = part.get("wall_s") or 0.0
    if wall_s < LEAST_WALL_S:
        return []
    classes = part.get("classes") or {}
    large = [(kind, classes.get(kind, 0.0) / wall_s) for kind in _MENDED_BY]
    found = []
    for kind, share in sorted(large, key=lambda one: -one[1]):
        if share < LARGE_LOSS:
            break
        advice, how = _MENDED_BY[kind]
        if kind is TimeClass.IDLE_DIVISION and micro_batches:
            advice = advice.replace("the micro-batches", f"{micro_batches} micro-batches", 1)
            advice += f": {_divisors(micro_batches)}"
        text = f"{_name(kind)} takes {units.share(share)} of {units.seconds(wall_s)}: {advice}."
        found.append({"class": kind.value, "share": round(share, 4), "text": text, "how": how})
    return found


def _divisors(number: int, most: int = 8) -> str:
    """`1, 2, 3, 6`; if there are many, the largest."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    found = sorted({*small, *(number // n for n in small)})
    return ", ".join(map(str, found)) if len(found) <= most else "…, " + ", ".join(map(str, found[-most:]))


def goodput_words(goodput: Mapping[str, Any]) -> str:
    """`85.8% of 93.2 s wall time`; if goodput is not known, the part that is known, and the reason."""
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
    """`, 91.2% of the last 60 min`, if the job is older than that and the figure is known."""
    recent = goodput.get("recent") or {}
    if recent.get("share") is None or goodput["wall_s"] - recent["wall_s"] < LATELY_S:
        return ""
    return f", {units.share(recent['share'])} of the last {recent['wall_s'] / 60:.0f} min"


def goodput_line(goodput: Mapping[str, Any]) -> Text:
    """`goodput  85.8% of 93.2 s wall time; 6.10 s start, 4.20 s recomputed, 1.10 s restart`: the largest losses."""
    # The time of steps is no loss, even if only the script knows whether it repeated them.
    lost = {k: s for k, s in goodput["classes"].items() if k not in ("productive", "computed")}
    largest = sorted(lost, key=lambda kind: -lost[kind])[:LARGEST_SHOWN]
    parts = ", ".join(f"{units.seconds(lost[kind])} {_name(kind)}" for kind in largest)
    line = f"goodput  {goodput_words(goodput)}" + (f"; {parts}" if parts else "")
    return Text(line, style="dim", overflow="ellipsis", no_wrap=True)


def losses_lines(found: Sequence[Mapping[str, Any]]) -> Text:
    """The result of `losses`, as a report prints it."""
    lines = [one["text"] + (f" See `{one['how']}`." if one["how"] else "") for one in found]
    return Text("\n".join(f"to do  {line}" for line in lines))


def goodput_table(goodput: Mapping[str, Any]) -> Table:
    """A table of every class with its seconds and its share of the wall time."""
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
