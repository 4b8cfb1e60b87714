"""What a script is told before its node or its job goes away."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Going(StrEnum):
    """What goes away."""

    NODE = "node"
    """The node of this worker."""
    JOB = "job"
    """The job, with all of its nodes."""


class NoticeCause(StrEnum):
    """Why something goes away."""

    DRAIN = "drain"
    """A person or the engine takes the node out of the job."""
    PREEMPTION = "preemption"
    """The machines are taken back: by a spot market, by a job of higher priority, or by SIGTERM to the node's agent."""
    TIME_LIMIT = "time-limit"
    """The scheduler's time for the job is almost over."""
    RESIZE = "resize"
    """A person wants a smaller job."""
    HEALTH = "health"
    """The machine is sick, or has a bad history."""
    STOP = "stop"
    """A person or the scheduler asked the job to stop."""
    NODES = "nodes"
    """The job gives up: it had too few nodes to train on for too long, and no others came."""
    FAILURE = "failure"
    """The job gives up, for another reason."""


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """Tells a script in advance that its node or its job is about to go away."""

    number: int
    """Number of the notice in its job, from 1. If a deadline moves, that is a new notice."""
    going: Going
    """What goes away: the node of this worker, or the job."""
    cause: NoticeCause
    """Why."""
    reason: str
    """The cause in words, as its author wrote them. For people only."""
    deadline_s: float | None
    """Seconds from now until the worker has to leave, never negative; None if that is not known. It may leave earlier, as
    soon as another worker has taken its place."""
