"""What a checkpoint's bytes mean: a tree of plain values, and each tensor's place in one long row of bytes.

Free of torch, so that checkpoints can be listed and verified without it.
"""

from __future__ import annotations

from typing import Any

import msgspec


class TensorSpec(msgspec.Struct, frozen=True):
    """One tensor: its place in the row of bytes. dtype: torch's name without `torch.`."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Manifest(msgspec.Struct, frozen=True):
    """What the bytes mean. tree: nested [kind, value] pairs, see `holdfast.train.state`."""

    step: int
    tree: Any
    tensors: tuple[TensorSpec, ...]
    nbytes: int


class Saved(msgspec.Struct, frozen=True):
    """A checkpoint's `manifest.json`. chunks: xxh3_64 of every `chunk_bytes` of `state.bin`, in hex."""

    manifest: Manifest
    chunk_bytes: int
    chunks: tuple[str, ...]
