"""A job at one moment, as a picture in characters: for the live view and for `holdfast status`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from holdfast.observe.goodput import goodput_line
from holdfast.protocol import units
from holdfast.protocol.job import JobSpec
from holdfast.protocol.job_view import JobView, SlowRank, TierView, WorkerRow

LOST_SHOWN = 3
SLOW_SHOWN = 3
INCIDENTS_SHOWN = 5
ASKS_SHOWN = 3
_JOB_WORDS = {
    "gathering": "gathering workers",
    "running": "training",
    "breaking": "recovering",
    "stopping": "stopping",
}
_WORKER_WORDS = {
    "starting": "starting",
    "attached": "building the model",
    "ready": "spare, warm",
    "member": "training",
    "restoring": "fetching the state",
    "parked": "recovering",
    "done": "done",
}
_STYLES = {
    "training": "green",
    "recovering": "yellow",
    "lost": "red",
    "failed": "bold red",
    "finished": "bold green",
    "spare, warm": "cyan",
    "spare": "cyan",
}


def board(view: JobView, rows: int = 40) -> RenderableType:
    """Header, ranks and nodes, newest incidents. Fits 100 columns; at most `rows` ranks are listed."""
    parts: list[RenderableType] = [headline(view), _people(view, rows)]
    saved = saved_line(view)
    if saved is not None:
        parts.append(saved)
    if view.goodput.classes:
        parts.append(goodput_line(msgspec.to_builtins(view.goodput)))
    if logged := units.figures(msgspec.to_builtins(view.figures)):
        parts.append(Text(f"logged  {logged}", style="dim", overflow="ellipsis", no_wrap=True))
    parts += [slow_line(slow) for slow in view.slow[-SLOW_SHOWN:]]
    for ask in view.health.asks[-ASKS_SHOWN:]:
        parts.append(Text(units.clip(f"please inspect {ask.node}: {ask.text}", 100), style="yellow"))
    if view.incidents:
        parts.append(_incidents(view))
    return Group(*parts)


def headline(view: JobView) -> Text:
    """`first  training  step 80  loss 2.6190  4.9 steps/s  3 min 05 s left  2 of 2 workers`, cut at 80 columns. If
    there are fewer workers than wanted, their number comes first."""
    state = job_word(view.phase, view.outcome)
    workers, ended = f"  {view.world} of {view.target} workers", view.phase == "ended"
    short = view.world < view.target and not ended
    text = Text(overflow="ellipsis", no_wrap=True)
    text.append(f"{view.job} ", style="bold")
    text.append(f" {state}", style=_STYLES.get(state, "yellow"))
    if short:
        text.append(workers, style="yellow")
    text.append(f"  {step_words(view)}  loss {units.loss(view.loss)}")
    text.append(f"  {units.rate(view.pace.steps_per_s)}")
    if view.phase == "running" and (left := remaining_words(view)):
        text.append(f"  {left}")
    if not short and not ended:
        text.append(workers)
    text.append(f"  {units.clock(view.t_s)}  generation {view.generation}", style="dim")
    return text


def step_words(view: JobView) -> str:
    """`step 80`; `95 steps computed` if only the script knows from which step it continued after a restart."""
    if view.step is None and view.steps.computed is not None:
        return f"{units.plural(view.steps.computed, 'step')} computed"
    return f"step {units.count(view.step)}"


def remaining_words(view: JobView) -> str:
    """`3 min 05 s left`, or `1,200 steps left` if the duration of a step is not known; empty if neither is known.
    Short, because a line of progress has 80 columns."""
    left, eta_s = view.pace.left, view.pace.eta_s
    if left is None:
        return ""
    if not left:
        return "all steps are done"
    return f"{units.plural(left, 'step') if eta_s is None else units.seconds(eta_s)} left"


def saved_line(view: JobView) -> Text | None:
    """`saved  step 120 in the memory of 2 nodes, 1.2 s ago; step 100 in /scratch/run, 0:45 ago`; None: nothing was
    saved."""
    parts = []
    if snapshot := view.saving.snapshot:
        nodes = units.plural(snapshot.nodes, "node")
        parts.append(
            f"step {units.count(snapshot.step)} in the memory of {nodes}, {units.clock(snapshot.age_s)} ago"
        )
    for tier in view.saving.tiers:
        place = units.clip_path(tier.url, 30)
        if tier.step is not None:
            parts.append(f"step {units.count(tier.step)} in {place}, {units.clock(tier.age_s or 0.0)} ago")
        if tier.under_way is not None:
            parts.append(f"step {units.count(tier.under_way)} being written to {place}{_written(tier)}")
        if tier.failing:
            parts.append(f"{place} FAILS")
        elif tier.slow:
            parts.append(f"{place} MAKES NO PROGRESS")
    if not parts:
        return None
    return Text("saved  " + "; ".join(parts), style="dim", overflow="ellipsis", no_wrap=True)


def slow_line(slow: SlowRank) -> Text:
    """`slow   rank 2 on node2 takes 1.48 times its peers' time since step 40; they wait 31.0% of the time`."""
    text = (
        f"slow   rank {units.text(slow.rank)} on {slow.node} takes {slow.ratio:.2f} times its peers' time since "
        f"step {units.count(slow.since_step)}; they wait {units.share(slow.share)} of the time"
    )
    return Text(text, style="yellow", overflow="ellipsis", no_wrap=True)


def _written(tier: TierView) -> str:
    """`: 1.20 GB of 4.00 GB`; empty when that is not known."""
    if tier.written is None:
        return ""
    nbytes, total = tier.written
    return f": {units.size(nbytes)} of {units.size(total)}"


def job_word(phase: str, outcome: str | None) -> str:
    """The state of the job in one word."""
    return str(outcome) if phase == "ended" else _JOB_WORDS.get(phase, phase)


def _people(view: JobView, rows: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("rank", justify="right")
    for name in ("node", "worker", "state"):
        table.add_column(name)
    table.add_column("step", justify="right")
    lines = list(_lines(view))
    for cells in lines[:rows]:
        table.add_row(*cells[:3], Text(cells[3], style=_STYLES.get(cells[3], "")), cells[4])
    if len(lines) > rows:
        table.add_row("", "", "", Text(f"… and {len(lines) - rows} more", style="dim"), "")
    return table


def _lines(view: JobView) -> Iterable[tuple[str, str, str, str, str]]:
    """Members by rank, then workers that wait, then nodes without workers."""
    # By rank, with workers that have none at the end: a reader looks for the rank that a message named, and
    # it stays in its place while generations change.
    workers = sorted(view.workers, key=lambda w: (w.rank is None, w.rank or 0, w.worker))
    for w in workers:
        rank = units.UNKNOWN if w.rank is None else str(w.rank)
        yield rank, w.node, w.worker, _worker_word(w), units.count(w.step)
    staffed = {w.node for w in workers}
    dash = units.UNKNOWN
    for node in view.nodes:
        if node.alive and node.node not in staffed:
            yield dash, node.node, dash, "held" if node.held else "spare", dash
    for node in [n for n in view.nodes if not n.alive][-LOST_SHOWN:]:
        yield dash, node.node, dash, "left" if node.left else "lost", dash


def _worker_word(worker: WorkerRow) -> str:
    state = _WORKER_WORDS.get(worker.state, worker.state)
    if worker.restored is not None:
        nbytes, total = worker.restored
        state += f": {units.size(nbytes)} of {units.size(total)}"
    return state


def _incidents(view: JobView) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("incident", justify="right")
    table.add_column("what", max_width=32, no_wrap=True)
    table.add_column("node")
    for name in ("detect", "decide", "restore", "stall", "full strength"):
        table.add_column(name, justify="right")
    for i in view.incidents[-INCIDENTS_SHOWN:]:
        full = units.seconds(i.full_strength_s)
        style = ""
        if i.full_strength_s is None:
            style = "yellow"
            full = f"{units.clock(max(0.0, view.t_s - (i.t_s or 0.0)))} …"
        table.add_row(
            str(i.id),
            units.clip(i.fault or i.cause, 32),
            units.text(i.node),
            *(units.seconds(took_s) for took_s in (i.detect_s, i.decide_s, i.restore_s, i.stall_s)),
            full,
            style=style,
        )
    return table


def progress_line(spec: JobSpec, view: JobView | None) -> str:
    """`step 80, loss 2.6190, 4.9 steps/s, 3 min 05 s left`: 56 columns, because `[holdfast]` and the time take 24 of a
    terminal's 80. While the job starts or recovers, what it waits for; with fewer workers than wanted, how many there
    are."""
    if view is None or view.generation == 0:
        return _starting(spec, view)
    if view.phase == "gathering":
        return f"waiting for workers: {_ready(view)} of {view.target} are ready"
    fetching = [w for w in view.workers if w.state == "restoring"]
    if fetching:
        return _restoring(fetching, view)
    if view.phase in ("running", "stopping") and not view.workers:
        return _last(view)
    prefixes = {"running": "", "breaking": "recovering: "}
    parts = [step_words(view), f"loss {units.loss(view.loss)}", units.rate(view.pace.steps_per_s)]
    if view.world < view.target:
        parts.append(f"{view.world} of {view.target} workers")
    if left := remaining_words(view):
        parts.append(left)
    return prefixes.get(view.phase, f"{view.phase}: ") + ", ".join(parts)


def _restoring(fetching: Sequence[WorkerRow], view: JobView) -> str:
    """`1 of 3 workers fetches the state of step 80: 3.20 GB of 12.0 GB`; the figures are those of the slowest worker."""
    # The slowest, because training continues only when all have the state.
    known = [w.restored for w in fetching if w.restored is not None]
    slowest = min(known, key=lambda r: r[0] / max(1, r[1]), default=None)
    far = f": {units.size(slowest[0])} of {units.size(slowest[1])}" if slowest else ""
    fetch = "fetches" if len(fetching) == 1 else "fetch"
    of = f"{len(fetching)} of {units.plural(view.world, 'worker')}"
    step = f" of step {units.count(view.step)}" if view.level == 2 else ""
    return f"{of} {fetch} the state{step}{far}"


def _last(view: JobView) -> str:
    """The line after all workers have left: the work that remains."""
    tiers = [t for t in view.saving.tiers if t.under_way is not None]
    line = "; ".join(f"saving step {units.count(t.under_way)} in {t.url}{_written(t)}" for t in tiers)
    return line or ("all steps are done" if view.phase == "running" else "all workers have ended")


def _starting(spec: JobSpec, view: JobView | None) -> str:
    wanted = spec.max_nodes + spec.spares
    here = [n for n in view.nodes if n.alive] if view else []
    if len(here) < wanted:
        modules = f": importing {', '.join(spec.preload)}" if spec.preload else ""
        return f"nodes warming up{modules} ({len(here)} of {wanted} are here)"
    assert view is not None
    return f"workers start the script ({_ready(view)} of {units.plural(spec.target, 'worker')} ready)"


def _ready(view: JobView) -> int:
    able = sum(w.state in ("ready", "parked", "member") for w in view.workers)
    # Spares become ready too, so there may be more ready workers than the job wants: `5 of 4 are ready` would
    # read as a fault.
    return min(able, view.target)
