"""Prints what was measured: one table of at most 100 columns, the notes, the floor and the targets."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench.recovery.analyse import Recovery, Spread, spread
from bench.recovery.floor import Floor
from bench.recovery.harness import Measured, Plan

WIDTH = 100


@dataclass(frozen=True, kw_only=True)
class Column:
    """One figure of a system: where it comes from, how it is printed, and what we want of it."""

    name: str
    title: str
    """The name as the table's header has it, on two lines and with the unit."""
    values: Callable[[Measured], Sequence[float]]
    digits: int
    target: float | None
    """What level 2 must stay below; lost steps must be 0."""
    noisy: bool = False
    """Compare the middle halves instead of the medians: two systems are level when these overlap."""

    def spread(self, system: Measured) -> Spread | None:
        return spread(self.values(system))

    def number(self, value: float) -> str:
        return f"{value:.{self.digits}f}"

    def cell(self, system: Measured) -> str:
        """The median, and below it the range."""
        found = self.spread(system)
        if found is None:
            return "-"
        return f"{self.number(found.median)}\n[dim]{self.number(found.low)}–{self.number(found.high)}[/dim]"


def _of_recoveries(value: Callable[[Recovery], float | None]) -> Callable[[Measured], Sequence[float]]:
    return lambda system: [v for recovery in system.recoveries if (v := value(recovery)) is not None]


STALL = Column(
    name="stall", title="stall\ns", values=_of_recoveries(lambda r: r.stall_s), digits=2, target=0.5
)
NEW_WORK = Column(
    name="new work", title="new work\ns", values=_of_recoveries(lambda r: r.new_work_s), digits=2, target=None
)
STALL_SHARDED = replace(STALL, target=0.7)
FULL = Column(
    name="full strength",
    title="full\nstrength s",
    values=_of_recoveries(lambda r: r.full_s),
    digits=2,
    target=1.5,
)
FULL_SHARDED = replace(FULL, target=3.0)
LOST = Column(
    name="lost steps", title="lost\nsteps", values=_of_recoveries(lambda r: r.lost_steps), digits=0, target=0
)
STEP = Column(
    name="step / plain DDP",
    title="step /\nplain DDP",
    values=Measured.ratios,
    digits=2,
    target=None,
    noisy=True,
)
MOVED = Column(
    name="moved / lost bytes",
    title="bytes\nmoved/lost",
    values=_of_recoveries(lambda r: r.moved_ratio),
    digits=2,
    target=1.1,
)
LONGEST = Column(
    name="longest gap",
    title="longest\ngap s",
    values=_of_recoveries(lambda r: r.longest_s),
    digits=2,
    target=None,
)
FULL_STEP = Column(
    name="step", title="step\ns", values=lambda system: system.full_step_s, digits=2, target=None
)


@dataclass(frozen=True)
class Sheet:
    """What one kind of table shows."""

    ours: str
    """Name of the system that is held against targets and peers."""
    columns: tuple[Column, ...]
    compared: tuple[Column, ...]
    """The columns in which it is to be ahead of every peer."""
    about_others: str
    """The columns that only this table has, for the lines below it."""


REPLICAS = Sheet(
    ours="holdfast-2",
    columns=(STALL, FULL, LOST, NEW_WORK, STEP),
    compared=(STALL, FULL, LOST, STEP),
    about_others="new work: kill to the first commit of a step never committed before. step: no faults, in blocks next to plain DDP, checkpoints included.",
)
SHARDED = Sheet(
    ours="holdfast-sharded",
    columns=(STALL_SHARDED, FULL_SHARDED, MOVED, LOST, LONGEST, FULL_STEP),
    compared=(STALL_SHARDED, FULL_SHARDED, MOVED, LOST, LONGEST),
    about_others="longest gap: between two commits by anyone until full strength. bytes: of the state, fetched by all workers until full strength, over those that the killed one held. "
    "step: at full strength, the median of a job.",
)

TRAINER = Sheet(
    ours="holdfast-trainer",
    columns=(replace(STALL, target=None), replace(FULL, target=None), LOST, FULL_STEP),
    compared=(replace(STALL, target=None), replace(FULL, target=None)),
    about_others="step: at full strength, the median of a job.",
)


def sheet(plan: Plan) -> Sheet:
    """The table for `plan`."""
    if plan.trainer:
        return TRAINER
    return SHARDED if plan.shards > 1 else REPLICAS


def print_results(console: Console, plan: Plan, results: Sequence[Measured], floor: Floor | None) -> None:
    """Everything that belongs below the machine's line."""
    console.print(results_table(plan, results))
    print_notes(console, results)
    console.print(
        "stall: kill to the next commit by anyone. full strength: kill to the first step of all replicas. "
        f"lost steps: committed, then computed again. {sheet(plan).about_others}",
        style="dim",
    )
    ours = next((system for system in results if system.name == sheet(plan).ours), None)
    if floor is not None:
        _print_floor(console, floor, ours)
    if ours is not None:
        peers = [system for system in results if not system.name.startswith("holdfast")]
        for line in verdicts(ours, peers, sheet(plan).compared):
            console.print(line, highlight=False)


