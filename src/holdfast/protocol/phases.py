"""Where in its life or in a step a worker is: values only, so that the core may know them."""

from __future__ import annotations

from enum import IntEnum

import msgspec


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
    ASIDE = 13  # the script's own work between two steps, announced by `run.aside`
    SNAPSHOT = 14  # the state is being copied beside a step (a phase of faults, not of the page)
    TIER = 15  # reading from a durable tier or writing to it, which may take its time


WAITING_PHASES = frozenset({Phase.REDUCE, Phase.VOTE, Phase.JOIN, Phase.PARKED, Phase.IDLE, Phase.DONE})
"""Phases in which a worker waits for others, so that standing still is no sign of guilt."""


SLOW_PHASES = frozenset({Phase.ASIDE, Phase.TIER})
"""Phases in which a worker may stand still for as long as a start may take."""


class Place(msgspec.Struct, frozen=True):
    """What the page said at one moment. Times are CLOCK_MONOTONIC seconds of the worker's node."""

    generation: int = 0
    committed: int = 0
    phase: int = Phase.STARTUP
    collectives: int = 0
    step_began_s: float = 0.0
    phase_began_s: float = 0.0
    beat_s: float = 0.0
