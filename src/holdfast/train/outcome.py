"""What a step came to, as values. A step gives them to the replica, which decides by them; neither holds the other's state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from holdfast.protocol.messages import StepTold


class Stage(Enum):
    """How far a step got on this worker."""

    OPEN = "open"
    """Its gradient is not complete everywhere, as far as is known here: it can only be dropped."""

    PREPARED = "prepared"
    """The complete gradient is here and the state is untouched: the step can be committed, or dropped."""

    TORN = "torn"
    """The update began and did not end. The state is neither that before the step nor that after it, so it counts as lost
    here: finishing it would update some tensors twice."""

    COMMITTED = "committed"
    """The state is that after the step."""


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


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """A step as it stood when this was made."""

    index: int
    """Number of the step, from 0."""
    stage: Stage
    """How far it got."""
    # A function and not the step: the replica can finish a step, and can see or change nothing else of it.
    finish: Callable[[float], CommittedStep]
    """Updates the state of a PREPARED step, and of no other. It takes the moment (`time.perf_counter`) at which the
    decision was known. It needs no other worker and is called at most once."""
