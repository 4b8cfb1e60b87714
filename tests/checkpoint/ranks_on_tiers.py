"""Checkpoints for tests, of states as several ranks save them."""

from __future__ import annotations

import msgspec
import torch

from holdfast.checkpoint.archive import Archive
from holdfast.checkpoint.layout import seal, sums_of_buffers
from holdfast.checkpoint.loading import FlatState, flatten
from holdfast.tensors.index import StateIndex, TensorSpec
from holdfast.tensors.tree import buffer_of


def save_states(archive: Archive, step: int, states: list[dict]) -> None:
    """Every rank's state; a `Piece` in it is one of a sharded tensor."""
    save_flats(archive, step, [flat_of(state, step) for state in states])


def save_flats(archive: Archive, step: int, flats: list[FlatState]) -> None:
    shards = []
    for rank, flat in enumerate(flats):
        pieces = [buffer_of(t.contiguous()) for t in flat.tensors]
        sums = sums_of_buffers(pieces)
        shards.append(archive.save_shard(step, rank, seal(flat.index, sums), pieces))
    archive.commit(step, shards)


class Piece(torch.Tensor):
    """The part of a whole tensor that a rank has."""

    @staticmethod
    def of(whole: torch.Tensor, low: int, high: int) -> Piece:
        """Blobs of it."""
        piece = whole[low:high].contiguous().as_subclass(Piece)
        piece.global_shape = tuple(whole.shape)
        piece.start = (low, *(0 for _ in whole.shape[1:]))
        return piece


def flat_of(state: dict, step: int) -> FlatState:
    """As `flatten`, which is given no DTensors here."""
    flat = flatten(state, step)
    pieces = dict(_pieces(state, ""))
    assert all(any(s.path == path for s in flat.index.tensors) for path in pieces), "too small to be a piece"
    specs = tuple(
        msgspec.structs.replace(s, global_shape=pieces[s.path].global_shape, start=pieces[s.path].start)
        if s.path in pieces
        else s
        for s in flat.index.tensors
    )
    return FlatState(
        msgspec.structs.replace(flat.index, tensors=specs),
        [t.as_subclass(torch.Tensor) for t in flat.tensors],
    )


def flat_rank(step: int, tensors: dict[str, torch.Tensor]) -> FlatState:
    """What a rank of torch.distributed.checkpoint writes: no tree."""
    specs, offset = [], 0
    for path, tensor in tensors.items():
        nbytes = tensor.numel() * tensor.element_size()
        global_shape, start = getattr(tensor, "global_shape", ()), getattr(tensor, "start", ())
        specs.append(
            TensorSpec(
                path=path,
                dtype=str(tensor.dtype)[6:],
                shape=tuple(tensor.shape),
                offset=offset,
                nbytes=nbytes,
                global_shape=global_shape,
                start=start,
            )
        )
        offset += nbytes
    plain = [t.as_subclass(torch.Tensor) for t in tensors.values()]
    return FlatState(StateIndex(step, {}, tuple(specs), offset), plain)


def _pieces(value: object, path: str) -> list[tuple[str, Piece]]:
    if isinstance(value, Piece):
        return [(path, value)]
    if isinstance(value, dict):
        return [p for k, v in value.items() for p in _pieces(v, f"{path}.{k}" if path else str(k))]
    return []
