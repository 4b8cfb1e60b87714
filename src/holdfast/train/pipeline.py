"""A micro-batch that the stages of a pipeline compute together, by a schedule of torch.distributed.pipelining.

A schedule agrees with its peers on shapes when it runs first, by messages. A newcomer would wait for them, and those who
trained before it would not send them again. So stages say their shapes here, and each is made ready alone, by itself.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from holdfast.errors import UsageError


def known_to_torch() -> bool:
    """Whether this PyTorch's stages are those that `_prepare` was written for, PyTorch 2.13's. Imported here: it takes half a
    second, and few scripts have stages."""
    from torch.distributed.pipelining import _utils

    return hasattr(_utils, "InferenceMode")


class Pipelines:
    """The schedules of a script, and which of them are ready for another micro-batch."""

    def __init__(self) -> None:
        self._ready: weakref.WeakSet[Any] = weakref.WeakSet()

    def run(self, schedule: Any, args: tuple[Any, ...], target: Any, more: dict[str, Any]) -> float:
        """Forward and backward passes of one micro-batch, with the other stages. Returns its loss: 0 but on the last one.

        Raises:
            UsageError: the schedule cannot be taken up again after a fault.
            CollectiveFailed: the step is to be left.
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
