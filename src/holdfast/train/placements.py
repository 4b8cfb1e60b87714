"""Where a parameter lies within its replica, whoever made the mesh: whether its gradient can be complete there, and who counts it.

Torch's world is the replica, so a mesh of anybody's consists of ranks within it. Holdfast adds up gradients between workers of the
same rank in other replicas, which hold the same piece, whatever that is a piece of. What it has to know of a mesh is who
has the same elements, and whether those with other micro-batches are all in it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def ranks_of(mesh: DeviceMesh) -> list[int]:
    """The workers of a mesh, as ranks within the replica."""
    return [int(rank) for rank in mesh.mesh.flatten().tolist()]


def why_not(p: torch.Tensor, *, workers: Sequence[int], alike: int) -> str | None:
    """Why the gradient of a parameter cannot be complete within a replica, after "it"; None: it can.

    Args:
        workers: those of the replica that have this layer: all, or one stage of a pipeline.
        alike: so many with neighbouring ranks compute the very same: the tensor degree.
    """
    if not isinstance(p, DTensor):
        # A stage of one worker has nobody to share it with.
        return "is not a DTensor: it is neither sharded nor replicated" if len(workers) > 1 else None
    ranks, mesh = ranks_of(p.device_mesh), p.device_mesh
    if mesh.get_coordinate() is None:
        return (
            f"is on the workers {_some(ranks)} of its replica, but not on this worker: every worker must hold a part "
            "of every parameter of its model; in a pipeline each stage is its own model, see run.mesh(stage=...)"
        )
    if any(placement.is_partial() for placement in p.placements):
        return (
            f"is placed as {p.placements}: a sum that is not complete (Partial) cannot be saved or restored"
        )
    # Along the tensor dimension all compute the same gradient, so one of them is enough for each share of the data.
    computing = {rank // alike for rank in ranks}
    missing = sorted({rank // alike for rank in workers} - computing)
    if missing:
        others = [rank * alike for rank in missing]
        return (
            f"is only on the workers {_some(ranks)} of its replica, so the gradients of worker {_some(others)}, "
            "which computes other samples, would not be summed: shard it over those, too, as fully_shard(..., "
            "mesh=run.mesh(...)) does"
        )
    return None


def counted_here(p: torch.Tensor, first: int = 0) -> bool:
    """Whether this worker counts this piece in the norm of the gradient. Each element is counted on exactly one worker of the
    replica, even if several have it. first: the first worker that has this layer."""
    if not isinstance(p, DTensor):
        return True
    mesh, coordinate = p.device_mesh, p.device_mesh.get_coordinate()
    # Workers outside of the mesh hold the same parameter on meshes of their own, such as those of the tensor
    # dimension for what is sharded over the data alone. These meshes share no worker, and one of them has the first.
    if coordinate is None or first not in ranks_of(mesh):
        return False
    # Among the workers that differ in a replicated dimension alone, all have the same piece, and one is first in
    # all such dimensions. Shards of any kind, strided ones too, are other elements on each worker.
    return all(at == 0 or not p.is_replicate() for at, p in zip(coordinate, p.placements, strict=True))


def is_spread(tensor: torch.Tensor | None, alike: int) -> bool:
    """Whether workers with other micro-batches hold other parts of the parameter, or sums that are still to be completed.
    Workers that compute exactly the same may each have a part of their own."""
    if not isinstance(tensor, DTensor):
        return False
    mesh = tensor.device_mesh
    for dim, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            continue
        # A line has the workers that differ in this dimension alone. Divided by `alike` they are shares of the data, and
        # the workers of one share compute the very same: only a line across shares separates what other samples made.
        lines = mesh.mesh.movedim(dim, -1).reshape(-1, mesh.size(dim)) // alike
        if placement.is_partial() or bool((lines != lines[:, :1]).any()):
            return True
    return False


def settled(grad: torch.Tensor, placements: tuple[object, ...]) -> torch.Tensor:
    """The gradient, laid out as its parameter. Autograd may leave it as an incomplete sum over the mesh, such as that of a
    norm's weight under sequence parallelism: the sum is completed here, by a collective of the replica."""
    if not isinstance(grad, DTensor) or grad.placements == placements:
        return grad
    return grad.redistribute(placements=placements)  # type: ignore[arg-type]


def _some(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown + (", …" if len(ranks) > 8 else "")
