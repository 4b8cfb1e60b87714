"""In which membership a framework's step was computed, for the event log of the benchmark."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True, kw_only=True)
class Membership:
    """Who computed a step."""

    rank: int
    world: int
    gen: str
    """Names the membership: another one after every restart, or every loss of a worker."""


def under_torchrun() -> Membership:
    """Of torch's default process group. A restart is a new membership."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Membership(rank=dist.get_rank(), world=dist.get_world_size(), gen=attempt)


def in_a_job() -> Membership:
    """Of the job that this worker belongs to."""
    from holdfast.adapters import world

    run = world.own_run()
    return Membership(rank=run.rank, world=run.world_size, gen=str(run.generation))
