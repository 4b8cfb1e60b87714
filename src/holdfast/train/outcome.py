"""What a step came to, as values. A step gives them to the replica, which decides by them; neither holds the other's state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum


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


@dataclass(frozen=True, slots=True)
class CommittedStep:
    """A step that counts here.

    loss: global mean. own_loss: mean of this worker's micro-batches; None if they weigh nothing. micro_batches: that this
    worker computed. took_s: without the wait for a decision, if a fault made one necessary.
    """

    index: int
    loss: float
    own_loss: float | None
    micro_batches: int
    took_s: float


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """A step as it stood when this was made.

    finish: updates the state of a PREPARED step, and of no other. It is given the moment (`time.perf_counter`) at which the
    decision was known, needs no other worker, and is called once at most.
    """

    index: int
    stage: Stage
    finish: Callable[[float], CommittedStep]
