"""An Accelerator whose script is a member of a job: it prepares and computes, the run decides what counts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import accelerate
import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, InitProcessGroupKwargs

from holdfast.adapters import world
from holdfast.adapters.accelerate import backend
from holdfast.adapters.accelerate.backend import own_order
from holdfast.adapters.buffers import Buffers, LoopAdvice
from holdfast.adapters.versions import ACCELERATE
from holdfast.data.mapstyle import shuffled
from holdfast.errors import UsageError

if TYPE_CHECKING:
    from holdfast.train.buffer_rules import BufferRule
    from holdfast.train.run import Run
    from holdfast.train.step import Step

LOOP = "loop with `for step in accelerator.steps(loader, until=N)` (docs/accelerate.md)"
REFUSED = {
    "accumulate": f"a step contains all its micro-batches, and all of them are repeated after a fault; {LOOP}",
    "clip_grad_norm_": "gradients are summed when the step is applied; use step.apply(optimizer, max_grad_norm=...)",
    "clip_grad_value_": "gradients are summed when the step is applied; use step.apply(optimizer, max_grad_norm=...)",
    "unscale_gradients": "step.apply() already divides by the loss scale of fp16; remove the call",
    "no_sync": f"the gradients of a step are summed once, by step.apply(); {LOOP}",
    "join_uneven_inputs": f"Holdfast assigns every sample to exactly one worker; {LOOP}",
    "skip_first_batches": f"a job continues at its next sample without this call; {LOOP}",
    "save_state": "the job saves its state itself; remove the call, and save a trained model with save_model",
    "load_state": (
        "a job resumes from its newest state without this call; to start from the weights of another job, load them "
        "before prepare()"
    ),
    "init_trackers": (
        "ranks change during a job, so another worker would begin a second record; pass values to "
        "accelerator.run.log(...)"
    ),
}
"""Methods of Accelerate's that cannot work at level 2: the reason, and what to write."""
SPLITTING = ("deepspeed_plugin", "fsdp_plugin", "megatron_lm_plugin", "torch_tp_plugin", "parallelism_config")


