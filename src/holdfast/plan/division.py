"""Divides a global batch over workers. Micro-batches are not split, so some sizes leave workers idle."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


def idle_share(micro_batches: int, world: int) -> float:
    """The share of the workers' time that nobody can use: the slowest has ceil(V / W) micro-batches, so 1 - V / (W *
    ceil(V / W)). 0 when W divides V.

    Raises:
        ValueError: more workers than micro-batches, or none.
    """
    if not 1 <= world <= micro_batches:
        raise ValueError(
            f"{world} workers cannot share {micro_batches} micro-batches; use between 1 and {micro_batches} workers"
        )
    return 1.0 - micro_batches / (world * -(-micro_batches // world))


class Division(msgspec.Struct, frozen=True):
    """One world size: most is what the slowest worker computes, least the others."""

    world: int
    most: int
    least: int
    idle: float


def divide(micro_batches: int, worlds: Iterable[int]) -> list[Division]:
    """Every world size that can share the micro-batches."""
    return [
        Division(w, -(-micro_batches // w), micro_batches // w, idle_share(micro_batches, w))
        for w in worlds
        if 1 <= w <= micro_batches
    ]


class Suggestion(msgspec.Struct, frozen=True):
    """A micro-batch size, and the largest idle share of any world size with it."""

    micro_batch: int
    worst: float


def suggest(global_batch: int, micro_batch: int, worlds: Iterable[int]) -> list[Suggestion]:
    """Micro-batch sizes that divide the global batch and leave less idle than the given one, the largest first: larger
    ones use a device better.
    """
    sizes = list(worlds)

    def worst(size: int) -> float:
        return max((d.idle for d in divide(global_batch // size, sizes)), default=1.0)

    # Smaller sizes only: a larger micro-batch may not fit into the memory of a device.
    now = worst(micro_batch)
    smaller = [s for s in range(micro_batch - 1, 0, -1) if global_batch % s == 0]
    better: list[Suggestion] = []
    for size in smaller:
        # Each suggestion must leave less idle than all larger ones, which use a device better. A size with which the largest
        # world has more workers than micro-batches is no suggestion.
        if global_batch // size >= max(sizes) and worst(size) < min([now, *(b.worst for b in better)]):
            better.append(Suggestion(size, worst(size)))
    return better
