"""Where this worker is in its step, for whoever looks for the one that holds the others up."""

from __future__ import annotations

import time

from holdfast.errors import UsageError
from holdfast.protocol import messages as m
from holdfast.protocol.phases import Phase
from holdfast.train.faults import FaultPlan
from holdfast.train.link import Link
from holdfast.train.step_timing import StepTimer


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
