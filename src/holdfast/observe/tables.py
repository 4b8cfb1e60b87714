"""The report as tables of at most 100 columns; if the job failed, the reason and what to do come last."""

from __future__ import annotations

import io
import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec
from rich import box
from rich.console import Console, Group, RenderableType
from rich.rule import Rule
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from holdfast.observe.goodput import goodput_table, goodput_words, losses, losses_lines
from holdfast.observe.printable import printable
from holdfast.protocol import units
from holdfast.protocol.job_report import (
    FinalState,
    InMemory,
    JobReport,
    ReportSteps,
    ReportWorld,
    SamplesAnswer,
    SnapshotCounts,
)
from holdfast.protocol.job_view import Goodput, IncidentView, Pace, RootCauseView, SlowRank
from holdfast.protocol.ledger import Changed

WIDTH = 100
_OUTCOME_STYLES = {"finished": "bold green", "stopped": "bold yellow"}


class PrintableConsole(Console):
    """Rich's console with a filter: text that it is given to print cannot control the terminal, while its own control
    sequences are kept."""

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        return super()._render_buffer(s if s.control else Segment(printable(s.text), s.style) for s in buffer)


def print_report(report: JobReport, job_dir: Path, stream: IO[str], width: int = WIDTH) -> None:
    """Prints the report to a terminal, a file or a pipe. width: characters of a line."""
    probe = PrintableConsole(file=stream)
    if probe.is_terminal:
        PrintableConsole(file=stream, width=min(width, probe.width) if width == WIDTH else width).print(
            report_view(report, job_dir), crop=False
        )
        return
    # Always of this width, and without the trailing blanks that rich adds: the same report is the same text
    # in every file and pipe, whatever the terminal was.
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


def draw_report(report: JobReport, job_dir: Path, path: Path) -> None:
    """Writes the tables as they look in a terminal into an SVG picture."""
    console = PrintableConsole(
        file=io.StringIO(), width=WIDTH, record=True, force_terminal=True, color_system="truecolor"
    )
    console.print(report_view(report, job_dir), crop=False)
    drawn = console.export_svg(title=f"holdfast report --job {job_dir.name}")
    fonts = r"@font-face \{.*?\}\s*"  # from somebody's server; any monospaced font will do
    path.write_text(re.sub(fonts, "", drawn, flags=re.DOTALL), encoding="utf-8")


def report_view(report: JobReport, job_dir: Path) -> RenderableType:
    """Header, the wall time, incidents, where their time went, planned changes, slow ranks; the closing error last."""
    parts: list[RenderableType] = [_header(report, job_dir)]
    trained = _has_trained(report)
    if trained and _knows_steps(report) and report.goodput is not None and report.goodput.classes:
        goodput = msgspec.to_builtins(report.goodput)
        parts += [Text(), goodput_table(goodput)]
        if large := losses(goodput, report.world.micro_batches if report.world is not None else None):
            parts.append(losses_lines(large))
    if trained and report.incidents:
        parts += [Text(), _incidents(report.incidents), Text(), _durations(report.incidents)]
    if report.changes:
        parts += [Text(), _changes(report.changes)]
    if report.slow:
        parts += [Text(), _slow(report.slow)]
    if report.outcome == "failed":
        parts += [Text(), closing(report, saved=report.saved is not None)]
    if report.outcome == "stopped":
        # the outcome above says why
        parts += [Text(), Text(f"what now {going_on(report)}")]
    return Group(*parts)


def _has_trained(report: JobReport) -> bool:
    """False if the job failed, or was stopped, before the first step of this start: there is nothing to show but the
    reason."""
    done = report.steps is not None and report.steps.median_s is not None
    return report.outcome not in ("failed", "stopped") or done


def _knows_steps(report: JobReport) -> bool:
    """False: the script finished and reported no steps."""
    steps = report.steps
    if steps is None or report.outcome != "finished":
        return True
    return steps.committed is not None or bool(steps.computed)


