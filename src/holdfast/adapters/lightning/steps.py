"""Steps of the job as batches of Lightning's loops: a micro-batch is a batch, and the step's commit is the update after the
last one."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from lightning.pytorch.loops.optimization.automatic import Closure, _AutomaticOptimization
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection

from holdfast.adapters.lightning.refusals import refuse_monitors
from holdfast.errors import JobStopped, UsageError

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from torch.optim import Optimizer

    from holdfast.adapters.lightning.progress import LoopProgress, OptimizerSettings
    from holdfast.adapters.lightning.samples import EpochPlan, LoopPosition
    from holdfast.train.step import Scaler, Step

Compute = Callable[[Any, int], None]
"""Forward and backward pass of a micro-batch, with the number of its batch in the epoch."""


class StepSource(Protocol):
    """Where steps come from: the strategy."""

    progress: LoopProgress
    settings: OptimizerSettings
    scaler: Scaler | None
    plan: EpochPlan
    window: Window
    weigh: Callable[[Any], float] | None
    """What a micro-batch counts; None: batches count alike, as Lightning has it."""

    def batches_of_an_epoch(self, loader: Any) -> int:
        """That each worker of a full job takes, without a limit."""
        ...

    def next_step(self) -> Step | None:
        """What is trained next; None: no step is left, or the job was asked to stop."""
        ...

    def micro_batches(self) -> range:
        """The numbers of those micro-batches of a step that this worker computes now."""
        ...

    def last_batch(self) -> Any:
        """The batch after which the newest commit came."""
        ...

    def relaxed_watchdog(self) -> AbstractContextManager[None]:
        """For what the loops do between two steps and may take long."""
        ...


def moved(trainer: Trainer, batch: Any) -> Any:
    """The batch after the hooks through which Lightning's loop sends it, on the device."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
    return call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)


class Window:
    """The step that is being computed, from the first batch of an update to the last one.

    A fault may strike at any of its batches. The step is then computed again from its first micro-batch, maybe with another
    share of them. But the hooks of a batch come once, and so do its logs: those of the batches before this one have come.

    Attributes:
        step: None between two steps.
        slot: of the micro-batch that was taken last.
    """

    def __init__(self, source: StepSource, compute_again: Compute) -> None:
        self._source, self._compute_again = source, compute_again
        self.step: Step | None = None
        self.slot: LoopPosition | None = None
        self._number = -1
        self._batches: Iterator[Any] = iter(())
        self._numbers: list[int] = []
        self._taken = self._there = self._real = 0

    def next_batch(self) -> Any:
        """The micro-batch with which the next batch of Lightning's loop begins.

        Raises:
            JobStopped: there is no further step.
        """
        self._number += 1
        return self.batch_again()

    def batch_again(self) -> Any:
        """The same, of a step that is computed again."""
        found: list[Any] = []
        while not found:
            if self.step is None:
                self._open()
            if self.step is not None and not self.attempt(lambda: found.append(self._next_there())):
                self._must_be_open()
        return found[0]

    def rest(self) -> Iterator[Any]:
        """The micro-batches that the batch has beside its first one: none at full strength. With fewer workers each computes
        more, spread over the batches of the update."""
        assert self.slot is not None
        batches = self.slot.batches
        wanted = (self._number + 1) * self._real // batches
        while self._there < wanted:
            yield self._next_there()
        if self._number + 1 == batches:
            # To the end: vacant ones take part in the step, too, and under `--replay` one may come twice.
            while (batch := self._next()) is not None:
                yield batch

    def attempt(self, part: Callable[[], object]) -> bool:
        """Does a part of the step. False: a fault struck it; the step was decided, and left."""
        step = self.step
        assert step is not None
        try:
            part()
        except BaseException as error:
            self.step = None
            # Before this worker's state can be fetched: what hooks set the optimizer to is no part of it yet.
            self._source.settings.put_back()
            if not step.__exit__(type(error), error, error.__traceback__):
                raise
            return False
        return True

    def leave(self) -> None:
        """The step was committed."""
        step, self.step, self._number = self.step, None, -1
        if step is not None:
            step.__exit__(None, None, None)

    def _open(self) -> None:
        """Begins the next step, and computes of it what the batches before this one have had."""
        step = self.step = self._source.next_step()
        if step is None:
            raise JobStopped("the job was asked to stop before the training's end")
        if not (self.attempt(partial(self._begin, step)) and self.attempt(self._catch_up)):
            self._must_be_open()

    def _begin(self, step: Step) -> None:
        step.__enter__()
        self._source.settings.resume()
        self._batches = iter(step)
        self._numbers = list(self._source.micro_batches())
        slots = [self._source.plan.slot(step.index, number) for number in self._numbers]
        self._real = sum(not slot.is_vacant for slot in slots)
        self._taken = self._there = 0

    def _catch_up(self) -> None:
        number = self._number
        assert self.step is not None
        first = self._source.plan.slot(self.step.index, 0).batch
        try:
            for self._number in range(number):
                self._compute_again(self._next_there(), first + self._number)
                for batch in self.rest():
                    self._compute_again(batch, first + self._number)
        finally:
            self._number = number

    def _must_be_open(self) -> None:
        # Nobody commits a step that this worker was not prepared for. If the others went on from another state, its hooks
        # stand where no batch is.
        if self._source.progress.has_fetched_step():
            raise RuntimeError(
                "the other workers committed a step that this worker has not computed: it ends, and another one "
                "replaces it"
            )

    def _next_there(self) -> Any:
        batch = self._next()
        assert batch is not None, "each worker has a micro-batch for every batch of an update"
        return batch

    def _next(self) -> Any | None:
        """The next micro-batch with samples; None: this worker has computed its share."""
        step = self.step
        assert step is not None
        for batch in self._batches:
            if self._taken < len(self._numbers):
                self.slot = self._source.plan.slot(step.index, self._numbers[self._taken])
                self._taken += 1
            if batch is not None:
                self._there += 1
                return batch
            assert self.slot is not None
            self.add_nothing()
        return None

    def add_nothing(self) -> None:
        """For a batch without samples, or without a loss: where batches count alike it counts as one of loss 0."""
        step, slot = self.step, self.slot
        assert step is not None
        assert slot is not None
        share = slot.share if self._source.weigh is None else 0.0
        step.backward(torch.zeros((), requires_grad=True), weight=share)


