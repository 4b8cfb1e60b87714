"""Where in its life or in a step a worker is, and what a job's wall time is spent on: values only, so that the core may know them."""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Annotated

import msgspec


# The numbers are compared: within a step a larger one is further on, which is how `find_culprits` tells who
# is behind. New phases of a step must keep that order; the ones from DONE on are never compared in that way.
class Phase(IntEnum):
    """Where in its life or in a step a worker is; the order is the order within a step."""

    STARTUP = 0
    IDLE = 1  # ready, not in a generation
    JOIN = 2  # connecting to the members of a new generation
    TRANSFER = 3  # fetching the state
    DATA = 4
    FORWARD = 5
    BACKWARD = 6
    REDUCE = 7  # waiting for gradients of the others
    VOTE = 8
    UPDATE = 9
    COMMIT = 10
    PARKED = 11  # out of a broken generation, waiting for the next
    DONE = 12
    ASIDE = 13  # the script's own work between two steps, announced by `run.relaxed_watchdog`
    SNAPSHOT = 14  # the state is being copied in parallel with a step (a phase of faults, not of the page)
    TIER = 15  # reading from a durable tier or writing to it, which may take its time


WAITING_PHASES = frozenset({Phase.REDUCE, Phase.VOTE, Phase.JOIN, Phase.PARKED, Phase.IDLE, Phase.DONE})
"""Phases in which a worker waits for others, so that standing still is no sign of guilt."""


SLOW_PHASES = frozenset({Phase.ASIDE, Phase.TIER})
"""Phases in which a worker may stand still for as long as a start may take."""


OUTSIDE_PHASES = frozenset({Phase.COMMIT})
"""Phases in which a worker is between two steps, in whatever code the script has there."""


class PageReading(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a worker's progress record at one moment. Times are CLOCK_MONOTONIC seconds of the worker's node."""

    generation: int = 0
    """The newest that the worker joined; 0: none."""
    committed: int = 0
    """Committed steps; at level 0 and 1 those of this start."""
    phase: int = Phase.STARTUP
    """A `Phase`."""
    collectives: int = 0
    """Collectives that the worker began since the step began."""
    step_began_s: float = 0.0
    """When its step began."""
    phase_began_s: float = 0.0
    beat_s: float = 0.0
    """When anything of it last moved."""
    waits_for: int = -1
    """The rank whose message the worker waits for; -1: for no rank in particular."""


MOST_GROUPS = 64
"""Process groups of which a worker says where it stands; of more, those in which it waits come first."""

_Short = Annotated[str, msgspec.Meta(max_length=128)]


# Numbers count from 1 on in each group, and all of its members enter the same collectives in the same order. So of two
# members the one with the smaller number is what the other waits for.
class GroupReading(msgspec.Struct, frozen=True, kw_only=True):
    """The position of a script that does not know of Holdfast in the collectives of one of its process groups."""

    group: _Short
    """The same for all members of the group, and for no other group of the job."""
    label: _Short
    """What people call it."""
    size: int
    """Its members."""
    entered: int
    """The number of the newest collective that this worker entered; 0: none that is remembered."""
    operation: _Short = ""
    """What that collective does, as `all_reduce`; empty: there is none."""
    waits: bool = False
    """A collective, or a message to or from one member, that it began here is not complete."""


Groups = Annotated[tuple[GroupReading, ...], msgspec.Meta(max_length=MOST_GROUPS)]


BLOCK_STEPS = 5
"""Steps that a worker sums up together. Blocks begin at multiples of it, so those of all workers are about the same
steps, and what slows all of them at once cancels."""


class Spent(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Where a worker's time went in a block of BLOCK_STEPS steps: in seconds per step, each the mean without
    the longest one.

    On an accelerator, work that the host need not wait for shows where the host waits next: a backward pass
    in the next forward pass, the last one in `wait_s`."""

    first: int
    """The first step of the block."""
    micros: int
    """Micro-batches that it computes of each step."""
    data_s: float
    forward_s: float
    backward_s: float
    wait_s: float
    """For the others, in the reduction and the vote."""
    update_s: float
    """The update and the commit."""
    aside_s: float
    """Between two steps, in work of the script's own."""
    loss: float | None = None
    """The mean loss of its own micro-batches that lies furthest from the global mean; NaN if one was not finite."""
    state: int | None = None
    """xxh3 over a part of the state after the block, the same part on all workers that hold one shard; None: not looked at."""
    late: int = -1
    """The rank for whose vote it waited longest in most of the steps; -1: not always for the same."""
    thread_s: float | None = None
    """At levels 0 and 1, where no phase is known and each is 0: what the training thread was on a processor, or waited for
    one. `wait_s` is the rest of the step."""

    @property
    def own_s(self) -> float:
        """What this worker needs by itself."""
        # Without `wait_s`: a fast worker waits long and a slow one does not, so the whole step is equally
        # long for all and says nothing about who is slow.
        if self.thread_s is not None:
            return self.thread_s
        return self.data_s + self.forward_s + self.backward_s + self.update_s

    @property
    def step_s(self) -> float:
        """A whole step, from one begin to the next."""
        return self.own_s + self.wait_s + self.aside_s


class TimeClass(StrEnum):
    """Every second since the job's start is in exactly one of these."""

    START = "start"
    """Until the job's first step is made: nodes come, processes start, the script imports and builds."""
    LAUNCH = "launch"
    """From the first start of an unmodified script to its first step. A report counts it as START once there is a step."""
    COMPUTED = "computed"
    """Steps, and at levels 0 and 1 what the script does between them. A report divides it into the classes up to PAUSED, as far as they are
    known."""
    PRODUCTIVE = "productive"
    """Steps that stayed."""
    RECOMPUTED = "recomputed"
    """Steps that a restart from an older state rolled back, and that had to be done again."""
    SLOW_RANKS = "slow_ranks"
    """In steps, until those had computed that need longer than their peers."""
    DATA_WAIT = "data_wait"
    """In steps, until the data of the worker had come that was last for it."""
    SNAPSHOT_STALL = "snapshot_stall"
    """In steps, until the state was copied."""
    FEWER_WORKERS = "fewer_workers"
    """Of steps with fewer workers than wanted, the share that is missing."""
    IDLE_DIVISION = "idle_division"
    """Of steps whose micro-batches do not divide evenly, the share in which workers had none."""
    PAUSED = "paused"
    """Between two steps in work of the script's own, such as an evaluation, on the worker that had most of it. At levels 0 and 1 it
    is not known, and part of COMPUTED."""
    INTERRUPTED = "interrupted"
    """Work on a step that a fault ended: from the last step to the fault."""
    DETECT = "detect"
    """From the fault until it was noticed. Zero where the time of the fault is not known."""
    DECIDE = "decide"
    """Until all workers of the disturbed generation have left it."""
    REPLACE = "replace"
    """Until there are workers enough for the next one."""
    JOIN = "join"
    """Until the members of the next generation are connected."""
    RESTORE = "restore"
    """Until they have the state, as long as the slowest took."""
    FIRST_STEP = "first_step"
    """Until its first step is committed."""
    RESTART = "restart"
    """At levels 0 and 1, from a start of all workers again to its first step."""
    PLANNED = "planned"
    """From the last step before a planned change of the membership to the first one after it."""
    SAVING = "saving"
    """After the last step: the script's own end, and the newest state on its way to the durable tiers."""
    UNEXPLAINED = "unexplained"
    """Nobody can tell: the script says nothing of its steps, or an older version of the coordinator counted nothing."""
