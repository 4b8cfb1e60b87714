"""Replicas of several workers: their mesh, their models, and what a fault leaves behind in the wrappers.

Torch's world is the replica. On its mesh the dimension `replicate` always has one member: gradients are summed over
the replicas by Holdfast's reduction, shard by shard, so replicas come and go without any wrapper knowing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from holdfast.errors import StateError, UsageError
from holdfast.protocol.messages import SHARD_INDEX_VARIABLE
from holdfast.tensors.dtensor_shards import forget_meshes
from holdfast.train.fsdp_buffers import use_pool
from holdfast.train.reconnectable_group import ReplicaGroups

DIMENSIONS = ("replicate", "shard", "tensor")
SHOWN = 5


class Sharding:
    """This worker's place in a replica of several.

    Attributes:
        shape: workers of a replica: shard degree, and tensor degree.
        shard_index: which of them this one is; the tensor dimension is the inner one.
        mesh: what the script gets.
        groups: the replica's process groups.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        shard_index: int | None,
        device: torch.device,
        host: str,
        target: int,
        called: Callable[[bool], None],
    ) -> None:
        """shard_index: None where the coordinator has not said. target: workers of the job at full strength.
        called: as in ReplicaGroups.

        Raises:
            UsageError: a mesh that does not fit the job.
        """
        shard, tensor = shape
        size = shard * tensor
        if shard < 1 or tensor < 1:
            raise UsageError(f"run.mesh(shard={shard}, tensor={tensor}): both are at least 1")
        if target % size:
            what = f"shard={shard}" + (f", tensor={tensor}" if tensor > 1 else "")
            raise UsageError(
                f"run.mesh({what}) makes replicas of {size} workers, and the job has {target}: choose --nnodes and "
                f"--nproc-per-node so that their product is a multiple of {size}"
            )
        if shard_index is None:
            asked = os.environ.get(SHARD_INDEX_VARIABLE, "") or os.environ.get("RANK", "0")
            shard_index = int(asked) % size
        self.shape, self.shard_index = shape, shard_index
        self.groups = ReplicaGroups(shard_index, size, host, called, device)
        # Before `init_device_mesh`, which uses torch's default group. A mesh over a group that torch made
        # itself could not be connected anew.
        self.groups.open()
        names = DIMENSIONS if tensor > 1 else DIMENSIONS[:2]
        lengths = (1, shard, tensor) if tensor > 1 else (1, shard)
        self.mesh: DeviceMesh = init_device_mesh(device.type, lengths, mesh_dim_names=names)
        self._models: list[torch.nn.Module] = []
        self._kept_whole: list[Any] = []

    @property
    def size(self) -> int:
        """Workers of a replica."""
        return self.shape[0] * self.shape[1]

    def submesh(self, names: tuple[str, ...]) -> DeviceMesh:
        """The mesh of these dimensions.

        Raises:
            StateError: it has others.
        """
        if not set(names) <= set(self.mesh.mesh_dim_names or ()):
            raise StateError(
                f"the state lies on the dimensions {', '.join(names)}, which run.mesh() does not have"
            )
        return self.mesh if names == self.mesh.mesh_dim_names else self.mesh[names]

    def replicate(self, model: torch.nn.Module) -> None:
        """Gradients of this model are summed over the replicas by the run: within a replica they are summed too, and
        divided by nothing.

        Raises:
            UsageError: some of its parameters are neither sharded nor replicated over this run's mesh.
        """
        loose = [n for n, p in model.named_parameters() if not self._is_placed(p)]
        if loose:
            more = f" and {len(loose) - SHOWN} more" if len(loose) > SHOWN else ""
            raise UsageError(
                f"run.replicate(): nothing shards or replicates {', '.join(loose[:SHOWN])}{more}: call "
                "fully_shard(..., mesh=run.mesh(...)) on the whole model too, after its parts"
            )
        for module in model.modules():
            if isinstance(module, FSDPModule):
                if _offloads(module):
                    raise UsageError(
                        "run.replicate(): CPUOffloadPolicy is not supported: a replica's groups are those of its GPUs, "
                        "which cannot sum gradients that lie in host memory; shard over more workers instead"
                    )
                # Losses are sums and are divided once, by the weight of the global batch. FSDP2's default
                # would divide by the shards as well.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
                if self.mesh.device_type == "cpu":
                    use_pool(module, self.groups.pool)
                groups = _state_of(module)._fsdp_param_groups
                self._kept_whole += [
                    g for g in groups if not g._reshard_after_forward and g.reshard_after_backward
                ]
        self._models.append(model)

    def _is_placed(self, p: torch.Tensor) -> bool:
        """On the run's mesh, and on all of it along which workers have different data."""
        if not isinstance(p, DTensor):
            return False
        names = p.device_mesh.mesh_dim_names or ()
        return set(names) <= set(DIMENSIONS) and ("shard" in names or self.shape[0] == 1)

    def check(self, modules: Iterable[torch.nn.Module]) -> None:
        """Raises UsageError for a protected module that was not given to `replicate`."""
        known = {p for model in self._models for p in model.parameters()}
        for module in modules:
            for name, p in module.named_parameters():
                if p not in known:
                    raise UsageError(
                        f"{name} of a protected module is in no model that run.replicate() was given: with run.mesh() "
                        "call run.replicate(model) after fully_shard, for every model that is trained"
                    )

    def counts(self, p: torch.Tensor) -> bool:
        """Whether the gradient's norm includes this parameter here. Along the tensor dimension some parameters are whole
        on every worker; the first one counts those."""
        if not isinstance(p, DTensor) or self.shard_index % self.shape[1] == 0:
            return True
        # A parameter that is replicated along the tensor dimension has the same gradient on all its workers.
        # Counted on each, it would enter the norm several times, and clipping would depend on the layout.
        names = p.device_mesh.mesh_dim_names or ()
        return any(n == "tensor" and not q.is_replicate() for n, q in zip(names, p.placements, strict=True))

    def sum_over_shards(self, tensor: torch.Tensor) -> None:
        """Adds up, in place, what the workers along the dimension `shard` have: those with different micro-batches.

        Raises:
            CollectiveFailed: the generation broke.
        """
        if self.shape[0] > 1:
            dist.all_reduce(tensor, group=self.mesh.get_group("shard"))

    def accumulates(self, on: bool) -> None:
        """Another micro-batch follows the next backward pass, or none: models that keep their parameters whole after the
        forward pass (reshard_after_forward=False) keep them until then, and gather them once for all micro-batches."""
        for group in self._kept_whole:
            group.reshard_after_backward = not on

    def reset(self) -> None:
        """After a step that was left in the middle: the wrappers begin anew."""
        for model in self._models:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    _forget(module)
            roots = [m for m in model.modules() if isinstance(m, FSDPModule) and _is_root(m)]
            for root in roots:
                root.reset_iter_state()

    def close(self) -> None:
        """`main` is about to be run again, as another shard."""
        self.groups.shut()
        forget_meshes()


def _state_of(module: FSDPModule) -> Any:
    return module._get_fsdp_state()


def _offloads(module: FSDPModule) -> bool:
    params = (p for group in _state_of(module)._fsdp_param_groups for p in group.fsdp_params)
    return any(p.offload_to_cpu for p in params)


def _is_root(module: FSDPModule) -> bool:
    """False also for one that has never run: it has nothing to forget."""
    return _state_of(module)._is_root is True


def _forget(module: FSDPModule) -> None:
    """`reset_iter_state` keeps gradients that the backward pass has computed and not yet summed over the replica: the next
    step would add to them."""
    for group in _state_of(module)._fsdp_param_groups:
        for param in group.fsdp_params:
            # Private fields of PyTorch 2.13's FSDP2, which has no public way to drop them. A test computes a
            # step after a fault in the middle of a backward pass and compares it bit by bit.
            param.unsharded_accumulated_grad = None
            whole = getattr(param, "_unsharded_param", None)
            if whole is not None:
                whole.grad = None
