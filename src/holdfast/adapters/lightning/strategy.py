"""`Trainer(strategy="holdfast")`: one worker of a job, on its device."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import lightning
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only

from holdfast.adapters import world
from holdfast.adapters.buffers import Buffers, TrainersAdvice
from holdfast.adapters.lightning.progress import CallbackState, LoopProgress, OptimizerSettings
from holdfast.adapters.lightning.refusals import refuse, refuse_data, refuse_validation
from holdfast.adapters.lightning.samples import Collate, Dealt, EpochPlan, accumulation
from holdfast.adapters.lightning.steps import EpochLoop, Optimization, StepLoader, Window
from holdfast.adapters.versions import LIGHTNING
from holdfast.data.collate import Maker, on_device
from holdfast.data.mapstyle import shuffled
from holdfast.data.seeds import micro_seed, seed_generators
from holdfast.errors import JobStopped, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from lightning.pytorch import Trainer

    from holdfast.train.buffer_rules import BufferRule
    from holdfast.train.run import Run
    from holdfast.train.step import Scaler, Step


# ---------------------------------------------------------------- rank zero
# What one worker does for all: loggers, and the files of checkpoints. All workers must know where these are, since any of
# them may be rank 0 after a fault.


def take_over(trainer: Any) -> None:
    """This worker is rank 0 now, in the place of another one, and writes into the same files."""
    for logger in trainer.loggers:
        if type(logger) is not CSVLogger or logger._experiment is not None:
            continue
        # Lightning's writer deletes what is there when it is made.
        file = Path(logger.log_dir) / "metrics.csv"
        if not file.is_file():
            continue
        before = file.read_text()
        experiment = logger.experiment
        file.write_text(before)
        experiment.metrics_keys = next(csv.reader(before.splitlines()), [])


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
        self._loader: Any = None
        self._trainer: Any = None
        self._steps: Iterator[Step] | None = None
        self._coming: Step | None = None
        self._optimization: Optimization | None = None
        self._kept: CallbackState | None = None
        self._said_rank = -1
        self.scaler: Scaler | None = None
        self.weigh: Callable[[Any], float] | None = None
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

    def setup_environment(self) -> None:
        """Before anything is set up. Until this worker is a member of its job it has no rank, and does nothing for the others."""
        super().setup_environment()
        trainer: Any = self.lightning_module.trainer if self.lightning_module is not None else None
        if trainer is None or trainer.state.fn != TrainerFn.FITTING:
            return
        self._loader = None
        self._trainer = trainer
        if not self._run.alone:
            name_folders(trainer, self._run.job)
            set_rank(max(1, self._run.rank))

    def setup(self, trainer: Trainer) -> None:
        """Makes model and optimizer ready, and joins the job: their state is then that of its newest step.

        Raises:
            UsageError: something of the trainer, the module or the data cannot work at level 2.
        """
        if trainer.state.fn != TrainerFn.FITTING:
            super().setup(trainer)
            return
        loop = trainer.fit_loop
        epoch_loop = EpochLoop(trainer, self, min_steps=loop.min_steps, max_steps=loop.max_steps)
        epoch_loop.automatic_optimization = self._optimization = Optimization(trainer, self)
        epoch_loop.val_loop = loop.epoch_loop.val_loop  # it has the validation data already
        loop.epoch_loop = epoch_loop
        self.window = Window(self, self._optimization.compute_again)
        super().setup(trainer)  # `configure_optimizers` may ask for the data
        loop.setup_data()  # comes to `process_dataloader`; Lightning's own call of it then finds the data there
        self._join(trainer)

    def process_dataloader(self, dataloader: Any) -> Any:
        """In the place of the training data: micro-batches of the job's steps."""
        trainer = self._trainer
        if trainer is None or not trainer.training or trainer.state.fn != TrainerFn.FITTING:
            return dataloader
        if self._loader is not None:
            raise UsageError(
                'Trainer(strategy="holdfast"): there are several training data loaders; use a single one, whose '
                "dataset contains all samples"
            )
        refuse_data(trainer, dataloader)
        self._loader = dataloader
        return StepLoader(self, dataloader)

    def batches_of_an_epoch(self, loader: Any) -> int:
        """That each worker of a full job takes, without a limit."""
        each = -(-len(loader.sampler) // self._run.full_world_size)
        size = int(loader.batch_size)
        return each // size if loader.drop_last else -(-each // size)

    def _join(self, trainer: Any) -> None:
        loader, loop, module = self._loader, trainer.fit_loop, trainer.lightning_module
        if loader is None or loop.max_epochs == 0 or trainer.max_steps == 0:
            return  # nothing is trained, and Lightning's loop says why
        refuse(trainer, module)
        assert self._optimization is not None
        run = self._run = world.run_for_training()
        self.plan = EpochPlan(
            samples=len(loader.sampler),
            micro_batch=int(loader.batch_size),
            workers=run.full_world_size,
            drop_last=loader.drop_last,
            batches=int(trainer.num_training_batches),
            accumulate=accumulation(trainer),
        )
        until = self._until(trainer)
        refuse_validation(trainer, self.plan, until)
        self.weigh = getattr(module, "holdfast_weight", None)
        self.progress, self._kept = LoopProgress(trainer), CallbackState(trainer, run.alone)
        self._kept.files = known_files(trainer)
        schedulers = [c.scheduler for c in trainer.lr_scheduler_configs if not c.reduce_on_plateau]
        self.scaler = getattr(trainer.precision_plugin, "scaler", None)
        run.protect(
            model=module,
            optimizer=trainer.optimizers[0],
            trainer=self.progress,
            callbacks=self._kept,
            **{f"scheduler{i}" if i else "scheduler": scheduler for i, scheduler in enumerate(schedulers)},
            **({} if self.scaler is None else {"scaler": self.scaler}),
        )
        self._buffers.declare(run)
        # Before the user's own callback, which may ask the trainer for its step: it must find the one that is
        # being committed.
        run.on_commit(self._optimization.count_step)
        if self._on_commit is not None:
            run.on_commit(self._on_commit)
        # After all that a commit changes.
        run.on_commit(self._committed)
        self._dealt = Dealt(loader, self.plan)
        self._collate = Collate(loader.collate_fn)
        self.settings = OptimizerSettings(trainer.optimizers[0])
        self._steps = run.steps(
            shuffled(self._dealt, workers=loader.num_workers, collate=self._collate),
            global_batch=self.plan.global_batch,
            micro_batch=self.plan.micro_batch,
            until=until,
            seed=self._seed,
            reduction=self._reduction,
        )
        self._coming = next(self._steps, None)
        # After the first step was asked for: only then has this worker the state, its own or a peer's, and
        # only then can the loops be put where it stands.
        self.settings.committed()
        self._kept.resume()
        self.progress.resume()
        share_files(trainer, self._kept.knows)
        self._say_rank(run.rank)
        if not any(isinstance(callback, EndReporter) for callback in trainer.callbacks):
            trainer.callbacks.insert(0, EndReporter())
        # The hooks that begin a training, and the sanity check of the validation, may take long.
        self._before_steps.enter_context(run.relaxed_watchdog())
        if self.progress.outstanding:
            # As the commit left them, which the hooks follow that this worker is about to run.
            step = (self._coming.index if self._coming is not None else until) - 1
            seed_generators(micro_seed(self._seed, step, self._micros), run.device)

    def _until(self, trainer: Trainer) -> int:
        limits = [trainer.max_steps] if trainer.max_steps != -1 else []
        epochs = trainer.fit_loop.max_epochs
        if epochs is not None and epochs >= 0:
            limits.append(self.plan.steps(epochs))
        return min(limits)

    @property
    def _micros(self) -> int:
        return self.plan.global_batch // self.plan.micro_batch

    # ------------------------------------------------------------ steps

    def next_step(self) -> Step | None:
        """What the loops train next; None: no step is left, or the job was asked to stop."""
        assert self._steps is not None
        self.settings.put_back()
        self._before_steps.close()
        step, self._coming = self._coming or next(self._steps, None), None
        self._say_rank(self._run.rank)
        return step

    def micro_batches(self) -> range:
        """The numbers of those micro-batches of a step that this worker computes now."""
        return self._run.world.micro_batches

    def last_batch(self) -> Any:
        """The batch after which the newest commit came, of this worker's rank."""
        step = (self._coming.index if self._coming is not None else self._until(self._trainer)) - 1
        last = self.plan.slot(step, 0).batches - 1
        rank = min(self._run.rank, self.plan.workers - 1)
        micro = rank * self.plan.most + last
        ids = self._dealt.order(self._seed).micro_batch(step, micro)
        return on_device(
            Maker(self._dealt, self._collate, self._seed).make(step, micro, ids), self._run.device
        )

    @contextmanager
    def relaxed_watchdog(self) -> Iterator[None]:
        """For what the loops do between two steps and may take long."""
        # The state is looked at on both sides, and what hooks set the optimizer to is no part of it yet.
        self.settings.put_back()
        self._before_steps.close()  # a newcomer's, whose loops may validate before its first step
        with self._run.relaxed_watchdog():
            self.settings.resume()
            try:
                yield
            finally:
                self.settings.put_back()
        self.settings.resume()

    def _committed(self, step: Step) -> None:
        self.progress.keep(step)
        assert self._kept is not None
        self._kept.keep(step)
        self.settings.committed()

    def _say_rank(self, rank: int) -> None:
        if rank == 0 and self._said_rank != 0 and self._trainer.global_step:
            set_rank(rank)
            take_over(self._trainer)
        self._said_rank = rank
        set_rank(rank)

    # ------------------------------------------------------------ files

    def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        """On rank 0; the others know of the file."""
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self._kept is not None:
            self._kept.files.add(os.path.normpath(filepath))

    def remove_checkpoint(self, filepath: Any) -> None:
        """On rank 0; the others know of it."""
        super().remove_checkpoint(filepath)
        if self._kept is not None:
            self._kept.files.discard(os.path.normpath(filepath))

    # ------------------------------------------------------------ the end

    def finish(self) -> None:
        """The loops are done: so is this worker. Hooks that follow may change the module, whose state was told.

        Raises:
            JobStopped: they are not, since the job was asked to stop.
        """
        if self._steps is None:
            return
        self.settings.put_back()
        self._before_steps.close()
        steps, self._steps = self._steps, None
        # Asked once more, so the job hears that this worker is done. A worker that only left the loop would
        # be waited for.
        if self.window.step is not None or (self._coming or next(steps, None)) is not None:
            steps.close()  # type: ignore[attr-defined]
        elif self._run.stopped:
            raise JobStopped("the job was asked to stop before the training's end")
        self.settings.resume()


class EndReporter(Callback):
    """Tells the job that the training has ended before other callbacks hear it: some of them put other weights into the
    module then."""

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """The loops are done."""
        strategy = trainer.strategy
        assert isinstance(strategy, HoldfastStrategy)
        strategy.finish()


def register() -> None:
    """Makes `strategy="holdfast"` known."""
    if "holdfast" not in StrategyRegistry:
        StrategyRegistry.register("holdfast", HoldfastStrategy, description="one worker of a Holdfast job")
        StrategyRegistry.register(
            "holdfast_exact", HoldfastStrategy, description="the same, exact bit by bit", reduction="exact"
        )


def set_rank(rank: int) -> None:
    """For everything that Lightning does on rank 0 alone."""
    setattr(rank_zero_only, "rank", rank)  # noqa: B010 - declared as a function


def name_folders(trainer: Any, job: str) -> None:
    """Gives loggers that would number their folders by what is there a version that follows from the job's name. Each worker
    comes at another time, and would find another number.

    job: its name.
    """
    version = f"version_{job}"
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger | TensorBoardLogger) and logger._version is None:
            logger._version = version
    # A service names a run when rank 0 logs to it, and the others never hear the name.
    first = trainer.loggers[0] if trainer.loggers else None
    if first is None or isinstance(first, CSVLogger | TensorBoardLogger) or first.version is not None:
        return
    root = first.save_dir if first.save_dir is not None else trainer.default_root_dir
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
            callback.dirpath = f"{root}/{first.name}/{version}/checkpoints"


def known_files(trainer: Any) -> set[str]:
    """Checkpoint files that are there before the training begins."""
    found: set[str] = set()
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath and Path(callback.dirpath).is_dir():
            found.update(os.path.normpath(file) for file in Path(callback.dirpath).iterdir())
    return found


def share_files(trainer: Any, is_known: Callable[[Any], bool]) -> None:
    """Lets every `ModelCheckpoint` choose the names of files by those that the job knows, and not by what rank 0 has written so
    far. is_known: whether a path is one of them."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            setattr(callback, "file_exists", lambda filepath, trainer: is_known(filepath))  # noqa: B010 - a method
