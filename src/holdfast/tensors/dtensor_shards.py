"""Tensors of which a worker holds one piece: DTensors, as FSDP2 and tensor parallelism make them.

Everything below works on the piece that is here, an ordinary tensor; what it is a piece of is noted beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from holdfast.errors import StateError, UsageError

Submesh = Callable[[tuple[str, ...]], Any]
"""The DeviceMesh of these dimensions."""


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """A tensor of the state: what of it is here, and where that begins in the global tensor."""

    path: str
    local: torch.Tensor
    global_shape: tuple[int, ...] = ()
    """Empty for a tensor that is not sharded."""
    start: tuple[int, ...] = ()
    placed: str = ""
    """How it lies on the mesh, as `placed` has it, where that is saved."""


_starts: dict[Any, tuple[int, ...] | None] = {}
"""Where a layout's local box begins. Asking torch takes 25 us for every tensor, which adds up to as much as copying a
hundred megabytes."""


def forget_meshes() -> None:
    """This process becomes another shard of its replica. Torch and this module remember what they found out of a mesh, and
    the next one will be equal to this one, but for the rank in it."""
    _starts.clear()
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    clear_redistribute_planner_cache()


def start_of(tensor: DTensor, local: torch.Tensor) -> tuple[int, ...] | None:
    """Where the piece begins in the global tensor; None when it is no single box of it."""
    # A partial tensor is a sum that nobody has completed. Saved as it is, it would be restored as if it were
    # complete.
    if any(p.is_partial() for p in tensor.placements):
        return None
    # Mesh and placements hash by value. That is why `forget_meshes` is needed when this process gets another
    # rank in an equal mesh.
    key = tensor.device_mesh, tensor.placements, tensor.shape, local.shape
    if key not in _starts:
        chunks = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
        one_box = len(chunks) == 1 and tuple(chunks[0].sizes) == tuple(local.shape)
        _starts[key] = tuple(chunks[0].offsets) if one_box else None
    return _starts[key]


def piece_of(path: str, tensor: torch.Tensor) -> Leaf:
    """What a worker has of a tensor: all of it, or a piece.

    Raises:
        UsageError: a DTensor whose placement keeps no contiguous box of it (or sums that are still to be reduced).
    """
    if not isinstance(tensor, DTensor):
        return Leaf(path=path, local=tensor)
    local = local_of(tensor)
    start = start_of(tensor, local)
    if start is None:
        raise UsageError(
            f"{path}: the local part of a DTensor placed as {tensor.placements} is not a single box of the whole tensor"
        )
    return Leaf(path=path, local=local, global_shape=tuple(tensor.shape), start=start)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The piece that is here, sharing its memory; an ordinary tensor is its own."""
    return tensor._local_tensor.detach() if isinstance(tensor, DTensor) else tensor


def like(piece: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """A piece of the same kind as this worker's piece of `tensor`; an ordinary tensor's is the piece itself."""
    if not isinstance(tensor, DTensor):
        return piece
    return _dtensor(piece, tensor.device_mesh, tensor.placements, tuple(tensor.shape), tensor.stride())


def _dtensor(
    piece: torch.Tensor, mesh: Any, placements: Any, shape: tuple[int, ...], stride: tuple[int, ...]
) -> DTensor:
    # `from_local` makes a view of the piece, which need not be of its kind where that is made of other tensors. And its
    # check would be a collective among workers, in the middle of a step or of a recovery.
    meta = TensorMeta(torch.Size(shape), stride, piece.dtype)
    return DTensor(piece, DTensorSpec(mesh, tuple(placements), tensor_meta=meta), requires_grad=False)  # type: ignore[no-untyped-call]


def placed(tensor: torch.Tensor) -> str:
    """How a DTensor lies on a mesh within its replica, in words that a file can hold: "shard:S0,tensor:R"; else "".

    Raises:
        UsageError: a placement of another kind.
    """
    if not isinstance(tensor, DTensor):
        return ""
    names = mesh_names(tensor.device_mesh)
    return ",".join(f"{name}:{_word(p)}" for name, p in zip(names, tensor.placements, strict=True))


def mesh_names(mesh: Any) -> tuple[str, ...]:
    """What the dimensions of a mesh are called; numbers, if nobody has named them."""
    return tuple(mesh.mesh_dim_names or map(str, range(mesh.ndim)))


def _word(placement: Any) -> str:
    if placement.is_replicate():
        return "R"
    # The exact class: a strided shard is a Shard too, and its pieces lie elsewhere.
    if type(placement) is Shard:
        return f"S{placement.dim}"
    split = getattr(placement, "split_factor", None)
    if split is not None:
        return f"S{placement.dim}/{split}"
    raise UsageError(
        f"a DTensor is placed as {placement}: only sharded and replicated DTensors can be protected"
    )


def place(piece: torch.Tensor, words: str, shape: tuple[int, ...], submesh: Submesh | None) -> torch.Tensor:
    """The opposite of `placed`: a DTensor of this piece, or the piece itself.

    Raises:
        StateError: the run has no such mesh.
    """
    if not words:
        return piece
    if submesh is None:
        raise StateError("the state belongs to a sharded model, but this script has not called run.mesh()")
    names, placements = parsed(words)
    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    mesh = submesh(names)
    return _dtensor(piece.to(mesh.device_type), mesh, placements, shape, stride)


def parsed(words: str) -> tuple[tuple[str, ...], list[Any]]:
    """The dimensions and placements that `placed` wrote."""
    parts = [part.split(":") for part in words.split(",")]
    return tuple(name for name, _ in parts), [_placement(word) for _, word in parts]


def _placement(word: str) -> Any:
    if word == "R":
        return Replicate()
    dim, _, split = word[1:].partition("/")
    if not split:
        return Shard(int(dim))
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(int(dim), split_factor=int(split))
