"""Where a worker is in its step, and where the step's time goes: a stopwatch that is read at every change of phase, summed up in blocks
of steps; and the phase as others see it, who look for the worker that holds them up."""

from __future__ import annotations

import math
import time
from time import perf_counter

from holdfast.errors import UsageError
from holdfast.protocol import messages as m
from holdfast.protocol.phases import BLOCK_STEPS, Phase, Spent
from holdfast.train.faults import FaultPlan
from holdfast.train.link import Link

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
    """Writes phases and signs of life onto the progress page, and lets injected faults strike where they are due.

    Attributes:
        timer: where the time of a step goes.
        script_s: for how long the script had this worker between two steps, in this generation; without what it announced.
    """

    def __init__(self, link: Link, faults: FaultPlan) -> None:
        self.timer = StepTimer()
        self.script_s = 0.0
        self._leaves_s: float | None = None
        self._resumes = False
        self._link, self._page, self._faults = link, link.page, faults
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
        self._page.enter(Phase.DATA)
        self.timer.begin()

    def enter(self, phase: Phase, step: int) -> None:
        """The step is in this phase now; an injected fault may be waiting for it."""
        if self._faults.slow > 1.0:
            self._faults.drag(self.timer.phase, self.timer.lasted_s())
        if phase is not Phase.DATA:
            self._page.enter(phase)
        self.timer.enter(phase)
        self._faults.reach(phase, step)

    def alive(self) -> None:
        """A collective was started or has ended: a sign of life for whoever looks for the odd one out."""
        self._page.collectives += 1
        self._page.beat()

    def on_collective(self, begins: bool) -> None:
        """A collective of this worker's own replica begins, or has ended. Whoever looks for the one that holds the others
        up sees that this one waits."""
        self.timer.on_collective(begins)
        if begins:
            self._before_call = self._page.phase
        self._page.enter(Phase.REDUCE if begins else self._before_call)
        self.alive()

    def wait_for(self, rank: int) -> None:
        """This worker waits for the member with this rank; -1: for nobody."""
        self._page.wait_for(rank)
        self.timer.wait_for(rank)

    def off_step(self, on: bool) -> None:
        """The script begins or ends work of its own between two steps, or after the last: then nobody waits for it."""
        if self._page.phase == Phase.DONE:
            return
        if on and self._page.phase not in (Phase.COMMIT, Phase.JOIN):
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
        self._page.enter(Phase.ASIDE if on else Phase.COMMIT)
