"""Module buffers as they were before the step, so that a step that is dropped leaves no trace in them.

A forward pass may change a buffer (running statistics), and no gradient tells. Small ones are copied before every
step. A large one is copied again only when it changed since its last copy: torch counts changes in place, and a
sample of its values is compared for those that are made behind torch's back (the statistics of a batch norm are).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from holdfast.tensors.writable import has_bytes, overwrite

SMALL_BYTES = 1 << 20
SAMPLES = 512


class _Kept:
    """One buffer and its newest copy."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        # Others are no part of the state, such as a sparse matrix; they are copied whole.
        self._plain = has_bytes(buffer)
        self.large = self._plain and buffer.numel() * buffer.element_size() > SMALL_BYTES
        self._stride = max(1, buffer.numel() // SAMPLES)
        self.copy: torch.Tensor | None = None
        self._version = -1

    def same(self) -> bool:
        """The copy is what the buffer holds. Small ones are not looked at."""
        # A small buffer is copied anew in every step: comparing costs as much as copying.
        if self.copy is None or not self.large or self.buffer._version != self._version:
            return False
        return torch.equal(self._sample(self.buffer), self._sample(self.copy))

    def _sample(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().reshape(-1)[:: self._stride]

    def keep(self) -> torch.Tensor:
        """A copy of the buffer as it is now; an older copy is never written to: a snapshot's thread or a newcomer may be reading it."""
        if self.copy is None or not self.same():
            self.copy, self._version = self.buffer.detach().clone(), self.buffer._version
        return self.copy

    def put_back(self) -> None:
        """The buffer becomes what its copy is."""
        if self.copy is not None and not self.same():
            if self._plain:
                overwrite(self.buffer, self.copy)
            else:
                with torch.no_grad():
                    self.buffer.copy_(self.copy)
            # The write itself counted as a change. Without this the buffer would be copied again in the next
            # step.
            self._version = self.buffer._version


class ModuleBuffers:
    """The buffers of the protected modules."""

    def __init__(self, buffers: Iterable[torch.Tensor]) -> None:
        self._kept = [_Kept(b) for b in buffers]
        self._by_address = {k.buffer.data_ptr(): k for k in self._kept if has_bytes(k.buffer)}

    def keep(self) -> None:
        """Before a step."""
        for kept in self._kept:
            kept.keep()

    def put_back(self) -> None:
        """The step is dropped."""
        for kept in self._kept:
            kept.put_back()

    def forget(self) -> None:
        """The buffers were filled from outside, in a way that torch does not count."""
        for kept in self._kept:
            kept.copy = None

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a buffer holds now, in memory that no step changes: to be read while training goes on."""
        kept = self._by_address.get(tensor.data_ptr())
        if kept is None or kept.buffer.shape != tensor.shape:
            return tensor.detach().clone()
        return kept.keep()