class StepLoader:
    """Stands for the user's loader, and has as many batches.

    Attributes:
        dataset, sampler, batch_size: the loader's own.
    """

    def __init__(self, source: StepSource, loader: Any) -> None:
        self.dataset, self.sampler, self.batch_size = loader.dataset, loader.sampler, int(loader.batch_size)
        self._source = source
        self._batches = source.batches_of_an_epoch(loader)

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self._source.window.next_batch()


class EpochLoop(_TrainingEpochLoop):
    """Schedulers are stepped in the commit, and not when the loop comes to them."""

    def __init__(self, trainer: Trainer, source: StepSource, min_steps: int | None, max_steps: int) -> None:
        super().__init__(trainer, min_steps=min_steps, max_steps=max_steps)
        self._source = source
        self._known_results = 0

    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        """Those that go by a metric, alone: they come after the validation, as the hooks do. See `count_step`."""
        if update_plateau_schedulers:
            super().update_lr_schedulers(interval, update_plateau_schedulers)

    def reset(self) -> None:
        """As Lightning's, which counts two things once too often after a restart in the middle of a batch: the step, since
        it does not know that the commit has counted it, and in its totals that batch, which it begins again."""
        counted = self._batches_that_stepped
        with warnings.catch_warnings():
            # It warns of loaders that begin anew; the job's goes on at the next sample.
            warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before")
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
                self.automatic_optimization.optim_progress.optimizer.zero_grad,
            ):
                progress.total.reset_on_restart()

    def advance(self, data_fetcher: Any) -> None:
        """A batch; of a newcomer's first one only what follows the commit that it comes after."""
        if self._source.progress.outstanding:
            self._source.progress.outstanding = False
            self._follow_commit(data_fetcher)
        else:
            super().advance(data_fetcher)

    def _follow_commit(self, data_fetcher: Any) -> None:
        """What `advance` does after the update, for a batch whose update other workers have made."""
        if self.restarting and self._should_check_val_fx(data_fetcher):
            self.val_loop.increment_progress_to_evaluation_end()
        self.val_loop.restarting = False
        trainer, batch_idx = self.trainer, self.batch_idx + 1
        data_fetcher.fetched += 1
        data_fetcher.done = data_fetcher.fetched >= (data_fetcher.length or 0)
        batch = moved(trainer, self._source.last_batch())
        self.batch_progress.is_last_batch = data_fetcher.done
        self.batch_progress.increment_ready()
        trainer._logger_connector.on_batch_start(batch)
        self.batch_progress.increment_started()
        self.batch_progress.increment_processed()
        outputs = self._source.progress.outputs()
        call._call_callback_hooks(trainer, "on_train_batch_end", outputs, batch, batch_idx)
        call._call_lightning_module_hook(trainer, "on_train_batch_end", outputs, batch, batch_idx)
        trainer._logger_connector.on_batch_end()
        self.batch_progress.increment_completed()
        trainer._logger_connector.update_train_step_metrics()

    def on_advance_end(self, data_fetcher: Any) -> None:
        """Validation may take longer than a step, and the others wait."""
        # Its own flag alone, which Lightning takes back at the end of the epoch: by then its schedulers that go by a metric
        # would have missed an update, which the other workers have made.
        self.trainer.fit_loop._restarting = False
        if self._source.plan.workers > 1 and len(self._results) != self._known_results:
            self._known_results = len(self._results)
            refuse_monitors(self.trainer, {result.meta.name for result in self._results.values()})
        long = self._source.window.step is None and self._should_check_val_fx(data_fetcher)
        with self._source.relaxed_watchdog() if long else nullcontext():
            super().on_advance_end(data_fetcher)

    def count_step(self) -> None:
        """Part of a step's commit: what Lightning does for schedulers after an optimizer step."""
        self._update_learning_rates("step", update_plateau_schedulers=False)
        if self._num_ready_batches_reached():
            self._update_learning_rates("epoch", update_plateau_schedulers=False)

    @contextmanager
    def unlogged(self) -> Iterator[None]:
        """For what is computed again: `self.log` was called for it, and a mean would count it twice."""
        results, self._results = self._results, _ResultCollection(training=True)
        try:
            yield
        finally:
            self._results = results


