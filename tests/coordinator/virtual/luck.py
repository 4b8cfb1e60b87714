"""What may go wrong around the service, drawn by a seed: each class is there in half of the schedules, or it is the only one."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from virtual.loop import HANDLE_S

STRIKES = (
    "disk-error",
    "disk-hang",
    "one-way",
    "half-dead",
    "stop-coordinator",
    "stop-agent",
    "slow-coordinator",
    "kill-coordinator",
    "hand-over",
    "succession",
)
"""Those that come at a time, or at a moment of the job."""

CLASSES = ("cluster", "changes", "findings", *STRIKES, "limits", "power", "slow-history")
"""`cluster`, `changes` and `findings`: those of the plan of `simcluster`. The others are of this module."""

MOMENTS = ("joining", "formed", "broke", "parked", "joined", "prepared", "ready", "done")
ALONE = 0.2
"""In this share of the schedules one class is alone: only then may much be asked of the job."""


@dataclass
class Luck:
    """One schedule's."""

    seed: int
    there: frozenset[str]
    strikes: list[tuple[float, str]] = field(default_factory=list)
    moments: list[tuple[str, int, str]] = field(default_factory=list)
    """At which one it strikes, and the how many-th of them."""
    history_s: float = 0.0
    """That the history of machines takes to answer, at most."""
    handle_s: float = HANDLE_S
    """What a handle costs an agent."""
    coordinator_handle_s: float = HANDLE_S
    write_s: float = 0.002
    window: int = 0
    """Bytes under way on a connection; 0: as always."""
    kept_messages: int = 0
    """That an agent keeps without a coordinator; 0: as always."""
    shared: bool = False
    """The job's folder is shared, and several machines may have the coordinator."""
    power_fails: bool = False
    """A machine that is gone may say nothing."""


def luck_for(seed: int, window_s: float, without: frozenset[str] = frozenset()) -> Luck:
    """The luck of a seed, within the first `window_s` seconds. without: classes that are left out, for a smaller story."""
    # Each by a number of its own: one more class changes nothing about the others.
    drawn = {name: random.Random(f"{seed} has {name}").random() for name in CLASSES}
    alone = random.Random(f"{seed} alone").random() < ALONE
    there = frozenset([min(drawn, key=drawn.__getitem__)] if alone else [n for n in drawn if drawn[n] < 0.5])
    there -= without
    luck = Luck(seed, there)
    own = random.Random(f"{seed} ways of the disk")
    luck.write_s = own.choice((0.0005, 0.002, 0.002, 0.05))
    if "limits" in there:
        own = random.Random(f"{seed} limits")
        luck.window, luck.kept_messages = own.choice((512, 2048, 8192)), own.choice((0, 16, 64))
    luck.shared = "succession" in there
    luck.power_fails = "power" in there
    if "slow-history" in there:
        luck.history_s = random.Random(f"{seed} history").choice((0.05, 0.5, 1.9))
    for kind in STRIKES:
        if kind in there:
            # Each class draws for itself: without one of them the others strike as before.
            own = random.Random(f"{seed} {kind}")
            for _ in range(own.choice((1, 1, 2, 3)) * (4 if len(there) == 1 else 1)):
                if own.random() < 0.5:
                    luck.strikes.append((own.uniform(0.5, window_s), kind))
                else:
                    luck.moments.append((own.choice(MOMENTS), own.randint(1, 6), kind))
    return luck
