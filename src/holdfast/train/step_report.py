"""What a worker tells of its steps.

Its phase, for those who look for the worker that holds them up; where the time of a step goes: a stopwatch that is read at every
change of phase, summed up in blocks of steps; and to the coordinator losses, times, and what the script logged.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from dataclasses import dataclass
from time import perf_counter

from holdfast.errors import UsageError
from holdfast.protocol import messages as m
from holdfast.protocol.messages import ReportedStep
from holdfast.protocol.phases import BLOCK_STEPS, Phase, Spent
from holdfast.train.faults import FaultPlan
from holdfast.train.link import Link
from holdfast.train.place import Place

_DATA, _FORWARD, _BACKWARD, _WAIT, _UPDATE, _ASIDE = range(6)
_PARTS = {
    Phase.DATA: _DATA,
    Phase.FORWARD: _FORWARD,
    Phase.BACKWARD: _BACKWARD,
    Phase.REDUCE: _WAIT,
    Phase.VOTE: _WAIT,
    Phase.UPDATE: _UPDATE,
}
_PART = [_PARTS.get(Phase(phase), _ASIDE) for phase in range(max(Phase) + 1)]


class StepTimer:
    """One worker's stopwatch; `phase` is what it is in. What it costs: `python -m bench.stragglers --cost`."""

    def __init__(self) -> None:
        self.phase = Phase.COMMIT
        self._since_s = perf_counter()
        self._called_s = 0.0
        self._parts = [0.0] * 6
        self._steps: list[list[float]] = []
        self._micros = 0
        self._next = -1
        self._loss: float | None = None
        self._off = -1.0
        self._late: list[int] = []
        self._wait = (-1, 0.0)
        self._longest = (0.0, -1)

    def enter(self, phase: Phase) -> None:
        """What comes now is this phase's."""
        now = perf_counter()
        self._parts[_PART[self.phase]] += now - self._since_s
        self.phase, self._since_s = phase, now

    def wait_for(self, rank: int) -> None:
        """The word of this rank is waited for from now on; -1: of nobody. Only at the vote: then all are done computing."""
        # At the weights or the norm others may still be computing, each to another extent. Only at the vote
        # is everybody done, so whoever is waited for there came last.
        if self.phase is not Phase.VOTE:
            return
        now = perf_counter()
        before, since_s = self._wait
        if before >= 0 and now - since_s > self._longest[0]:
            self._longest = (now - since_s, before)
        self._wait = (rank, now)

    def late(self, rank: int) -> None:
        """The vote of this rank came last of all members'."""
        # More than this worker can see by itself, whomever it has waited for.
        self._longest = (math.inf, rank)

    def on_collective(self, begins: bool) -> None:
        """A collective of this worker's own replica begins, or has ended: what it takes is waiting, in whatever phase it
        comes."""
        now = perf_counter()
        if begins:
            self._called_s = now
        else:
            took_s = now - self._called_s
            self._parts[_WAIT] += took_s
            # Moved on, so the phase that the collective interrupted is not charged with the wait.
            self._since_s += took_s

    def lasted_s(self) -> float:
        """Since the last change of phase."""
        return perf_counter() - self._since_s

    def begin(self) -> None:
        """A step begins. What a dropped one took is forgotten; what was between it and the last counts for this one."""
        self.enter(Phase.DATA)
        aside_s = self._parts[_ASIDE]
        self._parts = [0.0] * 6
        self._parts[_ASIDE] = aside_s

    def commit(self, step: int, micros: int, own_loss: float | None, loss: float) -> Spent | None:
        """The step counts. Returns the block that it completes, if it was there from its first step on.

        Args:
            micros: micro-batches that this worker computed. own_loss: their mean loss; loss: that of the global batch.
        """
        self.enter(Phase.COMMIT)
        parts, self._parts = self._parts, [0.0] * 6
        if step % BLOCK_STEPS == 0:
            # Blocks begin at the same steps on all workers, whenever each of them joined. So the coordinator
            # compares times of the same steps, and a newcomer is compared from its first complete block on.
            self._steps, self._micros, self._next, self._off = [], micros, step, -1.0
            self._loss, self._late = None, []
        late, self._longest = self._longest[1], (0.0, -1)
        # A block is comparable between workers only if all its steps were computed by the same share and in
        # one piece. A step that was repeated, or another share, spoils the block.
        if step != self._next or micros != self._micros:
            self._next = -1
            return None
        self._steps.append(parts)
        self._late.append(late)
        self._next = step + 1
        self._note_loss(own_loss, loss)
        if len(self._steps) < BLOCK_STEPS or not micros:
            return None
        parts_of = zip(*self._steps, strict=True)
        data, forward, backward, wait, update, aside = (mean_without_longest(s) for s in parts_of)
        first = step + 1 - BLOCK_STEPS
        return Spent(
            first=first,
            micros=micros,
            data_s=data,
            forward_s=forward,
            backward_s=backward,
            wait_s=wait,
            update_s=update,
            aside_s=aside,
            loss=self._loss,
            late=self._most_late(),
        )

    def _most_late(self) -> int:
        rank = max(self._late, key=self._late.count)
        # Nobody, unless one rank was last in most steps: someone always is, and a name for every block would
        # accuse each rank in turn.
        return rank if self._late.count(rank) > BLOCK_STEPS / 2 else -1

    def _note_loss(self, own: float | None, loss: float) -> None:
        if own is None:
            return
        off = abs(own - loss)
        # A loss that is not finite is the furthest from the others that there is, and must not be replaced by
        # one that is merely high.
        if not math.isfinite(off):
            self._loss, self._off = math.nan, math.inf
        elif off > self._off:
            self._loss, self._off = own, off

    def forget(self) -> None:
        """The block under way is of no use: another generation begins."""
        self._next = -1
        self.phase, self._since_s, self._parts = Phase.COMMIT, perf_counter(), [0.0] * 6


