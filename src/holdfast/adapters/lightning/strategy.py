"""`Trainer(strategy="holdfast")`: one worker of a job, on its device."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal

import lightning
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only

from holdfast.adapters import world
from holdfast.adapters.advice import TrainersAdvice
from holdfast.adapters.buffers import Buffers
from holdfast.adapters.lightning.progress import LoopProgress
from holdfast.adapters.lightning.refusals import refuse
from holdfast.adapters.lightning.steps import Done, EpochLoop, Optimization, StepLoader
from holdfast.adapters.versions import LIGHTNING
from holdfast.data.mapstyle import shuffled
from holdfast.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from lightning.pytorch import Trainer

    from holdfast.train.buffer_rules import BufferRule
    from holdfast.train.loss_scale import Scaler
    from holdfast.train.run import Run
    from holdfast.train.step import Step


class HoldfastStrategy(SingleDeviceStrategy):
    """Lightning's loops, hooks, validation and callbacks, over the steps of a job.

    Args:
        reduction: "exact": losses and parameters are those of a run on one worker, bit by bit (see `Run.steps`).
        seed: of the order of samples and of the randomness within a step.
        buffers: rules for buffers that forward passes change, by their paths or patterns of these:
            `{"model.*.loads": "sum"}`, where `model` is the LightningModule. See `Run.buffers`; batch norms have the rule
            their rule without being named.
        on_commit: called with the step in every commit, on every worker: what else changes the module, the optimizer or a
            scheduler. See `Run.on_commit`.

    Raises:
        UsageError: a version of Lightning that is not supported, or a rule for buffers that there is not.
    """

    strategy_name = "holdfast"

    def __init__(
        self,
        reduction: Literal["fast", "exact"] = "fast",
        seed: int = 0,
        buffers: Mapping[str, BufferRule] | None = None,
        on_commit: Callable[[Step], object] | None = None,
        **more: Any,
    ) -> None:
        LIGHTNING.check(lightning.__version__, "holdfast.lightning")
        self._buffers = Buffers(buffers, TrainersAdvice("HoldfastStrategy("))
        self._on_commit = on_commit
        self._run: Run = world.own_run()
        more.pop("device", None)
        super().__init__(device=self._run.device, **more)
        self._reduction, self._seed = reduction, seed
        self._loader: StepLoader | None = None
        self._trainer: Trainer | None = None
        self._steps: Iterator[Step] | None = None
        self._coming: Step | None = None
        self._optimization: Optimization | None = None
        self.scaler: Scaler | None = None
        self._before_steps = ExitStack()

    # ------------------------------------------------------------ ranks: the job's, whatever they are now

    @property
    def global_rank(self) -> int:
        """Rank of this worker in the job; another one may be rank 0 after a fault."""
        return self._run.rank

    @global_rank.setter
    def global_rank(self, rank: int) -> None:
        """Lightning sets it once; the job decides."""

    @property
    def local_rank(self) -> int:
        """This worker's number on its node."""
        return world.slot()

    @local_rank.setter
    def local_rank(self, rank: int) -> None:
        """Lightning sets it once; the job decides."""

    @property
    def is_global_zero(self) -> bool:
        """Whether this worker saves and logs for all."""
        return self._run.rank == 0

    # ------------------------------------------------------------ before the first step

    def setup(self, trainer: Trainer) -> None:
        """Makes model and optimizer ready, and joins the job: their state is then that of its newest step.

        Raises:
            UsageError: something of the trainer, the module or the data cannot work at level 2.
        """
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        self._trainer = trainer
        loop = trainer.fit_loop
        epoch_loop = EpochLoop(trainer, min_steps=loop.min_steps, max_steps=loop.max_steps)
        epoch_loop.automatic_optimization = self._optimization = Optimization(trainer, self)
        epoch_loop.val_loop = loop.epoch_loop.val_loop  # it has the validation data already
        loop.epoch_loop = epoch_loop
        loop.setup_data()  # comes to `process_dataloader`; Lightning's own call of it then finds the data there
        trainer.accumulate_grad_batches = 1  # a batch of the loops is a whole step
        self._join(trainer)

    def process_dataloader(self, dataloader: Any) -> Any:
        """In the place of the training data: steps of the job."""
        trainer = self._trainer
        if trainer is None or not trainer.training or trainer.state.fn != TrainerFn.FITTING:
            return dataloader
        if self._loader is not None:
            raise UsageError(
                'Trainer(strategy="holdfast"): there are several training data loaders; give one, whose dataset holds all'
            )
        refuse(trainer, trainer.lightning_module, dataloader)
        self._loader = StepLoader(
            self, dataloader, self._run.full_world_size, trainer.accumulate_grad_batches
        )
        return self._loader

    def _join(self, trainer: Trainer) -> None:
        loader = self._loader
        assert loader is not None
        assert self._optimization is not None
        run = self._run = world.run_for_training()
        self.progress = LoopProgress(trainer)
        schedulers = {
            f"scheduler{i}" if i else "scheduler": config.scheduler
            for i, config in enumerate(trainer.lr_scheduler_configs)
        }
        self.scaler = getattr(trainer.precision_plugin, "scaler", None)
        run.protect(
            model=trainer.lightning_module,
            optimizer=trainer.optimizers[0],
            trainer=self.progress,
            **schedulers,
            **({} if self.scaler is None else {"scaler": self.scaler}),
        )
        self._buffers.declare(run)
        # Before the user's own callback, which may ask the trainer for its step: it must find the one that is
        # being committed.
        run.on_commit(self._optimization.count_step)
        if self._on_commit is not None:
            run.on_commit(self._on_commit)
        limits = [trainer.max_steps] if trainer.max_steps != -1 else []
        if trainer.fit_loop.max_epochs is not None and trainer.fit_loop.max_epochs >= 0:
            limits.append(trainer.fit_loop.max_epochs * int(trainer.num_training_batches))
        self._steps = run.steps(
            shuffled(loader.dataset, workers=loader.processes, collate=loader.collate),
            global_batch=loader.global_batch,
            micro_batch=loader.micro_batch,
            until=min(limits),
            seed=self._seed,
            reduction=self._reduction,
        )
        self._coming = next(self._steps, None)
        # After the first step was asked for: only then has this worker the state, its own or a peer's, and
        # only then can the loops be put where it stands.
        self.progress.resume()
        setattr(rank_zero_only, "rank", run.rank)  # noqa: B010 - declared as a function
        # The hooks that begin a training, and the sanity check of the validation, may take long.
        self._before_steps.enter_context(run.relaxed_watchdog())

    # ------------------------------------------------------------ steps

    def next_step(self) -> Step | Done | None:
        """What the loops train next; None: the job was asked to stop."""
        assert self._steps is not None
        assert self._trainer is not None
        self._before_steps.close()
        if self.progress.outstanding:
            self.progress.outstanding = False
            return Done()
        step, self._coming = self._coming or next(self._steps, None), None
        setattr(rank_zero_only, "rank", self._run.rank)  # noqa: B010
        if step is None:
            self._trainer.should_stop = True
        return step

    def validating(self) -> Any:
        """For what the loops do between two steps and may take long."""
        return self._run.relaxed_watchdog()

    def on_train_end(self) -> None:
        """The loops are done: so is this worker."""
        # Asked once more, so the job hears that this worker is done. A worker that only left the loop would
        # be waited for.
        if self._steps is not None and self.next_step() is not None:
            self._steps.close()  # type: ignore[attr-defined]
        super().on_train_end()


def register() -> None:
    """Makes `strategy="holdfast"` known."""
    if "holdfast" not in StrategyRegistry:
        StrategyRegistry.register("holdfast", HoldfastStrategy, description="one worker of a Holdfast job")
        StrategyRegistry.register(
            "holdfast_exact", HoldfastStrategy, description="the same, exact bit by bit", reduction="exact"
        )
