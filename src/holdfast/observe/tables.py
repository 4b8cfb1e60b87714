"""The report as tables of at most 100 columns, and last of all, if the job failed, why and what to do."""

from __future__ import annotations

import io
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.rule import Rule
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from holdfast.observe.goodput import goodput_table, goodput_words, losses, losses_lines
from holdfast.observe.printable import printable
from holdfast.protocol import units

WIDTH = 100
Report = Mapping[str, Any]
_OUTCOME_STYLES = {"finished": "bold green", "stopped": "bold yellow"}


class PrintableConsole(Console):
    """Rich's console: what it is given to print controls nothing, and what it says itself to the terminal stays."""

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        return super()._render_buffer(s if s.control else Segment(printable(s.text), s.style) for s in buffer)


def print_report(report: Report, job_dir: Path, stream: IO[str], width: int = WIDTH) -> None:
    """Prints the report to a terminal, a file or a pipe. width: characters of a line."""
    probe = PrintableConsole(file=stream)
    if probe.is_terminal:
        PrintableConsole(file=stream, width=min(width, probe.width) if width == WIDTH else width).print(
            report_view(report, job_dir), crop=False
        )
        return
    # Always of this width, and without the blanks that rich fills lines with: the same report is the same
    # text in every file and pipe, whatever the terminal was.
    text = io.StringIO()
    PrintableConsole(file=text, width=width).print(report_view(report, job_dir), crop=False)
    stream.write("".join(line.rstrip() + "\n" for line in text.getvalue().splitlines()))
    stream.flush()


