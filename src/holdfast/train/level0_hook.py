"""Level 0: progress of a script that does not know of Holdfast, counted by its optimizer steps."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from holdfast.protocol.messages import BeganAnew, Progress
from holdfast.protocol.phases import Phase, Spent
from holdfast.train.faults import FaultPlan
from holdfast.train.link import Link
from holdfast.train.own_time import OwnTime, ThreadClock, trains_on_cpu
from holdfast.train.script import hold_process_groups

PROGRESS_EVERY_S = 0.05


class StepCounter:
    """A hook of every optimizer, after its steps. Counts the steps of the first optimizer that it sees."""

    def __init__(self, link: Link, faults: FaultPlan, first: Callable[[], None] = lambda: None) -> None:
        """first: called after the first step of this process, at any level."""
        self._link = link
        self._faults = faults
        self._first: Callable[[], None] | None = first
        self._optimizer: int | None = None
        self._has_begun: Callable[[], None] = lambda: None
        self._empty: int | None = None  # the first optimizer, if it had no state before its first step
        self._steps = 0
        self._last = time.perf_counter()
        self._sent = -math.inf
        self.every_s = PROGRESS_EVERY_S
        self._durations: deque[float] = deque(maxlen=31)
        self._own_time: OwnTime | None = None
        self._generation = int(link.start.env.get("HOLDFAST_GENERATION", "0"))
        self._spent: list[Spent] = []

    def listen(self) -> Callable[[], None]:
        """To all optimizers of torch's, from now on; returns what ends it."""
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        before = register_optimizer_step_pre_hook(self._before_the_first)
        after = register_optimizer_step_post_hook(self)
        # Torch goes through the hooks before a step while it calls them, so that one of them must not remove itself.
        self._has_begun = before.remove

        def end() -> None:
            before.remove()
            after.remove()

        return end

    def _before_the_first(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._empty = None if optimizer.state else id(optimizer)

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """After one optimizer step."""
        if self._first is not None:
            first, self._first = self._first, None
            self._has_begun()
            first()
        hold_process_groups()
        if self._link.page.generation:
            # An unmodified script has no commit. At level 2 this hook would count an optimizer's step before
            # its commit is noted, and the agent would see one too many.
            return  # at level 2 the commit counts
        if self._optimizer is None:
            self._optimizer = id(optimizer)
            self._own_time = OwnTime(ThreadClock()) if trains_on_cpu(optimizer) else None
            # One that never has state, as plain SGD, says nothing about what was loaded.
            if self._empty == id(optimizer) and optimizer.state and self._link.start.env.get("RANK") == "0":
                self._link.send(BeganAnew(self._generation))
        # A GAN has two optimizers and one step. Counting the first one that steps is the only rule that needs
        # nothing of the script.
        if id(optimizer) != self._optimizer:
            return
        now = time.perf_counter()
        if self._steps:
            self._durations.append(now - self._last)
        self._last = now
        self._steps += 1
        page = self._link.page
        page.committed = self._steps
        page.enter(Phase.FORWARD)
        block = self._own_time.stepped(self._steps - 1) if self._own_time is not None else None
        if block is not None:
            self._spent.append(block)
        # The second is always told: until the duration of a step is known nobody can call it a standstill.
        if self._steps == 2 or now - self._sent >= self.every_s:
            self._sent = now
            median = statistics.median(self._durations) if self._durations else None
            spent, self._spent = tuple(self._spent), []
            self._link.send(
                Progress(generation=self._generation, committed=self._steps, median_s=median, spent=spent)
            )
        self._faults.poison = lambda: _poison(optimizer)
        for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE, Phase.COMMIT):
            self._faults.reach(phase, self._steps)


def _poison(optimizer: Any) -> None:
    """What an update with a gradient of NaN leaves behind, in one parameter of this rank's."""
    optimizer.param_groups[0]["params"][0].data.view(-1)[:1] = math.nan
