"""Replicas of several workers: their mesh, their models, and what a fault leaves behind in the wrappers.

Torch's world is the replica. On its mesh the dimension `replicate` always has one member: gradients are summed over
the replicas by Holdfast's reduction, shard by shard, so replicas come and go without any wrapper knowing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from holdfast.errors import StateError, UsageError
from holdfast.tensors.dtensor_shards import forget_meshes, mesh_names
from holdfast.train import pipeline
from holdfast.train.fsdp_buffers import parameter_groups, use_pool
from holdfast.train.pipeline import Pipelines
from holdfast.train.placements import counted_here, why_not
from holdfast.train.reconnectable_group import ReplicaGroups

DIMENSIONS = ("replicate", "shard", "stage", "context", "tensor")
SHOWN = 5


class Sharding:
    """This worker's place in a replica of several.

    Attributes:
        shape: workers of a replica: those with other micro-batches, and for each of them those with the same.
        stages, context, alike: of the latter, those with other layers, those with other parts of each sample, and those
            that compute the very same.
        shard_index: which of them this one is; the tensor dimension is the innermost.
        mesh: what the script gets.
        groups: the replica's process groups.
        pipelines: the schedules of its stages.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        position: int,
        device: torch.device,
        host: str,
        target: int,
        called: Callable[[bool], None],
        context: int = 1,
        stages: int = 1,
    ) -> None:
        """shape: shard degree, and tensor degree. position: this worker's number among all; modulo the workers of a replica it is
        the shard index. target: workers of the job at full strength. called: as in ReplicaGroups. context: workers that share each sample. stages: of a pipeline.

        Raises:
            UsageError: a mesh that does not fit the job.
        """
        shard, tensor = shape
        size = shard * stages * context * tensor
        given = {"shard": shard, "tensor": tensor} | ({"context": context} if context != 1 else {})
        given |= {"stage": stages} if stages != 1 else {}
        if min(given.values()) < 1:
            what = ", ".join(f"{name}={degree}" for name, degree in given.items())
            raise UsageError(f"run.mesh({what}): {'both' if len(given) == 2 else 'all'} must be at least 1")
        # The number of workers at full strength, not of those that are there: a job may train with fewer
        # replicas for a while, but what is left over at full strength would never compute.
        if target % size:
            what = ", ".join(f"{n}={d}" for n, d in given.items() if n == "shard" or d > 1)
            raise UsageError(
                f"run.mesh({what}) makes replicas of {size} workers, but the job has {target}: choose --nnodes and "
                f"--nproc-per-node so that their product is a multiple of {size}"
            )
        if stages > 1 and device.type != "cpu":
            raise UsageError(
                f"run.mesh(stage={stages}): pipelines are supported only with gloo, but {device} would use NCCL, "
                "whose point-to-point messages block differently; shard the model over shard=, tensor= or context= "
                "instead"
            )
        if stages > 1 and not pipeline.known_to_torch():
            raise UsageError(
                f"run.mesh(stage={stages}): pipelines need PyTorch 2.13 or newer, but this is {torch.__version__}"
            )
        self.shape, self.shard_index = (shard, stages * context * tensor), position % size
        self.degrees, self.context, self.alike = (shard, stages, context, tensor), context, tensor
        self.stages = stages
        self.groups = ReplicaGroups(self.shard_index, size, host, called, device, stages)
        # Before `init_device_mesh`, which uses torch's default group. A mesh over a group that torch made
        # itself could not be connected anew.
        self.groups.open()
        lengths = dict(zip(DIMENSIONS, (1, *self.degrees), strict=True))
        names = tuple(n for n, d in lengths.items() if d > 1 or n in DIMENSIONS[:2])
        self.mesh: DeviceMesh = init_device_mesh(
            device.type, tuple(lengths[n] for n in names), mesh_dim_names=names
        )
        self._data = self.mesh["shard"]
        if context > 1:
            # Made here, with the others: its group is connected in the same order on all workers.
            self._data = self.mesh["shard", "context"]._flatten("data")
        self.pipelines = Pipelines()
        self._models: list[torch.nn.Module] = []
        self._kept_whole: list[Any] = []

    @property
    def size(self) -> int:
        """Workers of a replica."""
        return self.shape[0] * self.shape[1]

    @property
    def own_stage(self) -> list[int]:
        """The workers that have the same layers as this one: all of the replica, unless it is a pipeline."""
        within = self.context * self.alike
        stage = self.shard_index // within % self.stages
        return [rank for rank in range(self.size) if rank // within % self.stages == stage]

    def named(self, objects: Mapping[str, Any]) -> dict[str, Any]:
        """The protected objects of this worker by names of their own: each stage of a pipeline has other layers."""
        # Stages number their layers and their optimizer's moments alike. Under one name a checkpoint would take
        # one stage's for another's wherever the shapes are the same.
        if self.stages == 1:
            return dict(objects)
        stage = self.own_stage[0] // (self.context * self.alike)
        return {f"stage{stage}_{name}": thing for name, thing in objects.items()}

    def submesh(self, names: tuple[str, ...]) -> DeviceMesh:
        """The mesh of these dimensions: one that a parameter lies on, else a part of the run's.

        Raises:
            StateError: there is none, or more than one.
        """
        params = (p for model in self._models for p in model.parameters() if isinstance(p, DTensor))
        found = list(dict.fromkeys(p.device_mesh for p in params if mesh_names(p.device_mesh) == names))
        if len(found) == 1:
            return found[0]
        if found or not set(names) <= set(self.mesh.mesh_dim_names or ()):
            what = "several meshes have" if found else "neither run.mesh() nor a parameter's mesh has"
            raise StateError(f"the state is placed on the mesh dimensions {', '.join(names)}, which {what}")
        return self.mesh if names == self.mesh.mesh_dim_names else self.mesh[names]

    def replicate(self, model: torch.nn.Module) -> None:
        """Gradients of this model are summed over the replicas by the run: within a replica they are summed too, and
        divided by nothing.

        Raises:
            UsageError: the gradients of some of its parameters would not be complete within a replica.
        """
        named = list(model.named_parameters())
        loose = [n for n, p in named if not isinstance(p, DTensor) and len(self.own_stage) > 1]
        if loose:
            more = f" and {len(loose) - SHOWN} more" if len(loose) > SHOWN else ""
            raise UsageError(
                f"run.replicate(): {', '.join(loose[:SHOWN])}{more} are neither sharded nor replicated: after the "
                "parts of the model, call fully_shard(..., mesh=run.mesh(...)) on the whole model, too"
            )
        for name, p in named:
            if reason := why_not(p, workers=self.own_stage, alike=self.alike):
                raise UsageError(f"run.replicate(): {name} {reason}")
        for module in model.modules():
            if isinstance(module, FSDPModule):
                if not hasattr(module, "reset_iter_state"):
                    raise UsageError(
                        "run.replicate(): after a fault FSDP2 has to restart a step (reset_iter_state), which "
                        f"PyTorch {torch.__version__} cannot do: install PyTorch 2.13 or newer"
                    )
                if _offloads(module):
                    raise UsageError(
                        "run.replicate(): CPUOffloadPolicy is not supported: the process groups of a replica are "
                        "those of its GPUs, which cannot sum gradients in host memory; shard over more workers "
                        "instead"
                    )
                # Losses are sums and are divided once, by the weight of the global batch. FSDP2's default
                # would divide by the shards as well.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
                if self.mesh.device_type == "cpu":
                    use_pool(module, self.groups.pool)
                groups = parameter_groups(module)
                self._kept_whole += [
                    g for g in groups if not g._reshard_after_forward and g.reshard_after_backward
                ]
        self._models.append(model)

    def check(self, modules: Iterable[torch.nn.Module]) -> None:
        """Raises UsageError for a protected module that was not given to `replicate`."""
        known = {p for model in self._models for p in model.parameters()}
        for module in modules:
            for name, p in module.named_parameters():
                if p not in known:
                    raise UsageError(
                        f"{name} of a protected module does not belong to a model that was passed to "
                        "run.replicate(): with run.mesh(), call run.replicate(model) after fully_shard for every "
                        "model that is trained"
                    )

    def counts(self, p: torch.Tensor) -> bool:
        """Whether the gradient's norm includes this parameter here. Some are whole on several workers; the first one counts
        those."""
        # Counted on each, it would enter the norm several times, and clipping would depend on the layout.
        return counted_here(p, self.own_stage[0])

    def sum_over_shards(self, tensor: torch.Tensor) -> None:
        """Adds up, in place, what the workers have that compute different gradients.

        Raises:
            CollectiveFailed: the generation broke.
        """
        if self._data.size() > 1:
            dist.all_reduce(tensor, group=self._data.get_group())

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
    params = (p for group in parameter_groups(module) for p in group.fsdp_params)
    return any(p.offload_to_cpu for p in params)


def _is_root(module: FSDPModule) -> bool:
    """False also for one that has never run: it has nothing to forget."""
    return _state_of(module)._is_root is True


def _forget(module: FSDPModule) -> None:
    """`reset_iter_state` keeps gradients that the backward pass has computed and not yet summed over the replica: the next
    step would add to them."""
    for group in parameter_groups(module):
        for param in group.fsdp_params:
            # Private fields of PyTorch 2.13's FSDP2, which has no public way to drop them. A test computes a
            # step after a fault in the middle of a backward pass and compares it bit by bit.
            param.unsharded_accumulated_grad = None
            whole = getattr(param, "_unsharded_param", None)
            if whole is not None:
                whole.grad = None
