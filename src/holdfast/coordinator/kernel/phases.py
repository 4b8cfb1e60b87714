"""What a job, a node and a worker are doing. Only `transitions` assigns these."""

from __future__ import annotations

from enum import StrEnum


class JobPhase(StrEnum):
    """What the job as a whole is doing."""

    GATHERING = "gathering"  # no generation: waiting for workers to form one
    RUNNING = "running"
    BREAKING = "breaking"  # a generation ended; its members are reporting
    STOPPING = "stopping"  # workers save and leave
    ENDED = "ended"


class NodePhase(StrEnum):
    """What a node is good for."""

    IN_SERVICE = "in-service"  # workers run on it, or may
    HELD = "held"  # gets no workers: it is checked or repaired, or will be
    LEAVING = "leaving"  # leaves the job when its place is filled, or its time is over
    LOST = "lost"  # gone for good; if its agent comes back, then as a new node


class WorkerPhase(StrEnum):
    """What one worker is doing, as far as the coordinator was told."""

    STARTING = "starting"
    ATTACHED = "attached"  # the script called holdfast.start
    READY = "ready"  # model built, waiting: a spare
    MEMBER = "member"  # in the running generation
    PARKED = "parked"  # out of a broken generation, holding its state
    DONE = "done"
    GONE = "gone"


ALIVE = frozenset(set(WorkerPhase) - {WorkerPhase.GONE})
