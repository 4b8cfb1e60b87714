"""State that was saved with another number of shards, into the pieces that this worker has."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.distributed.tensor import zeros

from holdfast.checkpoint.loading import regions_of
from holdfast.checkpoint.located import Located
from holdfast.checkpoint.regions import Region, read_regions
from holdfast.errors import StateError
from holdfast.tensors.dtensor_shards import Submesh, parsed, piece_of
from holdfast.tensors.index import TensorSpec
from holdfast.tensors.tree import dtype_of, within_wrappers
from holdfast.tensors.wrappers import inside_of
from holdfast.tensors.writable import is_expanded
from holdfast.train.state_image import Protected, give, live, parameter_of


def load(
    objects: Protected,
    found: Located,
    shard_index: int,
    submesh: Submesh | None,
    seen: Callable[[int, int], None] = lambda nbytes, total: None,
) -> int:
    """Reads only what this worker's pieces need; returns its bytes.

    Args:
        shard_index: the shard that this worker holds.
        submesh: of its replica, if it has several workers.
        seen: told of bytes that came in, and of how many there are, from several threads.

    Raises:
        StateError: no source has all of it, or it is of other objects.
    """
    index = found.heads[found.nearest(shard_index)].index
    # As in `state_image.targets`: neither what wrappers are made of is written to where it is, nor what is expanded.
    within = within_wrappers(index)
    there = {p: t for p, t in live(objects).items() if p not in within and not is_expanded(inside_of(t))}
    tensors: list[torch.Tensor] = []
    regions: list[Region] = []
    # Live tensors that cannot be read into directly, such as those of a GPU or of another layout, get a
    # staged copy. They are filled after all regions have arrived.
    late: list[tuple[torch.Tensor, torch.Tensor]] = []
    for spec in index.tensors:
        target = _target(objects, there, spec, submesh)
        tensors.append(target)
        regions += regions_of(found, piece_of(spec.path, target), shard_index, late)
    total = sum(r.target.numel() * r.target.element_size() for r in regions)
    read_regions(found, regions, seen=lambda nbytes: seen(nbytes, total))
    # Only when everything is here: an error above leaves these tensors untouched.
    with torch.no_grad():
        for ours, staged in late:
            ours.copy_(staged)
    give(objects, index.tree, tensors, submesh)
    return total


def _target(
    objects: Protected, there: dict[str, torch.Tensor], spec: TensorSpec, submesh: Submesh | None
) -> torch.Tensor:
    """What is to receive a saved tensor: the live one, or a new one that lies as its parameter does."""
    shape = spec.global_shape or spec.shape
    now = there.get(spec.path)
    if now is not None and tuple(now.shape) == shape and now.dtype == dtype_of(spec):
        return now.detach()
    # An optimizer that has not made a step has no moments yet, so there is no live tensor to take the layout
    # from. Its parameter has that layout.
    parameter = parameter_of(objects, spec.path)
    if parameter is not None and tuple(parameter.shape) == shape:
        return torch.zeros_like(parameter, dtype=dtype_of(spec), requires_grad=False)
    if not spec.placed:
        return torch.empty(shape, dtype=dtype_of(spec))
    if submesh is None:
        raise StateError(
            f"{spec.path} was saved in pieces, but this script does not determine which of them it needs"
        )
    names, placements = parsed(spec.placed)
    return zeros(shape, dtype=dtype_of(spec), device_mesh=submesh(names), placements=placements)
