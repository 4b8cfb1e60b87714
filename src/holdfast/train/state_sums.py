"""Checksums by which replicas are compared: of a small part of the state, another one each time.

All replicas hold the same bits, also under the fast reduction, and a processor or a memory that errs without a sign breaks
that. Reading all of the state would cost too much, so each look reads one window, the same on all workers of a shard.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator

import torch
import xxhash

from holdfast.tensors import staging
from holdfast.tensors.dtensor_shards import local_of
from holdfast.tensors.tree import buffer_of
from holdfast.train.state_image import Protected

WINDOW_BYTES = 256 << 10
"""Read in some 50 us, once in `BLOCK_STEPS` steps."""


class StateSums:
    """The parameters and moments that are here, in host memory. A GPU's are not looked at: the host would wait for them."""

    def __init__(self, objects: Protected) -> None:
        self._objects = objects
        self._optimizers = [t for t in objects.values() if isinstance(t, torch.optim.Optimizer)]
        self.forget()

    def forget(self) -> None:
        """The state came from elsewhere: optimizers may hold it in other tensors."""
        self._held: tuple[list[int], list[torch.Tensor], list[int]] | None = None

    def look(self, number: int) -> int | None:
        """The checksum of window `number`; after the last window comes the first. None: there is nothing to read."""
        flats, begins = self._laid_out()
        total = begins[-1]
        if not total:
            return None
        low = number % -(-total // WINDOW_BYTES) * WINDOW_BYTES
        hasher, high = xxhash.xxh3_64(), min(low + WINDOW_BYTES, total)
        index = bisect.bisect_right(begins, low) - 1
        while index < len(flats) and begins[index] < high:
            begin, end = max(low - begins[index], 0), min(high, begins[index + 1]) - begins[index]
            if begin < end:
                hasher.update(buffer_of(flats[index][begin:end]))
            index += 1
        # Of 64 bits the upper one is left out: what stores a count signed can hold it.
        return hasher.intdigest() >> 1

    def _laid_out(self) -> tuple[list[torch.Tensor], list[int]]:
        """The tensors as bytes, and where each begins, with the end of the last. Looked for anew when an optimizer has met
        another parameter: those of a newcomer have all of them at once, and both must read the same."""
        met = [len(optimizer.state) for optimizer in self._optimizers]
        if self._held is None or self._held[0] != met:
            flats = [staging.flat(t.detach()) for t in self._tensors()]
            self._held = met, flats, [0, *itertools.accumulate(f.numel() for f in flats)]
        return self._held[1], self._held[2]

    def flip(self) -> None:
        """An injected fault: the lowest bit of the first parameter changes, as in a memory that errs."""
        for tensor in self._tensors():
            if tensor.numel():
                staging.flat(tensor.detach())[0] ^= 1
                return

    def _tensors(self) -> Iterator[torch.Tensor]:
        """In an order that is the same on all workers. An optimizer's own order is that in which it met its parameters, and of
        one that was loaded another."""
        for thing in self._objects.values():
            found: list[torch.Tensor] = []
            if isinstance(thing, torch.nn.Module):
                found = list(thing.parameters())
            elif isinstance(thing, torch.optim.Optimizer):
                states = [thing.state.get(p, {}) for group in thing.param_groups for p in group["params"]]
                found = [s[k] for s in states for k in sorted(s) if isinstance(s[k], torch.Tensor)]
            for tensor in map(local_of, found):
                if tensor.device.type == "cpu" and tensor.is_contiguous():
                    yield tensor