class Optimization(_AutomaticOptimization):
    """A batch of the loop: its micro-batches, after the last batch of an update that, and the same again when a fault struck."""

    def __init__(self, trainer: Trainer, source: StepSource) -> None:
        super().__init__(trainer)
        self._source = source
        self._output: Any = None
        self._logged = False
        self._zeroed = False

    @property
    def _loop(self) -> EpochLoop:
        loop = self.trainer.fit_loop.epoch_loop
        assert isinstance(loop, EpochLoop)
        return loop

    def run(self, optimizer: Optimizer, batch_idx: int, kwargs: Any) -> dict[str, Any]:
        """Returns what `training_step` returned for the batch; at less than full strength for the last of its micro-batches."""
        window, batch = self._source.window, next(iter(kwargs.values()))
        self._logged = self._zeroed = False
        updates = not self._loop._should_accumulate()
        while True:
            step = window.step
            assert step is not None
            if window.attempt(partial(self._batch, optimizer, batch, batch_idx, updates)):
                if updates:
                    window.leave()
                break
            # Lightning counts an update when this returns. So it returns only for a step that counts, and counters,
            # schedules and logs never see an attempt.
            if step.committed or (updates and self._source.progress.has_fetched_step()):
                self._source.settings.committed()
                window.leave()
                break
            batch = moved(self.trainer, window.batch_again())
        return {} if self._output is None or self._output.loss is None else self._output.asdict()

    def _batch(self, optimizer: Optimizer, batch: Any, batch_idx: int, updates: bool) -> None:
        self._compute(batch, batch_idx, optimizer)
        for more in self._source.window.rest():
            self._compute(moved(self.trainer, more), batch_idx, optimizer)
        if not updates:
            return
        trainer, step = self.trainer, self._source.window.step
        assert step is not None
        call._call_callback_hooks(trainer, "on_before_optimizer_step", optimizer)
        call._call_lightning_module_hook(trainer, "on_before_optimizer_step", optimizer)
        step.apply(optimizer, max_grad_norm=trainer.gradient_clip_val or None, scaler=self._source.scaler)

    def compute_again(self, batch: Any, batch_idx: int) -> None:
        """A micro-batch of a batch whose hooks have come."""
        batch = moved(self.trainer, batch)
        with self._loop.unlogged():
            self._backward(self._forward(batch, batch_idx), batch)

    def _compute(self, batch: Any, batch_idx: int, optimizer: Optimizer) -> None:
        with self._loop.unlogged() if self._logged else nullcontext():
            self._output = self._forward(batch, batch_idx)
        self._logged = True
        # Once for each update, between the first forward and backward pass, as Lightning does.
        if not self._zeroed and batch_idx % self.trainer.accumulate_grad_batches == 0:
            self._zeroed = True
            self._on_before_zero_grad(optimizer)
            self.optim_progress.optimizer.zero_grad.increment_completed()
        self._backward(self._output, batch)

    def _forward(self, batch: Any, batch_idx: int) -> Any:
        results = self.trainer._results
        assert results is not None
        results.batch, results.batch_size = batch, None
        kwargs = self._loop._build_kwargs(OrderedDict(), batch, batch_idx)
        with torch.enable_grad():
            return self._training_step(kwargs)

    def _backward(self, output: Any, batch: Any) -> None:
        source, trainer = self._source, self.trainer
        step, slot = source.window.step, source.window.slot
        assert step is not None
        assert slot is not None
        loss: torch.Tensor | None = output.closure_loss
        if loss is None:
            if source.plan.workers > 1:
                raise UsageError(
                    "training_step() returned None: with several workers every batch needs a loss, as with DDP; "
                    "return a loss that is 0, such as (output * 0).sum()"
                )
            Closure.warning_cache.warn(
                "`training_step` returned `None`. If this was on purpose, ignore this warning..."
            )
            source.window.add_nothing()
            return
        weight = slot.share
        if source.weigh is not None:
            weight = float(source.weigh(batch))
            loss = loss * (slot.accumulate * weight)
        # Calls the hooks, and has fp16's scaler scale the loss.
        loss = trainer.precision_plugin.pre_backward(loss, trainer.lightning_module)
        step.backward(loss, weight=weight)
        call._call_callback_hooks(trainer, "on_after_backward")
        call._call_lightning_module_hook(trainer, "on_after_backward")

    def count_step(self, step: Step) -> None:
        """Part of the step's commit, also where fp16 has skipped the update: Lightning's loops count those, too."""
        self.optim_progress.optimizer.step.increment_ready()
        self.optim_progress.optimizer.step.increment_completed()
        self._loop.count_step()