def _header(report: JobReport, job_dir: Path) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    outcome = units.text(report.outcome)
    reason = f" ({report.reason})" if report.reason else ""
    table.add_row("job", units.text(report.job))
    table.add_row("outcome", Text(outcome, style=_OUTCOME_STYLES.get(outcome, "bold red")) + Text(reason))
    if _has_trained(report):
        _add_figures(table, report)
    if (saved := report.saved) is not None:
        table.add_row("saved", Text(f"step {units.count(saved.step)} in {saved.url}"))
    for at, why in enumerate(report.unread):
        table.add_row("" if at else "not loaded", Text(why))
    if (taken := report.snapshots) is not None and (taken.complete or taken.skipped):
        table.add_row("snapshots", _taken(taken))
    if report.in_memory is not None:
        table.add_row("memory", Text(_kept(report.in_memory, report.job)))
    if report.incidents or _has_trained(report):
        table.add_row("incidents", _summary(report.incidents))
    if (samples := report.samples) is not None and (samples.recorded or samples.checked_utc):
        table.add_row("samples", Text(_samples(samples)))
    if report.dropped:
        gone = ", ".join(f"{units.count(number)} {what}" for what, number in report.dropped.items())
        table.add_row(
            "dropped",
            Text(
                f"rows that were removed from the ledger to save space: {gone}; they are included in the figures "
                "above and in the curves"
            ),
        )
    table.add_row("logs", Text(str(job_dir / "logs")))
    return table


def _add_figures(table: Table, report: JobReport) -> None:
    """Adds rows with the figures of the steps."""
    goodput = report.goodput or Goodput()
    if not _knows_steps(report):
        table.add_row("steps", "none: the script did not report steps to Holdfast")
        table.add_row("wall time", units.seconds(goodput.wall_s))
        return
    steps, pace = report.steps or ReportSteps(), report.pace or Pace()
    table.add_row(
        "steps",
        f"{units.count(steps.committed)} committed, {units.count(steps.lost)} lost{_of(steps)}, "
        f"{units.rate(pace.steps_per_s)}; one step takes {units.seconds(steps.median_s)} (median)",
    )
    table.add_row("goodput", goodput_words(msgspec.to_builtins(goodput)))
    if (together := report.all_starts) is not None:
        share = goodput_words(msgspec.to_builtins(together))
        table.add_row("", f"{share}, in all {together.starts} starts of the job")
        if together.between_s is not None:
            ettr = units.share(together.ettr)
            table.add_row(
                "", f"{ettr} from the first start on, with {units.seconds(together.between_s)} between starts"
            )
    world = report.world or ReportWorld()
    table.add_row("workers", _world(world))
    if idle := _idle(world):
        table.add_row("idle", idle)
    final = report.final or FinalState()
    table.add_row("loss", units.loss(final.loss))
    if logged := units.figures(msgspec.to_builtins(report.figures)):
        table.add_row("logged", Text(logged))
    table.add_row("parameters", _parameters(final))


def _of(steps: ReportSteps) -> str:
    """The steps of a script that alone knows from which step it continued after a restart: the only known figure is how
    many it computed."""
    if steps.committed is not None or steps.computed is None:
        return ""
    return f" of {units.count(steps.computed)} computed"


def _taken(snapshots: SnapshotCounts) -> str:
    complete = f"{units.count(snapshots.complete)} in memory"
    if not snapshots.skipped:
        return complete
    skipped = units.plural(snapshots.skipped, "shard")
    return f"{complete}; {skipped} skipped, because memory was short or earlier snapshots were still being copied"


def _kept(memory: InMemory, job: str) -> str:
    what = "left by an earlier run" if memory.step is None else f"step {units.count(memory.step)}"
    return f"{what} is kept for the next start; `holdfast checkpoint free --job {job}` frees the memory"


def _samples(samples: SamplesAnswer) -> str:
    """Whether every sample was used once, and when that was last checked."""
    warning = {True: "", False: "NOT ONCE: ", None: ""}[samples.once]
    when = f" (checked {samples.checked_utc[:19]} UTC)" if samples.checked_utc else ""
    return f"{warning}{samples.why}{when}"


def _world(world: ReportWorld) -> str:
    sizes: list[int] = []
    for _, size in world.history:
        if not sizes or sizes[-1] != size:
            sizes.append(size)
    shown = [*map(str, sizes[:6]), "…", *map(str, sizes[-5:])] if len(sizes) > 12 else list(map(str, sizes))
    return f"{' → '.join(shown) or units.UNKNOWN} (target {units.text(world.target)})"