def mean_without_longest(values: tuple[float, ...]) -> float:
    """One spike does not count. A mean of the same steps on all workers keeps what slows all of them in proportion, which
    medians do not."""
    return (sum(values) - max(values)) / (BLOCK_STEPS - 1)


class PhaseReport:
    """Writes phases and signs of life onto the progress record, and lets injected faults fire where they are due.

    Attributes:
        timer: where the time of a step goes.
        script_s: for how long the script had this worker between two steps, in this generation; without what it announced.
    """

    def __init__(self, link: Link, faults: FaultPlan) -> None:
        self.timer = StepTimer()
        self.script_s = 0.0
        self._leaves_s: float | None = None
        self._resumes = False
        self._link, self._record, self._faults = link, link.record, faults
        self._before_call = Phase.COMMIT

    def forget(self) -> None:
        """Another generation begins: what was measured is of no use in it."""
        self.timer.forget()
        self.script_s = 0.0

    def leave(self) -> None:
        """The script has this worker now, between two steps."""
        self._leaves_s = time.perf_counter()

    def take(self) -> None:
        """The script has given it back."""
        if self._leaves_s is not None:
            self.script_s += time.perf_counter() - self._leaves_s
            self._leaves_s = None

    def begin_step(self) -> None:
        """A step begins: it waits for its data."""
        self._record.enter(Phase.DATA)
        self.timer.begin()

    def enter(self, phase: Phase, step: int) -> None:
        """The step is in this phase now; an injected fault may be waiting for it."""
        if self._faults.slow > 1.0:
            self._faults.drag(self.timer.phase, self.timer.lasted_s())
        if phase is not Phase.DATA:
            self._record.enter(phase)
        self.timer.enter(phase)
        self._faults.reach(phase, step)

    def alive(self) -> None:
        """A collective was started or has ended: a sign of life for whoever looks for the odd one out."""
        self._record.collectives += 1
        self._record.beat()

    def on_collective(self, begins: bool) -> None:
        """A collective of this worker's own replica begins, or has ended. Whoever looks for the one that holds the others
        up sees that this one waits."""
        self.timer.on_collective(begins)
        if begins:
            self._before_call = self._record.phase
        self._record.enter(Phase.REDUCE if begins else self._before_call)
        self.alive()

    def wait_for(self, rank: int) -> None:
        """This worker waits for the member with this rank; -1: for nobody."""
        self._record.wait_for(rank)
        self.timer.wait_for(rank)

    def late(self, rank: int) -> None:
        """The vote of this rank came last of all members'."""
        self.timer.late(rank)

    def off_step(self, on: bool) -> None:
        """The script begins or ends work of its own between two steps, or after the last: then nobody waits for it."""
        if self._record.phase == Phase.DONE:
            return
        if on and self._record.phase not in (Phase.COMMIT, Phase.JOIN):
            raise UsageError(
                "run.relaxed_watchdog() is for work between two steps; use it outside of `with step`"
            )
        # The coordinator takes the time of what is announced by itself, as it comes.
        if on:
            self._resumes = self._leaves_s is not None
            self.take()
        elif self._resumes:
            self.leave()
        self._link.send(m.OffStep(on))
        self._record.enter(Phase.ASIDE if on else Phase.COMMIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedStep:
    """A step that counts here."""

    index: int
    """Number of the step, from 0."""
    loss: float
    """Mean over the global batch."""
    own_loss: float | None
    """Mean over this worker's micro-batches; None if they weigh nothing."""
    micro_batches: int
    """How many this worker computed."""
    # A wait for a decision after a fault is left out. It would raise the median, and with it the time after which
    # the coordinator takes a worker for hung.
    took_s: float
    """Seconds from the beginning of the step to its commit, without the wait for a decision after a fault."""
    made_in: int
    """The generation whose members computed it, also where it was committed in a later one."""
    weight: float | None = None
    """Of the global batch."""
    grad_norm: float | None = None
    """Of the global gradient before clipping; None where that is not finite."""
    lr: float | None = None
    """The learning rate of the optimizer's first group in the update; None where it has none."""
    skipped: bool = False
    """It counts without an update."""

    @property
    def told(self) -> ReportedStep:
        """What the coordinator is told of it."""
        return ReportedStep(
            step=self.index,
            loss=self.loss,
            took_s=self.took_s,
            made_in=self.made_in,
            weight=self.weight,
            grad_norm=self.grad_norm,
            lr=self.lr,
            skipped=self.skipped,
        )


PROGRESS_EVERY_S = 0.05
MEDIAN_OVER = 31
KEPT_LOSSES = 64
FIGURE_SHOWN = 20
"""Characters of a name that is too long, in the message that refuses it."""


class ProgressReport:
    """Words of progress to the coordinator: not one for each step, and the newest steps once more on parking.

    Attributes:
        last_loss: of the newest step that was committed here; None before the first.
    """

    def __init__(self, link: Link, place: Place) -> None:
        self.last_loss: float | None = None
        self._link, self._place = link, place
        self._durations: deque[float] = deque(maxlen=MEDIAN_OVER)
        self._losses: deque[m.ReportedStep] = deque(maxlen=KEPT_LOSSES)
        self._unsent: list[m.ReportedStep] = []
        self._spent: list[Spent] = []
        self._script_s = 0.0
        self._sent_at = 0.0
        self._first_in_generation = True
        self._figures: dict[int, dict[str, float]] = {}
        self._figure_names: set[str] = set()

    def joined(self) -> None:
        """A generation begins."""
        self._script_s = 0.0
        self._first_in_generation = True

    @property
    def losses(self) -> tuple[m.ReportedStep, ...]:
        """Of the newest steps."""
        return tuple(self._losses)

    def note(
        self, step: CommittedStep, spent: Spent | None, settled: bool = False, script_s: float = 0.0
    ) -> None:
        """A step was committed. spent: a block of steps that it completed. settled: the commit was decided after a fault.
        script_s: see `m.Progress`."""
        self._script_s = script_s
        self.last_loss = step.loss
        self._durations.append(step.took_s)
        entry = step.told
        self._losses.append(entry)
        self._unsent.append(entry)
        if spent is not None:
            self._spent.append(spent)
        # Steps of a millisecond would flood the coordinator. The first of a generation is always reported: it
        # ends the incident, and a recovery's duration is measured by it.
        now = time.monotonic()
        if settled or self._first_in_generation or now - self._sent_at >= PROGRESS_EVERY_S:
            self._first_in_generation = False
            self._sent_at = now
            self.flush(step.index + 1, settled)

    def flush(self, committed: int, settled: bool = False) -> None:
        """Sends what was not sent yet. settled: rank 0 may be a newcomer now, which never computed this step: then the
        others tell its loss, or nobody does."""
        if not self._unsent and not self._figures:
            return
        first = self._place.rank == 0 or settled
        losses = tuple(self._unsent) if first else ()
        figures = tuple(self._figures.items()) if first else ()
        self._unsent.clear()
        self._figures = {}
        median = statistics.median(self._durations) if self._durations else None
        spent, self._spent = tuple(self._spent), []
        self._link.send(
            m.Progress(
                generation=self._place.generation,
                committed=committed,
                median_s=median,
                losses=losses,
                figures=figures,
                spent=spent,
                script_s=round(self._script_s, 6),
            )
        )

    def log(self, step: int, values: dict[str, float], committed: int) -> None:
        """Figures of a committed step, sent with the next word of progress.

        Raises:
            UsageError: too many names, or one that is too long.
        """
        self._figure_names |= values.keys()
        long = next((name for name in values if len(name) > m.FIGURE_NAME), None)
        if long is not None or len(self._figure_names) > m.MOST_FIGURES:
            what = f"{long[:FIGURE_SHOWN]}…" if long else f"{len(self._figure_names)} names"
            raise UsageError(
                f"run.log({what}): at most {m.MOST_FIGURES} names of {m.FIGURE_NAME} characters can be logged in a "
                'run; do not put numbers that change into the names: run.log(norm=x), not run.log(**{f"norm_{step}": '
                "x})"
            )
        self._figures.setdefault(step, {}).update(values)
        if self._durations[-1] >= PROGRESS_EVERY_S:
            # The next commit's word is a whole step away, and this worker may not live to say it.
            self.flush(committed)
