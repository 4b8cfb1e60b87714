"""A micro-batch of a step that is computed a second time: which one and by whom (pure), and computing it without a trace.

Every member evaluates it alike, so nobody is told what is looked at. A micro-batch is a function of (seed, step, number), so
whoever computes it again loads it by its number, and no data is sent. That also compares what two nodes read.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from holdfast.data.seeds import micro_seed
from holdfast.train.place import shares

if TYPE_CHECKING:
    from holdfast.train.held_state import HeldState


_DRAWS = 0x7265706C6179  # keeps these draws apart from the seeds of micro-batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """One micro-batch that is computed twice."""

    micro: int
    """Its number in the global batch."""
    owner: int
    """The rank whose share it is."""
    checker: int
    """The rank that computes it again."""
    third: int | None
    """The rank that is asked when the two differ; None: there are only two workers."""


def replay_of(every: int, seed: int, step: int, micro_batches: int, nodes: Sequence[str]) -> Replay | None:
    """What is computed twice in a step; None: nothing is.

    Args:
        every: one step of so many is drawn; 0: none.
        seed: of the run.
        micro_batches: in a global batch.
        nodes: the node of every rank.
    """
    # One worker alone would compare itself with itself: what errs the same way each time is not found.
    if not every or len(nodes) < 2:
        return None
    # One step of each block of `every`, and not always the same one: what else a job does at a fixed interval
    # (snapshots, evaluations) would always, or never, fall together with it.
    if step % every != _draw(seed, step // every, 0) % every:
        return None
    # Each choice has a draw of its own: with one for all, an owner would always have the same checker.
    micro = _draw(seed, step, 1) % micro_batches
    owner = next(rank for rank, mine in enumerate(shares(micro_batches, len(nodes))) if micro in mine)
    checker = _other(nodes, (owner,), _draw(seed, step, 2))
    assert checker is not None
    third = _other(nodes, (owner, checker), _draw(seed, step, 3))
    return Replay(micro=micro, owner=owner, checker=checker, third=third)


def _other(nodes: Sequence[str], taken: tuple[int, ...], draw: int) -> int | None:
    """Another rank; where there is one, on another node: what errs there errs for all of its workers."""
    free = [rank for rank in range(len(nodes)) if rank not in taken]
    far = [rank for rank in free if nodes[rank] not in {nodes[other] for other in taken}]
    among = far or free
    return among[draw % len(among)] if among else None


def _draw(seed: int, step: int, number: int) -> int:
    return micro_seed(seed ^ _DRAWS, step, number)


@contextmanager
def put_aside(state: HeldState, device: torch.device) -> Iterator[None]:
    """Generators and buffers are afterwards what they were before. Inside, the buffers that have a rule are what the last
    commit left, as at the begin of any micro-batch."""
    # What the script draws after its loop must not depend on whether this worker computed one more micro-batch.
    generators = (random.getstate(), np.random.get_state(), torch.default_generator.get_state())
    on_gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    buffers = [(buffer, buffer.detach().clone()) for buffer in state.module_buffers()]
    state.buffer_rules.put_back()
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, kept in buffers:
                buffer.copy_(kept)
        random.setstate(generators[0])
        np.random.set_state(generators[1])
        torch.default_generator.set_state(generators[2])
        if on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu, device)
