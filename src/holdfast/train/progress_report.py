"""What this worker tells the coordinator of the steps that it committed: losses, times, and what the script logged."""

from __future__ import annotations

import statistics
import time
from collections import deque

from holdfast.errors import UsageError
from holdfast.protocol import messages as m
from holdfast.protocol.phases import Spent
from holdfast.train.link import Link
from holdfast.train.outcome import CommittedStep
from holdfast.train.place import Place

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
