"""The systems that are compared: one module each, and the list of them in the order of the table."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

from bench.recovery.systems.base import System
from bench.recovery.systems.holdfast import (
    HoldfastLaunched,
    HoldfastSharded,
    HoldfastTrainer,
    HoldfastWritten,
)
from bench.recovery.systems.nvrx import FtLauncher, InProcess
from bench.recovery.systems.sharded import InProcessSharded, TorchftSharded, TorchrunSharded
from bench.recovery.systems.torchft import Torchft
from bench.recovery.systems.torchrun import Torchrun, TorchrunTrainer

SYSTEMS: tuple[System, ...] = (
    HoldfastWritten(),
    HoldfastLaunched(),
    Torchrun(),
    Torchft("torchft", tuned=False),
    Torchft("torchft-tuned", tuned=True),
    Torchft("torchft-spare", tuned=True, spare=True),
    InProcess("nvrx-inprocess", tuned=False),
    InProcess("nvrx-inprocess-tuned", tuned=True),
    FtLauncher(),
)
SHARDED: tuple[System, ...] = (
    HoldfastSharded(),
    TorchrunSharded(),
    TorchftSharded("torchft-sharded", tuned=False),
    TorchftSharded("torchft-sharded-tuned", tuned=True),
    InProcessSharded("nvrx-inprocess-sharded", tuned=False),
    InProcessSharded("nvrx-inprocess-sharded-tuned", tuned=True),
)
"""The systems of the table of sharded replicas."""

TRAINER: tuple[System, ...] = (HoldfastTrainer(), TorchrunTrainer())
"""The systems of the table of Hugging Face's Trainer."""


def select(patterns: str, systems: Sequence[System] = SYSTEMS) -> list[System]:
    """Those of `systems` that match a comma-separated list of names or patterns such as `torchft*`.

    Raises ValueError for one that matches nothing.
    """
    chosen: set[str] = set()
    for pattern in patterns.split(","):
        found = fnmatch.filter([system.name for system in systems], pattern)
        if not found:
            names = ", ".join(system.name for system in systems)
            raise ValueError(f"no system is called {pattern!r}; there are: {names}")
        chosen.update(found)
    return [system for system in systems if system.name in chosen]
