"""Checksums by which replicas are compared: of a small part of the state, another one each time.

All replicas hold the same bits, also under the fast reduction, and a processor or a memory that errs without a sign breaks
that. Reading all of the state would cost too much, so each look reads one window, the same on all workers of a shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
import xxhash

from holdfast.tensors import staging
from holdfast.tensors.dtensor_shards import local_of
from holdfast.tensors.tree import buffer_of
from holdfast.tensors.wrappers import inside_of, parts_of
from holdfast.train.state_image import Protected

WINDOW_BYTES = 256 << 10
WINDOW_TENSORS = 8
"""A look reads no more of either: some 50 us for the bytes, and 20 us for each tensor."""
EVERY_BLOCKS = 4
"""A look after every so many blocks of `BLOCK_STEPS` steps."""


class _Piece(NamedTuple):
    """Where a tensor of the state is found. The tensor itself is not kept: an optimizer may put another in its place."""

    parameter: torch.Tensor
    optimizer: torch.optim.Optimizer | None = None
    """Whose state of the parameter it is; None: it is the parameter."""
    key: str = ""
    part: str = ""
    """Of a tensor that is made of others: which of them, see `wrappers.parts_of`."""

    def whole(self) -> torch.Tensor:
        """The tensor that it is a part of."""
        if self.optimizer is None:
            return self.parameter
        whole: torch.Tensor = self.optimizer.state[self.parameter][self.key]
        return whole

    def now(self) -> torch.Tensor:
        """What of it is here."""
        part = self.whole()
        for name in self.part.split(".")[1:]:
            part = getattr(inside_of(part), name)
        return local_of(part).detach()

    def parts(self) -> Iterator[_Piece]:
        """It itself, or what it is made of."""
        for path, _ in parts_of("", self.whole()):
            yield self._replace(part=path)


_Window = list[tuple[_Piece, int, int]]
"""Pieces, with the first byte of each that is read and the one after the last."""


class StateSums:
    """The parameters and moments that are here, in host memory. A GPU's are not looked at: the host would wait for them."""

    def __init__(self, objects: Protected) -> None:
        self._objects = objects
        self._optimizers = [t for t in objects.values() if isinstance(t, torch.optim.Optimizer)]
        self._known: tuple[list[int], list[_Window]] | None = None

    def after(self, block: int) -> int | None:
        """The checksum of a window after this block of steps; after the last window comes the first. None: it is not time to
        look, or there is nothing to read."""
        if block % EVERY_BLOCKS:
            return None
        windows = self._laid_out()
        if not windows:
            return None
        hasher = xxhash.xxh3_64()
        # Which window it is follows from the block's number and the layout alone. So all workers of a shard read the same
        # bytes without a message, and one that came late reads with the others from its first block on.
        for piece, begin, end in windows[block // EVERY_BLOCKS % len(windows)]:
            # In the order of its elements, however they lie in memory: moments that were made here may lie as a
            # channels-last parameter does, and those that were loaded do not.
            hasher.update(buffer_of(staging.flat(piece.now().contiguous())[begin:end]))
        # Of 64 bits the upper one is left out: what stores a count signed can hold it.
        return hasher.intdigest() >> 1

    def _laid_out(self) -> list[_Window]:
        """What is read at each look. Laid out anew when an optimizer keeps more than before, since a newcomer has all of it at
        once, and both must read the same."""
        # Sizes of dictionaries alone: to list all tensors takes milliseconds in a model of some hundred.
        kept = [sum(map(len, optimizer.state.values())) for optimizer in self._optimizers]
        if self._known is None or self._known[0] != kept:
            self._known = kept, list(_windows(self._pieces()))
        return self._known[1]

    def flip(self) -> None:
        """An injected fault: one bit of the first parameter changes, as in a memory that errs."""
        for piece in self._pieces():
            if (tensor := piece.now()).numel() and tensor.is_contiguous():
                # In the upper part of the mantissa, of 16, 32 and 64 bits: the lowest bit is lost again in the rounding of
                # later updates.
                staging.flat(tensor)[max(0, tensor.itemsize - 2)] ^= 8
                return

    def _pieces(self) -> Iterator[_Piece]:
        """In an order that is the same on all workers. An optimizer's own order is that in which it met its parameters, and of
        one that was loaded another."""
        for thing in self._objects.values():
            if isinstance(thing, torch.nn.Module):
                yield from (part for p in thing.parameters() for part in _Piece(p).parts())
            elif isinstance(thing, torch.optim.Optimizer):
                for p in (p for group in thing.param_groups for p in group["params"]):
                    state = thing.state.get(p, {})
                    kept = (_Piece(p, thing, k) for k in sorted(state) if isinstance(state[k], torch.Tensor))
                    yield from (part for piece in kept for part in piece.parts())


def _windows(pieces: Iterable[_Piece]) -> Iterator[_Window]:
    window: _Window = []
    room = WINDOW_BYTES
    for piece in pieces:
        tensor, begin = piece.now(), 0
        while tensor.device.type == "cpu" and begin < tensor.nbytes:
            # A large tensor is cut into several windows and small ones share one: a look costs the same in any model, and
            # a larger state only takes more looks until all of it was read.
            end = min(begin + room, tensor.nbytes)
            window.append((piece, begin, end))
            begin, room = end, room - (end - begin)
            if not room or len(window) == WINDOW_TENSORS:
                yield window
                window, room = [], WINDOW_BYTES
    if window:
        yield window