def _idle(world: ReportWorld) -> str:
    """The cost of an uneven division, for each world size that had one."""
    if not world.idle:
        return ""
    shown = ", ".join(f"{units.share(share)} with {size}" for size, share in world.idle[-4:])
    micro = units.count(world.micro_batches)
    return f"{shown} workers: {micro} micro-batches do not divide evenly; see `holdfast plan`"


def _parameters(final: FinalState) -> RenderableType:
    # Three answers and not two. If nothing was compared, because the script ended at level 0, that is not the
    # same as equal.
    equal = final.replicas_equal
    if equal is None:
        return units.UNKNOWN
    if equal:
        return Text(f"xxh3 {units.text(final.params_xxh3)}, bit-equal in all replicas{_covered(final)}")
    return Text("NOT equal in all replicas", style="bold red")


def _covered(final: FinalState) -> str:
    """Which parts of the state were compared, and which were not."""
    covered, left_out = final.covered, final.left_out
    if not covered:
        return ""
    names = f", as are all tensors of {', '.join(covered)}"
    if not left_out:
        return names
    return (
        f"{names} except {units.count(len(left_out))} buffers that each worker has for itself "
        f"({left_out[0]}{', …' if len(left_out) > 1 else ''})"
    )


def _summary(incidents: Sequence[IncidentView]) -> str:
    if not incidents:
        return "none"
    stalls = [stall for i in incidents if (stall := stood_s(i)) is not None]
    if not stalls:
        return str(len(incidents))
    return (
        f"{len(incidents)}; stall median {units.seconds(statistics.median(stalls))}, "
        f"longest {units.seconds(max(stalls))}"
    )


def stood_s(incident: IncidentView) -> float | None:
    """How long training stood still for an incident in total."""
    last_s = incident.stall_s
    return last_s if not incident.earlier_stalls else (last_s or 0.0) + incident.earlier_stall_s


def _incidents(incidents: Sequence[IncidentView]) -> Table:
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
            str(i.id),
            _what(i),
            units.text(i.node),
            units.ranks(i.ranks),
            units.count(i.at_step),
            units.seconds(stood_s(i)),
            units.seconds(i.full_strength_s),
            units.count(i.lost_steps),
            units.text(i.rung),
        )
    return table


def _durations(incidents: Sequence[IncidentView]) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title="Where the time went", **_TITLED
    )
    table.add_column("", justify="right", min_width=2)
    for name in ("after", "detect", "decide", "replace", "join", "restore", "first step"):
        table.add_column(name, justify="right", no_wrap=True, min_width=8)
    for i in incidents:
        keys = ("t_s", "detect_s", "decide_s", "replace_s", "join_s", "restore_s", "first_step_s")
        table.add_row(str(i.id), *(units.seconds(getattr(i, key)) for key in keys))
    return table


def _changes(changes: Sequence[Changed]) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title="Planned changes", **_TITLED
    )
    table.add_column("", justify="right", min_width=2)
    table.add_column("why", overflow="fold", ratio=1)
    for name in ("after", "at step", "workers", "stall"):
        table.add_column(name, justify="right", no_wrap=True)
    for c in changes:
        sizes = f"{c.from_world} \u2192 {c.to_world}"
        stall, after = units.seconds(c.stall_s), units.seconds(c.t_s)
        table.add_row(str(c.id), Text(c.reason), after, units.count(c.at_step), sizes, stall)
    return table


def _slow(ranks: Sequence[SlowRank]) -> Table:
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
            units.text(x.rank),
            units.text(x.node),
            x.part,
            f"{x.ratio:.2f}",
            units.count(x.since_step),
            units.count(x.until_step),
            units.count(x.found_step),
            units.share(x.share),
            f"{x.worker_hours_per_hour:.2g}",
            units.seconds(x.lost_s),
        )
    return table


_TITLED: dict[str, Any] = {"title_justify": "left", "title_style": "bold"}


def _what(incident: IncidentView) -> Text:
    fault, cause = incident.fault, incident.cause
    if fault and fault != cause:
        text = Text.assemble(fault, "\n", (units.clip(cause, 120), "dim"))
    else:
        text = Text(units.clip(cause, 160))
    if incident.where:
        text.append(f"\n{units.clip(incident.where, 160)}", style="dim")
    return text


