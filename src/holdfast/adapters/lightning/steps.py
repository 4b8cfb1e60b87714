"""Steps of the job as batches of Lightning's loops: one batch is one optimizer step, with all its micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
from lightning.pytorch.loops.optimization.closure import OutputResult
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.data import extract_batch_size

from holdfast.errors import UsageError

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from torch.optim import Optimizer

    from holdfast.adapters.lightning.progress import LoopProgress
    from holdfast.train.loss_scale import Scaler
    from holdfast.train.step import Step


class Done:
    """In the place of a step that was committed before this worker came: only what follows it is to be done."""


class Source(Protocol):
    """Where steps come from: the strategy."""

    progress: LoopProgress
    scaler: Scaler | None

    def next_step(self) -> Step | Done | None:
        """What is trained next; None: the job was asked to stop."""
        ...


class StepLoader:
    """Stands for the user's loader. Lightning sees as many batches in an epoch as there are optimizer steps in it."""

    def __init__(self, strategy: Source, loader: Any, workers: int, accumulate: int) -> None:
        self.dataset, self.collate, self.processes = loader.dataset, loader.collate_fn, loader.num_workers
        self.micro_batch = int(loader.batch_size)
        self.global_batch = self.micro_batch * accumulate * workers
        self._strategy = strategy
        samples = len(loader.dataset)
        per_worker = (
            samples // (self.micro_batch * workers)
            if loader.drop_last
            else -(-samples // (self.micro_batch * workers))
        )
        self._steps = -(-per_worker // accumulate)

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[Step | Done]:
        while (step := self._strategy.next_step()) is not None:
            yield step


class EpochLoop(_TrainingEpochLoop):
    """Schedulers are stepped in the commit, and not when the loop comes to them."""

    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        """Nothing: see `Optimization`."""

    def reset(self) -> None:
        """As Lightning's, which counts two things once too often after a restart in the middle of a batch: the step, since
        it does not know that the commit has counted it, and in its totals that batch, which it begins again."""
        counted = self._batches_that_stepped
        super().reset()
        self._batches_that_stepped = counted
        if self.restarting:
            # Lightning does this to the counts of an epoch alone. The totals are protected state, which a newcomer must
            # have as the others have it, and `val_check_interval` goes by them. Not before Lightning's own reset, which
            # tells from the totals where the state was taken.
            for progress in (
                self.batch_progress,
                self.scheduler_progress,
                self.automatic_optimization.optim_progress.optimizer.step,
            ):
                progress.total.reset_on_restart()

    def on_advance_end(self, data_fetcher: Any) -> None:
        """Validation may take longer than a step, and the others wait."""
        if self._should_check_val_fx(data_fetcher):
            strategy: Any = self.trainer.strategy
            with strategy.validating():
                super().on_advance_end(data_fetcher)
        else:
            super().on_advance_end(data_fetcher)

    def count_step(self) -> None:
        """Part of a step's commit: what Lightning does for schedulers after an optimizer step."""
        self._update_learning_rates("step", update_plateau_schedulers=False)
        if self._num_ready_batches_reached():
            self._update_learning_rates("epoch", update_plateau_schedulers=False)


class Optimization(_AutomaticOptimization):
    """One batch of the loop: the micro-batches of a step, the update, and the same again when a fault struck it."""

    def __init__(self, trainer: Trainer, strategy: Source) -> None:
        super().__init__(trainer)
        self._strategy = strategy

    def run(self, optimizer: Optimizer, batch_idx: int, kwargs: Any) -> dict[str, Any]:
        """Returns what the last micro-batch's `training_step` returned."""
        strategy, names = self._strategy, list(kwargs)
        step: Step | Done | None = kwargs[names[0]]
        output: OutputResult | None = None
        if isinstance(step, Done):
            return {}
        while step is not None:
            with step:
                for micro in step:
                    kwargs[names[0]] = micro
                    self.trainer._logger_connector.on_batch_start(micro)
                    output = self._training_step(kwargs)
                    self._backward(step, output, micro)
                call._call_callback_hooks(self.trainer, "on_before_optimizer_step", optimizer)
                call._call_lightning_module_hook(self.trainer, "on_before_optimizer_step", optimizer)
                step.apply(
                    optimizer, max_grad_norm=self.trainer.gradient_clip_val or None, scaler=strategy.scaler
                )
            # Lightning counts a batch when this returns. So it returns only for a step that counts: the loop
            # runs on with the same one until it does, and counters, schedules and logs never see an attempt.
            if step.committed or strategy.progress.has_fetched_step():
                return output.asdict() if output is not None else {}
            step = strategy.next_step()  # the same one again, or none: the job was asked to stop
            assert not isinstance(step, Done)
        # Lightning's own word for "no more batches": the epoch ends in order, with its hooks and its
        # checkpoint, as it does where the data ends.
        raise StopIteration

    def _backward(self, step: Step, output: Any, micro: Any) -> None:
        loss: torch.Tensor | None = output.closure_loss
        if loss is None:
            raise UsageError(
                "training_step() returned no loss: at level 2 a step has a loss of every micro-batch"
            )
        weigh = getattr(self.trainer.lightning_module, "holdfast_weight", extract_batch_size)
        # `training_step` returns a mean. Times its weight it is the sum that a step wants, so micro-batches
        # of different lengths count for as much as they hold.
        weight = float(weigh(micro))
        # Calls the hooks, and has fp16's scaler scale the loss.
        loss = self.trainer.precision_plugin.pre_backward(loss, self.trainer.lightning_module)
        step.backward(loss * weight, weight=weight)
        call._call_callback_hooks(self.trainer, "on_after_backward")
        call._call_lightning_module_hook(self.trainer, "on_after_backward")

    def count_step(self, step: Step) -> None:
        """Part of the step's commit, also where fp16 has skipped the update: Lightning's loops count those, too."""
        self.optim_progress.optimizer.step.increment_ready()
        self.optim_progress.optimizer.step.increment_completed()
        loop = self.trainer.fit_loop.epoch_loop
        assert isinstance(loop, EpochLoop)
        loop.count_step()
