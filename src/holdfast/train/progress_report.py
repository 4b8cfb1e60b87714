"""What this worker tells the coordinator of the steps that it committed: losses, times, and what the script logged."""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import dataclass

from holdfast.errors import UsageError
from holdfast.protocol import messages as m
from holdfast.protocol.messages import StepTold
from holdfast.protocol.phases import Spent
from holdfast.train.link import Link
from holdfast.train.place import Place


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
    def told(self) -> StepTold:
        """What the coordinator is told of it."""
        return StepTold(
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
        self._losses: deque[m.StepTold] = deque(maxlen=KEPT_LOSSES)
        self._unsent: list[m.StepTold] = []
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
    def losses(self) -> tuple[m.StepTold, ...]:
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
