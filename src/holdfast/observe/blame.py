"""The closing error: what happened, where, and what to do. Printed last, and each of them once."""

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
        r"^(?:UsageError|StateChanged)\b",
        "Change the script as the message says; no machine is at fault.",
    ),
    (
        r"^NonFiniteGradient\b",
        "Follow the message. If the samples and the script are in order, use `holdfast check --deep` to look for a "
        "machine that computes wrongly.",
    ),
    (
        r"^FileNotFoundError\b",
        "The file must exist under this path on every node.",
    ),
    (
        r"^the same error",
        "The script fails in the same way every time, so no machine is at fault: fix the script.",
    ),
    (
        r"the script failed",
        "The error was raised by the script itself: fix the script.",
    ),
    (
        r"^refused before",
        "No machine is at fault, and no step was done: correct what is described above, then start again.",
    ),
    (
        r"out-of-memory killer",
        "Give each node more memory (on Kubernetes --node-memory), or use fewer workers, a smaller batch, or less for snapshots "
        "(--snapshot-memory).",
    ),
    (
        r"^step \d+ ended a worker",
        "Look at the samples of that step. With `--nnodes 1` the job continues from the newest saved step and one "
        "worker computes all samples, so the data set can print the numbers of the samples that it loads. If a "
        "worker was ended by SIGKILL, see `dmesg | grep -i oom` first.",
    ),
    (
        r"SIGKILL|out of memory",
        "The machine may have run out of memory: see `dmesg | grep -i oom`, and use fewer workers or a smaller batch.",
    ),
    (
        r"refused for the same reason \(shm:",
        "Snapshots need more space in /dev/shm: increase its size (`docker run --shm-size 2g`; as root `mount -o "
        "remount,size=2g /dev/shm`), or set HOLDFAST_MEMORY to a folder in another memory file system.",
    ),
    (
        r"restart budget|no restarts|no more nodes",
        "Find out why there were so many failures (see the incidents above), or allow more restarts with "
        "--max-restarts.",
    ),
    (
        r"too few workers",
        "Give the job more nodes or --spares, or let it continue on fewer nodes with --nnodes MIN:MAX.",
    ),
)
_FRAME = re.compile(r'  File "(?P<path>[^"]+)", line (?P<line>\d+)(?P<name>, in .*)?$')
_LIBRARY = re.compile(
    r'"<|/(?:site|dist)-packages/|/lib/python3\.\d+/|' + re.escape(str(Path(__file__).parents[1])) + "/"
)
_DEFAULT_ADVICE = "Look at the log. `holdfast events` shows everything that happened in the job."
_GO_ON = "The same command with --job {job} continues from the newest saved step."


def closing(report: Mapping[str, Any], saved: bool) -> RenderableType:
    """What happened, where, and what to do, for the end of the output. `saved`: the job has a checkpoint to go on from."""
    blame = report.get("blame") or {}
    reason = units.text(report.get("reason"))
    traceback = (blame.get("traceback") or "").rstrip()
    parts: list[RenderableType] = [
        Rule(Text(f"the job {report.get('outcome')}", style="bold red"), style="red")
    ]
    lines = lines_of_the_script(traceback)
    if traceback and not lines:
        parts += [_as_is(traceback), Text()]
    # A traceback says more than what its worker wrote before and after it.
    tail = [] if traceback else last_lines(blame.get("tail") or [], traceback)
    if tail:
        parts += [Text("last lines", style="dim"), _as_is("\n".join(tail)), Text()]
    facts = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    cause = units.text(blame.get("cause") or reason)
    facts.add_row("what happened", Text(re.sub(r"\n\s+", "\n", cause)))
    facts.add_row("where", Text(place(blame, report)))
    for line in lines:
        facts.add_row("", Text(line))
    if blame.get("log"):
        facts.add_row("log", Text(units.text(blame["log"])))
    if blame.get("cause"):
        facts.add_row("why it ended", Text(reason))
    go_on = f" {_GO_ON.format(job=report.get('job'))}" if saved else ""
    facts.add_row("what to do", Text(f"{advice(reason, blame)}{go_on}"))
    return Group(*parts, facts)


def going_on(report: Mapping[str, Any]) -> str:
    """Of a job that was stopped before its last step: what of it is there, and how it goes on."""
    again = f"the same command with --job {report.get('job')}"
    saved, unsaved, memory = report.get("saved"), report.get("unsaved"), report.get("in_memory")
    if unsaved is not None and memory:
        return (
            f"Step {units.count(unsaved)} is only in the memory of the nodes: {again} continues from it if it is run "
            "on the same machines before they are restarted."
        )
    if unsaved is not None:
        older = f"continues from step {units.count(saved['step'])}" if saved else "starts from the beginning"
        return f"Step {units.count(unsaved)} could not be saved: {again} {older}."
    if saved is None and (report.get("steps") or {}).get("computed") == 0:
        return f"No step was done: {again} starts from the beginning."
    if saved is None:
        return (
            f"Holdfast did not save a state: {again} starts from the beginning, unless the script resumes from a "
            "checkpoint of its own."
        )
    if report.get("queued_again"):
        return (
            f"Step {units.count(saved['step'])} is saved. The job is queued again and continues from it without "
            "further action."
        )
    return f"Step {units.count(saved['step'])} is saved: {again} continues from it."


def place(blame: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    """Which rank, which node and which step, as far as they are known."""
    rank, node, step = (blame.get(name) for name in ("rank", "node", "step"))
    who = "" if rank is None else f"rank {rank}"
    if node is not None:
        who += f"{' on ' if who else ''}{node}"
    committed = (report.get("steps") or {}).get("committed")
    when = f"at step {step}" if step is not None else ""
    if step is None and committed is not None:
        when = f"after {committed} committed step{'' if committed == 1 else 's'}"
    return ", ".join(part for part in (who, when) if part) or "not known"


def lines_of_the_script(traceback: str) -> list[str]:
    """The lines that are neither a library's nor ours, outermost first, as `/home/a/train.py:12, in main` and below it the line
    itself. The log has the others. Empty: there is none."""
    found: list[str] = []
    theirs = False
    for line in traceback.splitlines():
        if frame := _FRAME.match(line):
            theirs = not _LIBRARY.search(line)
            if theirs:
                found.append(f"{frame['path']}:{frame['line']}{frame['name'] or ''}")
        elif not line.startswith(" " * 4):
            theirs = False  # the error itself, or between two of them
        elif theirs and line.strip(" ^~"):
            found.append(line)
    return found


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
