"""What the harness tells a worker, through the environment: the same variables for every system."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

_PREFIX = "BENCH_RECOVERY_"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of one job."""

    events: str
    """Path of the event log."""
    gate: str
    """Path of the gate's shared file."""
    checkpoint: str
    """Path of the checkpoint file, or folder."""
    checkpoint_every: int
    """Steps between two checkpoints; 0 for none."""
    state_mb: float
    """Ballast in the state, in megabytes."""
    replicas: int
    """Replicas at full strength."""
    shards: int = 1
    """Workers that hold one replica together."""
    size: str = "10m"
    """Name of the model's size."""
    states: str = ""
    """Path of the log of states held and fetched (sharded jobs only)."""

    @property
    def workers(self) -> int:
        """Workers at full strength."""
        return self.replicas * self.shards

    def environment(self) -> dict[str, str]:
        return {_PREFIX + name.upper(): str(value) for name, value in vars(self).items()}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        def value(name: str) -> str:
            return environment[_PREFIX + name.upper()]

        return cls(
            events=value("events"),
            gate=value("gate"),
            checkpoint=value("checkpoint"),
            checkpoint_every=int(value("checkpoint_every")),
            state_mb=float(value("state_mb")),
            replicas=int(value("replicas")),
            shards=int(value("shards")),
            size=value("size"),
            states=value("states"),
        )