def print_notes(console: Console, results: Sequence[Measured]) -> None:
    """How each system was set up, and what went wrong with it."""
    for system in results:
        console.print(f"[bold]{system.title}[/bold]: {system.note}", highlight=False)
        for trouble in [*system.failed_faults, *([system.error] if system.error else [])]:
            console.print(f"  [red]{escape(trouble)}[/red]", highlight=False)


def results_table(plan: Plan, results: Sequence[Measured]) -> Table:
    """A row per system; one that could not be run has no figures, and its error in the notes below."""
    state = f", {plan.state_mb:.0f} MB more state" if plan.state_mb else ""
    shards = f" x {plan.shards} shards, {plan.size} parameters" if plan.shards > 1 else ""
    title = f"{plan.replicas} replicas{shards}{state}: SIGKILL of one, median and (min–max) of {plan.faults} faults each"
    return figures(title, sheet(plan).columns, results)


def figures(title: str, columns: Sequence[Column], results: Sequence[Measured]) -> Table:
    """A row per system, and below it how often it was measured."""
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, width=WIDTH, show_lines=False)
    table.add_column("system", ratio=1)
    for column in columns:
        table.add_column(column.title, justify="right", no_wrap=True)
    for system in results:
        table.add_row(_name_cell(system), *(column.cell(system) for column in columns))
    return table


def _name_cell(system: Measured) -> str:
    if system.error and not system.recoveries:
        return f"[bold]{system.title}[/bold]\n[red]could not be measured[/red]"
    count = f"{len(system.recoveries)} faults"
    if system.failed_faults:
        count += f", {len(system.failed_faults)} not recovered"
    if system.foreign_cpu > 0.1:
        count += f", {system.foreign_cpu:.0%} CPU by others"
    return f"[bold]{system.title}[/bold]\n[dim]{count}[/dim]"


def _print_floor(console: Console, floor: Floor, ours: Measured | None) -> None:
    console.print(
        f"Floor: noticed {floor.noticed_s.median * 1e3:.0f} ms, going again in a new group "
        f"{floor.going_s.median * 1e3:.0f} ms ({floor.going_s.low * 1e3:.0f}–{floor.going_s.high * 1e3:.0f}), "
        f"state {floor.state_bytes / 1e6:.0f} MB over loopback {floor.transfer_s * 1e3:.0f} ms, "
        f"one step {floor.step_s * 1e3:.0f} ms: stall {floor.stall_s:.2f} s, full strength {floor.full_s:.2f} s.",
        highlight=False,
    )
    for column, least in ((STALL, floor.stall_s), (FULL, floor.full_s)):
        found = column.spread(ours) if ours else None
        if found is not None:
            over = found.median - least
            console.print(
                f"  Holdfast level 2, {column.name}: {found.median:.2f} s, {over:+.2f} s from the floor "
                f"({found.median / least:.1f} times it)",
                highlight=False,
            )


def verdicts(
    ours: Measured, peers: Sequence[Measured], compared: Sequence[Column] = REPLICAS.compared
) -> list[str]:
    """A line per column: the target and the best peer, and whether `ours` is ahead of both."""
    lines = []
    for column in compared:
        mine = column.spread(ours)
        rivals = [(found.median, peer) for peer in peers if (found := column.spread(peer)) is not None]
        if mine is None:
            lines.append(f"{column.name}: {ours.title} has no figure")
            continue
        words = [f"{column.name}: {column.number(mine.median)}"]
        if column.target is not None:
            met = mine.median < column.target or mine.high == column.target
            words.append(
                f"target {'<' if column.target else ''}{column.target:g}: {'met' if met else 'MISSED'}"
            )
        if rivals:
            best, peer = min(rivals, key=lambda rival: rival[0])
            standing = _standing(column, ours, peer)
            words.append(f"best peer {column.number(best)} ({peer.title}): {standing}")
        lines.append("; ".join(words))
    return lines


def _standing(column: Column, ours: Measured, peer: Measured) -> str:
    mine, theirs = _middle(column, ours), _middle(column, peer)
    if mine[1] < theirs[0]:
        return "ahead"
    if theirs[1] < mine[0]:
        return "BEHIND"
    return "level (within the noise)" if column.noisy else "level"


def _middle(column: Column, system: Measured) -> tuple[float, float]:
    """The range that is compared: of a noisy column the quartiles, else the median."""
    values = column.values(system)
    if column.noisy and len(values) > 1:
        low, _, high = statistics.quantiles(values, n=4)
        return low, high
    median = statistics.median(values)
    return median, median
