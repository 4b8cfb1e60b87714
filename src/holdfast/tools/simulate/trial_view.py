"""What failures and names may see of a trial, and do to it.

`Cluster` calls `strikes` and `names` and is what this describes; they know this description only, so the arrows run one way.
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


# A protocol and no base class: `Cluster` is the only one that fits it, and the arrows between the modules
# still run one way.
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

    def tell(self, events: list[e.Event], starting: bool = False) -> None:
        """The core hears what came at this moment, and what it decides is done."""
        ...

    def tell_saved(self) -> None:
        """Before it matters, the coordinator hears of the newest checkpoint and the newest snapshot."""
        ...

    def word(self, machine: SimulatedMachine, message: m.WorkerMessage, age_s: float = 0.0) -> e.NodeSays:
        """What a worker says, as its agent passes it on."""
        ...

    def wind(self) -> None:
        """Sees to it that the core is asked again at its next deadline."""
        ...

    def pace(self) -> None:
        """A member became slow, or fast again."""
        ...

    def halt(self, why: str) -> None:
        """Nobody commits from now on."""
        ...

    def down(self, machine: SimulatedMachine, repair_s: float | None) -> None:
        """A machine fails, silently."""
        ...
