"""The closing error: the first failing rank, its node, the cause, where to look and what to do. Printed last."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from holdfast.protocol import units

LAST_LINES = 15
# The first pattern that is found counts, so what is certain (a module is missing) stands before what is
# likely (memory). The patterns read words that the core writes: of a reason (`membership/`) or of a cause
# (`protocol/causes.py`). Whoever changes those words has to change these, or people get the advice for
# nothing in particular.
_ADVICE = (
    (
        r"No ?module named|ModuleNotFoundError|ImportError",
        "Install the module into the environment that `holdfast` runs in, then start again.",
    ),
    (
        r"^the same error|the script failed",
        "The script fails in the same way every time, so no machine is at fault: fix the script.",
    ),
    (
        r"^refused before",
        "No machine is at fault, and no step was done: change what the cause names, then start again.",
    ),
    (
        r"killed for want of memory",
        "Give each node more memory (on Kubernetes --node-memory), or use fewer workers, a smaller batch, or less for snapshots "
        "(--snapshot-memory).",
    ),
    (
        r"^step \d+ ended a worker",
        "Look at the samples of that step: `--nnodes 1` goes on from the newest saved step and computes all of them in one worker, "
        "so let the data set print the numbers that it is asked for. After SIGKILL see `dmesg | grep -i oom` first.",
    ),
    (
        r"SIGKILL|out of memory",
        "Was it short of memory? See `dmesg | grep -i oom`; use fewer workers or a smaller batch.",
    ),
    (
        r"restart budget|no restarts|no more nodes",
        "Find out why so much failed (the incidents above), or allow more with --max-restarts.",
    ),
    (
        r"too few workers",
        "Give the job more nodes or --spares, or let it go on smaller with --nnodes MIN:MAX.",
    ),
)
_FRAME = re.compile(r'\s*File "[^"]+", line \d+(?:, in .*)?$')
_LIBRARY = re.compile(
    r'"<|/(?:site|dist)-packages/|/lib/python3\.\d+/|' + re.escape(str(Path(__file__).parents[1])) + "/"
)
_DEFAULT_ADVICE = "Look at the log; `holdfast events` shows all that happened."
_GO_ON = "The same command with --job {job} goes on from the newest saved step."


def closing(report: Mapping[str, Any], saved: bool) -> RenderableType:
    """What went wrong, for the end of the output. `saved`: the job has a checkpoint to go on from."""
    blame = report.get("blame") or {}
    reason = units.text(report.get("reason"))
    facts = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    facts.add_column(style="dim")
    facts.add_column(overflow="fold")
    if blame.get("cause"):
        facts.add_row("cause", Text(units.text(blame["cause"])))
    traceback = (blame.get("traceback") or "").rstrip()
    if place := line_of_the_script(traceback):
        facts.add_row("at", Text(place))
    facts.add_row("reason", Text(reason))
    for name, key in (("first failing rank", "rank"), ("node", "node"), ("step", "step")):
        if blame.get(key) is not None:
            facts.add_row(name, units.text(blame[key]))
    parts: list[RenderableType] = [
        Rule(Text(f"the job {report.get('outcome')}", style="bold red"), style="red"),
        facts,
    ]
    if traceback:
        parts += [Text(), _as_is(traceback)]
    tail = last_lines(blame.get("tail") or [], traceback)
    if tail:
        parts += [Text(), Text("last lines", style="dim"), _as_is("\n".join(tail))]
    parts += [Text(), _as_is(f"log      {units.text(blame.get('log'))}")]
    go_on = f" {_GO_ON.format(job=report.get('job'))}" if saved else ""
    parts.append(Text(f"what now {advice(reason, blame)}{go_on}"))
    return Group(*parts)


def going_on(report: Mapping[str, Any]) -> str:
    """Of a job that was stopped before its last step: what of it is there, and how it goes on."""
    again = f"the same command with --job {report.get('job')}"
    saved, unsaved, memory = report.get("saved"), report.get("unsaved"), report.get("in_memory")
    if unsaved is not None and memory:
        return (
            f"Step {units.count(unsaved)} is saved nowhere but in the memory of the nodes: {again} goes on from it, on the same "
            "machines and before they are restarted."
        )
    if unsaved is not None:
        older = f"goes on from step {units.count(saved['step'])}" if saved else "begins anew"
        return f"Step {units.count(unsaved)} could not be saved: {again} {older}."
    if saved is None and (report.get("steps") or {}).get("computed") == 0:
        return f"No step was done: {again} begins anew."
    if saved is None:
        return f"Holdfast saved no state: {again} begins anew, unless the script goes on from what it saved itself."
    if report.get("queued_again"):
        return f"Step {units.count(saved['step'])} is saved. The job is queued again and goes on from it by itself."
    return f"Step {units.count(saved['step'])} is saved: {again} goes on from it."


def line_of_the_script(traceback: str) -> str:
    """The innermost line that is neither a library's nor ours, as `/home/a/train.py, line 12, in main`; empty: there is none."""
    frames = [found[0] for line in traceback.splitlines() if (found := _FRAME.match(line))]
    theirs = [f for f in frames if not _LIBRARY.search(f)]
    return theirs[-1].strip().removeprefix("File ").replace('"', "") if theirs else ""


def _as_is(text: str) -> Text:
    """Not wrapped, so that a path or a line of code can be copied."""
    return Text(text, no_wrap=True, overflow="ignore")


def last_lines(tail: Sequence[str], traceback: str) -> list[str]:
    """The log's last lines without the traceback, which is shown once."""
    # The worker's log ends with the same traceback. Shown twice it would push the lines before it, which
    # often say more, off the screen.
    known = {line.strip() for line in traceback.splitlines()} if traceback else set()
    return [line for line in tail if line.strip() not in known][-LAST_LINES:]


def advice(reason: str, blame: Mapping[str, Any]) -> str:
    """What a person can do about it."""
    evidence = " ".join((blame.get("cause") or "", blame.get("traceback") or ""))
    for pattern, words in _ADVICE:
        if re.search(pattern, reason) or re.search(pattern, evidence):
            return words
    return _DEFAULT_ADVICE