LAST_LINES = 15
NO_ROOT_CAUSE = RootCauseView(cause="")
# The first pattern that is found counts, so certain causes (a missing module) stand before likely ones
# (memory). The patterns match text that the core writes: of a reason (`membership/`) or of a cause
# (`protocol/causes.py`). A change of that text needs a change here, or people get the advice for nothing in
# particular.
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


def closing(report: JobReport, saved: bool) -> RenderableType:
    """What happened, where, and what to do, for the end of the output. `saved`: the job has a checkpoint from which it
    can continue."""
    blame = report.blame or NO_ROOT_CAUSE
    reason = units.text(report.reason)
    traceback = blame.traceback.rstrip()
    parts: list[RenderableType] = [Rule(Text(f"the job {report.outcome}", style="bold red"), style="red")]
    lines = lines_of_the_script(traceback)
    if traceback and not lines:
        parts += [_as_is(traceback), Text()]
    # A traceback says more than the lines that its worker wrote before and after it.
    tail = [] if traceback else last_lines(blame.tail, traceback)
    if tail:
        parts += [Text("last lines", style="dim"), _as_is("\n".join(tail)), Text()]
    facts = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    cause = units.text(blame.cause or reason)
    facts.add_row("what happened", Text(re.sub(r"\n\s+", "\n", cause)))
    facts.add_row("where", Text(place(blame, report)))
    for line in lines:
        facts.add_row("", Text(line))
    if blame.log:
        facts.add_row("log", Text(units.text(blame.log)))
    if blame.cause:
        facts.add_row("why it ended", Text(reason))
    go_on = f" {_GO_ON.format(job=report.job)}" if saved else ""
    facts.add_row("what to do", Text(f"{advice(reason, blame)}{go_on}"))
    return Group(*parts, facts)


def going_on(report: JobReport) -> str:
    """For a job that was stopped before its last step: what was saved, and how to continue."""
    again = f"the same command with --job {report.job}"
    saved, unsaved, memory = report.saved, report.unsaved, report.in_memory
    if unsaved is not None and memory is not None:
        return (
            f"Step {units.count(unsaved)} is only in the memory of the nodes: {again} continues from it if it is run "
            "on the same machines before they are restarted."
        )
    if unsaved is not None:
        older = f"continues from step {units.count(saved.step)}" if saved else "starts from the beginning"
        return f"Step {units.count(unsaved)} could not be saved: {again} {older}."
    if saved is None and report.steps is not None and report.steps.computed == 0:
        return f"No step was done: {again} starts from the beginning."
    if saved is None:
        return (
            f"Holdfast did not save a state: {again} starts from the beginning, unless the script resumes from a "
            "checkpoint of its own."
        )
    if report.queued_again:
        return (
            f"Step {units.count(saved.step)} is saved. The job is queued again and continues from it without "
            "further action."
        )
    return f"Step {units.count(saved.step)} is saved: {again} continues from it."


def place(blame: RootCauseView, report: JobReport) -> str:
    """The rank, the node and the step, as far as they are known."""
    rank, node, step = blame.rank, blame.node, blame.step
    who = "" if rank is None else f"rank {rank}"
    if node is not None:
        who += f"{' on ' if who else ''}{node}"
    committed = report.steps.committed if report.steps is not None else None
    when = f"at step {step}" if step is not None else ""
    if step is None and committed is not None:
        when = f"after {committed} committed step{'' if committed == 1 else 's'}"
    return ", ".join(part for part in (who, when) if part) or "not known"


def lines_of_the_script(traceback: str) -> list[str]:
    """The lines of the script itself, without those of libraries and Holdfast, outermost first, as
    `/home/a/train.py:12, in main` with the source line below it. The log has the others. Empty: there are none."""
    found: list[str] = []
    theirs = False
    for line in traceback.splitlines():
        if frame := _FRAME.match(line):
            theirs = not _LIBRARY.search(line)
            if theirs:
                found.append(f"{frame['path']}:{frame['line']}{frame['name'] or ''}")
        elif not line.startswith(" " * 4):
            theirs = False  # the error itself, or between two frames
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


def advice(reason: str, blame: RootCauseView) -> str:
    """Advice for a person on what to do about the failure."""
    evidence = f"{blame.cause} {blame.traceback}"
    for pattern, text in _ADVICE:
        if re.search(pattern, reason) or re.search(pattern, evidence):
            return text
    return _DEFAULT_ADVICE
