"""The interface of a trial for `strikes` and `names`.

`Cluster` calls these two modules and implements this interface; they only know the interface, so imports run in one
direction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from holdfast.coordinator.kernel import events as e
from holdfast.coordinator.machine import Core
from holdfast.protocol import messages as m
from holdfast.tools.simulate.arrivals import FailureStream
from holdfast.tools.simulate.machine import SimulatedMachine
from holdfast.tools.simulate.scenario import FailureClass, Scenario
from holdfast.tools.simulate.steps import Steps


# A protocol and not a base class: `Cluster` is its only implementation, and imports still run in one
# direction.
class TrialView(Protocol):
    """One trial under way."""

    scenario: Scenario
    now: float
    core: Core
    steps: Steps
    generation: int
    machines: dict[str, SimulatedMachine]
    rest: list[SimulatedMachine]
    members: list[SimulatedMachine]
    savers: list[SimulatedMachine]
    failures: dict[str, int]
    groups: list[tuple[FailureClass, range, FailureStream]]
    group_s: list[float]
    window_s: float
    heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]]

    def at(self, time_s: float, call: Callable[..., None], *args: Any) -> None:
        """Calls `call(*args)` at a time."""
        ...

    def tell(self, events: list[e.Event]) -> None:
        """Passes the events of this moment to the core, and carries out its decisions."""
        ...

    def tell_saved(self) -> None:
        """Reports the newest checkpoint and the newest snapshot before the coordinator needs them."""
        ...

    def word(self, machine: SimulatedMachine, message: m.WorkerMessage, age_s: float = 0.0) -> e.WorkersSay:
        """A message of a worker, as its agent forwards it."""
        ...

    def wind(self) -> None:
        """Plans a call of the core at its next deadline."""
        ...

    def pace(self) -> None:
        """A member became slow, or fast again."""
        ...

    def halt(self, why: str) -> None:
        """No step is committed from now on."""
        ...

    def down(self, machine: SimulatedMachine, repair_s: float | None) -> None:
        """A machine fails, silently."""
        ...