def print_table(
    stream: IO[str],
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: int = 0,
    width: int = WIDTH,
) -> None:
    """A plain table; the first `right` columns are figures, the last column is folded where it is too wide."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for i, head in enumerate(heads):
        last = i == len(heads) - 1
        table.add_column(head, justify="right" if i < right else "left", no_wrap=not last, overflow="fold")
    for row in rows:
        # As `Text`, which has no markup: names and messages come from scripts and machines, and brackets in
        # them would be taken for styles.
        table.add_row(*map(Text, row))
    text = io.StringIO()
    PrintableConsole(file=text, width=width).print(table, crop=False)
    stream.write("".join(line.rstrip() + "\n" for line in text.getvalue().splitlines()))


def draw_report(report: Report, job_dir: Path, path: Path) -> None:
    """Writes the tables as they look in a terminal into an SVG picture."""
    console = PrintableConsole(
        file=io.StringIO(), width=WIDTH, record=True, force_terminal=True, color_system="truecolor"
    )
    console.print(report_view(report, job_dir), crop=False)
    drawn = console.export_svg(title=f"holdfast report --job {job_dir.name}")
    fonts = (
        r"@font-face \{.*?\}\s*"  # would be loaded from a server of somebody's; any monospaced font will do
    )
    path.write_text(re.sub(fonts, "", drawn, flags=re.DOTALL), encoding="utf-8")


def report_view(report: Report, job_dir: Path) -> RenderableType:
    """Header, the wall time, incidents, where their time went, planned changes, slow ranks; the closing error last."""
    parts: list[RenderableType] = [_header(report, job_dir)]
    trained = _has_trained(report)
    if trained and _knows_steps(report) and (goodput := report.get("goodput") or {}).get("classes"):
        parts += [Text(), goodput_table(goodput)]
        if large := losses(goodput, (report.get("world") or {}).get("micro_batches")):
            parts.append(losses_lines(large))
    incidents = report.get("incidents") or []
    if trained and incidents:
        parts += [Text(), _incidents(incidents), Text(), _durations(incidents)]
    changes = report.get("changes") or []
    if changes:
        parts += [Text(), _changes(changes)]
    slow = report.get("slow") or []
    if slow:
        parts += [Text(), _slow(slow)]
    if report.get("outcome") == "failed":
        parts += [Text(), closing(report, saved=bool(report.get("saved")))]
    if report.get("outcome") == "stopped":
        # The outcome above says why.
        parts += [Text(), Text(f"what now {going_on(report)}")]
    return Group(*parts)


def _has_trained(report: Report) -> bool:
    """A job that failed, or was stopped, before the first step of this start has nothing to show but why."""
    return (
        report.get("outcome") not in ("failed", "stopped")
        or (report.get("steps") or {}).get("median_s") is not None
    )


def _knows_steps(report: Report) -> bool:
    """False: the script finished and told of none."""
    steps = report.get("steps") or {}
    told = steps.get("committed") is not None or steps.get("computed")
    return bool(told) or report.get("outcome") != "finished" or "computed" not in steps


def _header(report: Report, job_dir: Path) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    outcome = units.text(report.get("outcome"))
    reason = f" ({report['reason']})" if report.get("reason") else ""
    table.add_row("job", units.text(report.get("job", job_dir.name)))
    table.add_row("outcome", Text(outcome, style=_OUTCOME_STYLES.get(outcome, "bold red")) + Text(reason))
    if _has_trained(report):
        _add_figures(table, report)
    if saved := report.get("saved"):
        table.add_row("saved", Text(f"step {units.count(saved['step'])} in {saved['url']}"))
    for at, why in enumerate(report.get("unread") or []):
        table.add_row("" if at else "not loaded", Text(why))
    if (taken := report.get("snapshots")) and (taken["complete"] or taken["skipped"]):
        table.add_row("snapshots", _taken(taken))
    if memory := report.get("in_memory"):
        table.add_row("memory", Text(_kept(memory, report.get("job", job_dir.name))))
    if (incidents := report.get("incidents") or []) or _has_trained(report):
        table.add_row("incidents", _summary(incidents))
    if (samples := report.get("samples")) and (samples["recorded"] or samples["checked_utc"]):
        table.add_row("samples", Text(_samples(samples)))
    if dropped := report.get("dropped"):
        gone = ", ".join(f"{units.count(number)} {what}" for what, number in dropped.items())
        table.add_row(
            "dropped",
            Text(
                f"rows that were removed from the ledger to save space: {gone}; they are included in the figures "
                "above and in the curves"
            ),
        )
    table.add_row("logs", Text(str(job_dir / "logs")))
    return table


def _add_figures(table: Table, report: Report) -> None:
    """What the steps came to."""
    if not _knows_steps(report):
        wall_s = (report.get("goodput") or {}).get("wall_s")
        table.add_row("steps", "none: the script did not report steps to Holdfast")
        table.add_row("wall time", units.seconds(wall_s))
        return
    steps = report.get("steps") or {}
    table.add_row(
        "steps",
        f"{units.count(steps.get('committed'))} committed, {units.count(steps.get('lost'))} lost{_of(steps)}, "
        f"{units.rate((report.get('pace') or {}).get('steps_per_s'))}; one step takes {units.seconds(steps.get('median_s'))} (median)",
    )
    goodput = report.get("goodput") or {}
    table.add_row("goodput", goodput_words(goodput))
    if together := report.get("all_starts"):
        table.add_row("", f"{goodput_words(together)}, in all {together['starts']} starts of the job")
        if together.get("between_s") is not None:
            ettr = units.share(together["ettr"])
            table.add_row(
                "",
                f"{ettr} from the first start on, with {units.seconds(together['between_s'])} between starts",
            )
    world = report.get("world") or {}
    table.add_row("workers", _world(world))
    if idle := _idle(world):
        table.add_row("idle", idle)
    final = report.get("final") or {}
    table.add_row("loss", units.loss(final.get("loss")))
    if logged := units.figures(report.get("figures") or {}):
        table.add_row("logged", Text(logged))
    table.add_row("parameters", _parameters(final))


def _of(steps: Report) -> str:
    """Where a script went on after a restart only it knows: what is known then is how much it did."""
    if steps.get("committed") is not None or steps.get("computed") is None:
        return ""
    return f" of {units.count(steps['computed'])} computed"


def _taken(snapshots: Report) -> str:
    complete = f"{units.count(snapshots['complete'])} in memory"
    if not snapshots["skipped"]:
        return complete
    skipped = units.plural(snapshots["skipped"], "shard")
    return f"{complete}; {skipped} skipped, because memory was short or earlier snapshots were still being copied"


def _kept(memory: Report, job: str) -> str:
    what = "left by an earlier run" if memory["step"] is None else f"step {units.count(memory['step'])}"
    return f"{what} is kept for the next start; `holdfast checkpoint free --job {job}` frees the memory"


def _samples(samples: Report) -> str:
    """Whether every sample came once, and when somebody looked."""
    word = {True: "", False: "NOT ONCE: ", None: ""}[samples["once"]]
    when = f" (checked {samples['checked_utc'][:19]} UTC)" if samples["checked_utc"] else ""
    return f"{word}{samples['why']}{when}"


def _world(world: Report) -> str:
    sizes: list[int] = []
    for _, size in world.get("history") or []:
        if not sizes or sizes[-1] != size:
            sizes.append(size)
    shown = [*map(str, sizes[:6]), "…", *map(str, sizes[-5:])] if len(sizes) > 12 else list(map(str, sizes))
    return f"{' → '.join(shown) or units.UNKNOWN} (target {units.text(world.get('target'))})"


def _idle(world: Report) -> str:
    """What an uneven division cost, for each size that had one."""
    uneven = world.get("idle") or []
    if not uneven:
        return ""
    shown = ", ".join(f"{units.share(share)} with {size}" for size, share in uneven[-4:])
    micro = units.count(world.get("micro_batches"))
    return f"{shown} workers: {micro} micro-batches do not divide evenly; see `holdfast plan`"


def _parameters(final: Report) -> RenderableType:
    # Three answers and not two. Nobody compared, where the script ended at level 0, is not the same as equal.
    equal = final.get("replicas_equal")
    if equal is None:
        return units.UNKNOWN
    if equal:
        return Text(
            f"xxh3 {units.text(final.get('params_xxh3'))}, bit-equal in all replicas{_covered(final)}"
        )
    return Text("NOT equal in all replicas", style="bold red")


def _covered(final: Report) -> str:
    """What was compared, and what was not."""
    covered, left_out = final.get("covered"), final.get("left_out")
    if not covered:
        return ""
    names = f", as are all tensors of {', '.join(covered)}"
    if not left_out:
        return names
    return (
        f"{names} except {units.count(len(left_out))} buffers that each worker has for itself "
        f"({left_out[0]}{', …' if len(left_out) > 1 else ''})"
    )


def _summary(incidents: Sequence[Report]) -> str:
    if not incidents:
        return "none"
    stalls = [stall for i in incidents if (stall := stood_s(i)) is not None]
    if not stalls:
        return str(len(incidents))
    return (
        f"{len(incidents)}; stall median {units.seconds(statistics.median(stalls))}, "
        f"longest {units.seconds(max(stalls))}"
    )


def stood_s(incident: Report) -> float | None:
    """For how long training stood still for an incident in all. (A report of another version has no earlier stalls.)"""
    last_s, earlier = incident["stall_s"], incident.get("earlier_stalls")
    return last_s if not earlier else (last_s or 0.0) + float(incident["earlier_stall_s"])


def _incidents(incidents: Sequence[Report]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title="Incidents", **_TITLED)
    table.add_column("", justify="right", min_width=2)
    table.add_column("fault and cause", overflow="fold", ratio=1)
    table.add_column("node", overflow="fold", max_width=12)
    table.add_column("ranks", overflow="fold", max_width=10)
    for name in ("at\nstep", "stall", "full\nstrength", "lost"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("rung", overflow="fold", max_width=16)
    for i in incidents:
        table.add_row(
            str(i["id"]),
            _what(i),
            units.text(i["node"]),
            units.ranks(i["ranks"]),
            units.count(i["at_step"]),
            units.seconds(stood_s(i)),
            units.seconds(i["full_strength_s"]),
            units.count(i["lost_steps"]),
            units.text(i["rung"]),
        )
    return table


def _durations(incidents: Sequence[Report]) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title="Where the time went", **_TITLED
    )
    table.add_column("", justify="right", min_width=2)
    for name in ("after", "detect", "decide", "replace", "join", "restore", "first step"):
        table.add_column(name, justify="right", no_wrap=True, min_width=8)
    for i in incidents:
        keys = ("t_s", "detect_s", "decide_s", "replace_s", "join_s", "restore_s", "first_step_s")
        table.add_row(str(i["id"]), *(units.seconds(i[key]) for key in keys))
    return table


def _changes(changes: Sequence[Report]) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title="Planned changes", **_TITLED
    )
    table.add_column("", justify="right", min_width=2)
    table.add_column("why", overflow="fold", ratio=1)
    for name in ("after", "at step", "workers", "stall"):
        table.add_column(name, justify="right", no_wrap=True)
    for c in changes:
        sizes = f"{c['from_world']} \u2192 {c['to_world']}"
        stall, after = units.seconds(c["stall_s"]), units.seconds(c["t_s"])
        table.add_row(str(c["id"]), Text(c["reason"]), after, units.count(c["at_step"]), sizes, stall)
    return table


def _slow(ranks: Sequence[Report]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title="Slow ranks", **_TITLED)
    table.add_column("rank", justify="right", min_width=2)
    table.add_column("node", overflow="fold", max_width=16)
    table.add_column("mostly in", overflow="fold", ratio=1)
    for name in (
        "times its\npeers",
        "since\nstep",
        "until\nstep",
        "found at\nstep",
        "others\nwait",
        "worker-hours\nan hour",
        "lost",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for x in ranks:
        table.add_row(
            units.text(x["rank"]),
            units.text(x["node"]),
            x["part"],
            f"{x['ratio']:.2f}",
            units.count(x["since_step"]),
            units.count(x["until_step"]),
            units.count(x["found_step"]),
            units.share(x["share"]),
            f"{x['worker_hours_per_hour']:.2g}",
            units.seconds(x["lost_s"]),
        )
    return table


_TITLED: dict[str, Any] = {"title_justify": "left", "title_style": "bold"}


def _what(incident: Report) -> Text:
    fault, cause = incident["fault"], incident["cause"]
    if fault and fault != cause:
        text = Text.assemble(fault, "\n", (units.clip(cause, 120), "dim"))
    else:
        text = Text(units.clip(cause, 160))
    if where := incident.get("where"):
        text.append(f"\n{units.clip(where, 160)}", style="dim")
    return text


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
