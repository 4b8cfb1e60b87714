"""Replicas of several workers: their mesh, their models, and what a fault leaves behind in the wrappers.

Torch's world is the replica. On its mesh the dimension `replicate` always has one member: gradients are summed over
the replicas by Holdfast's reduction, shard by shard, so replicas come and go without any wrapper knowing.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor import DTensor

from holdfast.errors import StateError, UsageError
from holdfast.tensors.dtensor_shards import forget_meshes, mesh_names
from holdfast.train.gloo_group import BufferPool
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
        if stages > 1 and not known_to_torch():
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
            CollectiveFault: the generation broke.
        """
        if self._data.size() > 1:
            dist.all_reduce(tensor, group=self._data.get_group())

    def accumulates(self, on: bool) -> None:
        """Tells models whether another micro-batch follows the next backward pass: those that keep their parameters whole after
        the forward pass (reshard_after_forward=False) keep them until the last one, and gather them once for all
        micro-batches."""
        for group in self._kept_whole:
            group.reshard_after_backward = not on

    def reset(self) -> None:
        """Resets the wrappers after a step that was left in the middle."""
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


def known_to_torch() -> bool:
    """Whether this PyTorch's stages are those that `_prepare` was written for, PyTorch 2.13's. Imported here: it takes half a
    second, and few scripts have stages."""
    from torch.distributed.pipelining import _utils

    return hasattr(_utils, "InferenceMode")


class Pipelines:
    """The pipeline schedules of a script, and which of them are ready for another micro-batch.

    The stages of a pipeline compute a micro-batch together, by a schedule of torch.distributed.pipelining. When a schedule runs
    for the first time, its stages exchange messages to agree on shapes. A newcomer would wait for messages that the others have
    sent long ago. So stages record their shapes here, and each is prepared without messages.
    """

    def __init__(self) -> None:
        self._ready: weakref.WeakSet[Any] = weakref.WeakSet()

    def run(self, schedule: Any, args: tuple[Any, ...], target: Any, more: dict[str, Any]) -> float:
        """Forward and backward passes of one micro-batch, with the other stages. Returns its loss: 0 but on the last one.

        Raises:
            UsageError: the schedule cannot be taken up again after a fault.
            CollectiveFault: the step is to be left.
        """
        if schedule not in self._ready:
            _check(schedule)
            _prepare(schedule)
        # Not ready while it runs. A fault that cuts it off leaves losses and activations of this attempt in it, and a
        # message that never came may still be written into the memory that waits for it.
        self._ready.discard(schedule)
        stage = schedule._stage
        losses: list[torch.Tensor] = []
        schedule.step(
            *(args if stage.is_first else ()),
            target=target if stage.is_last else None,
            losses=losses if stage.is_last else None,
            return_outputs=False,
            **more,
        )
        self._ready.add(schedule)
        # Added up in the order of their numbers, so a repeated step has the same bits.
        return float(torch.stack(losses).sum().detach()) if losses else 0.0


def _check(schedule: Any) -> None:
    """
    Raises:
        UsageError: see `Pipelines.run`.
    """
    # Imported where there is a pipeline: it takes a while, and other workers have no use for it.
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining._utils import InferenceMode
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle

    if not isinstance(schedule, PipelineScheduleSingle) or not isinstance(schedule._stage, PipelineStage):
        raise UsageError(
            f"step.pipeline(): {type(schedule).__name__} is not supported; use a schedule with one PipelineStage on "
            "each worker, Schedule1F1B or ScheduleGPipe"
        )
    stage = schedule._stage
    if schedule._loss_fn is None or schedule.scale_grads:
        raise UsageError(
            "step.pipeline(): create the schedule with a loss_fn that sums, and with scale_grads=False; gradients "
            "are divided once, by the weight of the global batch"
        )
    if InferenceMode.needs_dynamic(stage._user_meta, True):
        raise UsageError(
            f"step.pipeline(): stage {stage.stage_index} does not specify its shapes, which a worker that joins "
            "after a fault could not find out: pass input_args and output_args (for DTensors also the gradients) of "
            "one part of a micro-batch to PipelineStage"
        )
    # Torch makes room for a gradient where the example asks for one, and computes without it where it does not.
    ends = [
        *_floating(stage._user_meta.inputs, not stage.is_first),
        *_floating(stage._user_meta.outputs, not stage.is_last),
    ]
    if not all(meta.requires_grad for meta in ends):
        raise UsageError(
            "step.pipeline(): according to its input_args or output_args, the tensors that stage "
            f"{stage.stage_index} exchanges with the others do not require a gradient: pass examples with "
            "requires_grad=True"
        )


def _floating(metas: Any, exchanged: bool) -> list[Any]:
    return [meta for meta in metas or () if meta.dtype.is_floating_point] if exchanged else []


def _prepare(schedule: Any) -> None:
    """What a schedule does at its first step, without its messages; and what a step that was cut off has left is gone."""
    from torch.distributed.pipelining._utils import InferenceMode

    stage = schedule._stage
    # Private fields of PyTorch 2.13: a schedule has no public way to begin anew. A test strikes a worker in the middle
    # of a schedule, and compares every bit with an undisturbed run.
    schedule._internal_losses.clear()
    for left in (
        stage.fwd_cache,
        stage.bwd_cache,
        stage.backward_state,
        stage.dw_runner,
        stage.output_chunks,
    ):
        left.clear()
    # New memory for what comes: gloo may hold the old.
    stage.args_recv_info.clear()
    stage.grad_recv_info.clear()
    stage.has_backward, stage._inference_mode = True, InferenceMode.STATIC
    stage._prepare_forward_infra(schedule._n_microbatches, (), {}, has_backward=True)
    stage._prepare_backward_infra(schedule._n_microbatches)
    schedule._stage_forward_initialized = schedule._stage_backward_initialized = True


class _Pooled:
    """Memory for FSDP2's own collectives that is used again: FSDP2 takes new memory for what it gathers and scatters in every layer of
    every step, which on the CPU the kernel has to clear each time."""

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """As FSDP2 asks for it."""
        # On a GPU torch's caching allocator already does this, and knows about streams, which this pool does
        # not.
        if device.type != "cpu":
            return torch.empty(*size, dtype=dtype, device=device)
        return self._pool.take(math.prod(map(int, size)), dtype).view(*size)


class PooledAllGather(_Pooled, DefaultAllGather):
    """What it gathers comes from the pool."""


class PooledReduceScatter(_Pooled, DefaultReduceScatter):
    """What it scatters comes from the pool."""


def parameter_groups(module: FSDPModule) -> list[Any]:
    """Those of the module's parameters that are gathered and scattered together: none, one, or several where torch knows
    modules with parameters on several meshes."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def use_pool(module: FSDPModule, pool: BufferPool) -> None:
    """This module's collectives take their memory from here, unless the script has said where from."""
    groups = parameter_groups(module)
    if len(groups) != 1:
        return  # FSDP2 takes no such wish where a module has parameters on several meshes
    # The exact class: a script that has set its own keeps it.
    if type(groups[0]._all_gather_comm) is DefaultAllGather:
        module.set_custom_all_gather(PooledAllGather(pool))
    if type(groups[0]._reduce_scatter_comm) is DefaultReduceScatter:
        module.set_custom_reduce_scatter(PooledReduceScatter(pool))
