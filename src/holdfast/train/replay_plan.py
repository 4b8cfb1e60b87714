"""Which micro-batch of a step is computed a second time, and by whom: pure.

Every member evaluates it alike, so nobody is told what is looked at. A micro-batch is a function of (seed, step, number), so
whoever computes it again loads it by its number, and no data is sent. That also compares what two nodes read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.data.seeds import micro_seed
from holdfast.train.summation_order import shares

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