# A loop of the script's own over a prepared loader cannot be a member of a job. A newcomer runs the script from its top and
# enters at any step. What the loop did since its first batch is in local variables, and what stands after
# `optimizer.step()` was done by some of the survivors and not by others: no commit knows. So the loop is over steps.
class Accelerator(accelerate.Accelerator):  # type: ignore[misc] # it has no types
    """Accelerate's own, for one worker of a job: devices, mixed precision and `prepare` are as they were::

        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        for step in accelerator.steps(loader, until=1000):
            with step:
                for batch in step:
                    accelerator.backward(model(**batch).loss)
                step.apply(optimizer, max_grad_norm=1.0, scheduler=scheduler)

    Accelerate sees a world of one process: `num_processes` is 1, `gather` returns what it got, and an evaluation on each worker
    is one of all samples. From the first step on `is_main_process` is true on rank 0 alone, which may be another
    worker after a fault.
    """

    def __init__(self, **options: Any) -> None:
        """
        Args:
            options: of `accelerate.Accelerator`. `gradient_accumulation_steps` is the number of micro-batches of a step for
                each worker of the full job.

        Raises:
            UsageError: what splits a model over processes, or a version of Accelerate that is not supported.
        """
        ACCELERATE.check(accelerate.__version__, "holdfast.accelerate")
        for name in SPLITTING:
            if options.get(name) is not None:
                raise UsageError(
                    f"Accelerator({name}=...): with this Accelerator a replica is one process; remove the argument, "
                    "or shard with holdfast.start(main) and run.mesh() (docs/sharded.md)"
                )
        handlers = options.get("kwargs_handlers") or ()
        of_ddp = DistributedDataParallelKwargs | InitProcessGroupKwargs
        backend.ignore([type(handler).__name__ for handler in handlers if isinstance(handler, of_ddp)])
        self._holdfast_run = world.own_run()
        self._holdfast_step: Step | None = None
        super().__init__(**options)
        if self.distributed_type != DistributedType.NO or os.environ.get("ACCELERATE_USE_FSDP") == "true":
            raise UsageError(
                f"Accelerator: Accelerate is configured for {self.distributed_type.value}, but with this Accelerator "
                "a replica is one process; start the script with `holdfast run`, not with `accelerate launch`"
            )
        if self.split_batches:
            raise UsageError(
                "Accelerator(split_batches=True): batch_size is already the size of a micro-batch; remove the argument"
            )

    @property
    def run(self) -> Run:
        """The run of this process: for `run.log`, `run.on_commit`, `run.constant` and `run.relaxed_watchdog`."""
        return self._holdfast_run

    def steps(
        self,
        loader: Any,
        *,
        until: int,
        seed: int = 0,
        reduction: Literal["fast", "exact"] = "fast",
        buffers: Mapping[str, BufferRule] | None = None,
    ) -> Iterator[Step]:
        """Joins the job and yields its steps, as `Run.steps` does. What was prepared and registered is protected.

        Args:
            loader: a DataLoader that shuffles a map-style dataset, prepared or not. Its dataset, batch size, `collate_fn` and
                `num_workers` count; the order of samples is the job's.
            until: number of steps, each of `batch_size * gradient_accumulation_steps` samples for each worker of the full
                job. Fewer workers compute the same steps.
            seed: of the order of samples and of the randomness within a step.
            reduction: see `Run.steps`.
            buffers: rules for buffers that forward passes change, by their paths or patterns of these:
                `{"model.*.loads": "sum"}`. See `Run.buffers`; torch's norms have their rule without being named.

        Raises:
            UsageError: nothing is prepared, a loader whose samples cannot be dealt, or a rule that there is not.
        """
        if not self._models:
            raise UsageError(
                "accelerator.steps(): this Accelerator does not have a model yet; call prepare() first"
            )
        micro_batch = _micro_batch(loader)
        rules = Buffers(buffers, LoopAdvice())
        # Here and not in the constructor: a script makes an Accelerator to print or to load data, too, and
        # only training joins the job.
        run = self._holdfast_run = world.run_for_training()
        models = _named("model", [self.unwrap_model(model) for model in self._models])
        run.protect(
            **models,
            **_named("optimizer", [wrapper.optimizer for wrapper in self._optimizers]),
            **_named("scheduler", self._schedulers),
            **_named("registered", self._custom_objects),
            **({} if self.scaler is None else {"scaler": self.scaler}),
        )
        for wrapper in self._optimizers:
            wrapper.scaler = None  # it would decide by this worker's gradients; the step does by those of all
        rules.declare(run)
        data = shuffled(loader.dataset, workers=loader.num_workers, collate=loader.collate_fn)
        try:
            for step in run.steps(
                data,
                global_batch=micro_batch * self.gradient_accumulation_steps * run.full_world_size,
                micro_batch=micro_batch,
                until=until,
                seed=seed,
                reduction=reduction,
            ):
                self._holdfast_step = step
                step.scaler = self.scaler
                self._follow_rank()
                yield step
        finally:
            self._holdfast_step = None

    def backward(self, loss: torch.Tensor, weight: float = 1.0) -> None:
        """The backward pass of a micro-batch of the step.

        Args:
            loss: the mean over the micro-batch, a scalar.
            weight: what that mean is over, for example tokens; left out, all micro-batches weigh the same.

        Raises:
            UsageError: outside of a step.
        """
        if self._holdfast_step is None:
            raise UsageError(
                "accelerator.backward() was called outside of a step, where it could not be repeated after a fault; "
                f"{LOOP}"
            )
        total = loss * weight
        self._holdfast_step.backward(
            total if self.scaler is None else self.scaler.scale(total), weight=weight
        )

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the newest step changed nothing, because fp16's gradient overflowed."""
        return self._holdfast_step is not None and self._holdfast_step.skipped

    def _follow_rank(self) -> None:
        # Both have a copy: what asks Accelerate's state, such as `on_main_process` and `print`, hears the same.
        for state in (PartialState(), self.state):
            state.process_index, state.local_process_index = self._holdfast_run.rank, world.slot()


def _refusing(name: str, reason: str) -> Any:
    def refuse(self: Accelerator, *args: Any, **options: Any) -> Any:
        raise UsageError(f"accelerator.{name}(): {reason}")

    refuse.__name__, refuse.__doc__ = name, f"Refused at level 2: {reason}."
    return refuse


for _name, _reason in REFUSED.items():
    setattr(Accelerator, _name, _refusing(_name, _reason))


def _named(kind: str, objects: list[Any]) -> dict[str, Any]:
    return {f"{kind}{i or ''}": one for i, one in enumerate(objects)}


def _micro_batch(loader: Any) -> int:
    if (own := own_order(loader)) is not None:
        raise UsageError(
            f"accelerator.steps(): the loader has {own}, but Holdfast determines the order of samples; pass a "
            "DataLoader(dataset, batch_size=..., shuffle=True) with a map-style dataset"
        )
    return int(loader.batch_sampler.batch_size)
