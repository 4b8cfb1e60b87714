"""Hugging Face's Trainer as a member of a job: its own methods compute a step, the run decides what counts."""

from __future__ import annotations

import json
import logging
from contextlib import ExitStack, nullcontext
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import transformers
from accelerate.utils import is_peft_model
from torch.utils.data import DataLoader, Dataset
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_pt_utils import find_batch_size
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from holdfast.adapters import world
from holdfast.adapters.accelerate import backend
from holdfast.adapters.buffers import Buffers, TrainersAdvice
from holdfast.adapters.huggingface import arguments, sharded
from holdfast.adapters.huggingface.progress import TrainerProgress
from holdfast.adapters.versions import PEFT, TRANSFORMERS, TRL
from holdfast.data.mapstyle import shuffled
from holdfast.errors import Damaged, UsageError
from holdfast.protocol.wire.stored import decode_file

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from holdfast.train.buffer_rules import BufferRule
    from holdfast.train.run import Run
    from holdfast.train.step import Step


_log = logging.getLogger(__name__)
JOB_FILE = "holdfast_job.json"
"""In each checkpoint that the Trainer writes: which job it was."""


class HoldfastMixin:
    """Put before a Trainer's class. Only the loop over steps is replaced: `training_step`, `compute_loss`, the optimizer,
    the scheduler, callbacks, evaluation and logging are the Trainer's or the user's own.

    What it adds to a trainer begins with `_holdfast_`: the names of the user's own class are not known.

    Attributes:
        reduction: "fast" or "exact", see `Run.steps`; set on the class, for example by `wrap`.
    """

    reduction: Literal["fast", "exact"] = "fast"
    _holdfast_buffers = Buffers(None, TrainersAdvice("wrap(Trainer, "))
    _holdfast_on_commit: Callable[[Step], object] | None = None

    if TYPE_CHECKING:
        _tr_loss: torch.Tensor
        _total_loss_scalar: float
        _globalstep_last_logged: int
        _initial_global_step: int

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        TRANSFORMERS.check(transformers.__version__, "holdfast.transformers")
        super().__init__(*args, **kwargs)
        if is_peft_model(self.model):
            PEFT.check(metadata.version("peft"), "holdfast.transformers")
        self._holdfast_run: Run = world.own_run()
        backend.ignore([f"{name}={value}" for name, value in arguments.of_ddp(self.args).items()])
        arguments.follow(self.args, self._holdfast_run, world.slot())
        self._holdfast_before_steps: ExitStack | None = None
        self._holdfast_steps: Any = None
        self._holdfast_step: Step | None = None
        self._holdfast_weight = 1.0

    def create_accelerator_and_postprocess(self: Any) -> None:
        """Accelerate is told of no tensor parallelism: it would look for its workers among the processes that it knows, and
        knows this one alone."""
        size = getattr(self.model, "_tp_size", None)
        if size is not None:
            self.model._tp_size = None
        try:
            super().create_accelerator_and_postprocess()  # type: ignore[misc]
        finally:
            if size is not None:
                self.model._tp_size = size

    def get_tp_size(self: Any) -> int:
        """Of the processes that the Trainer knows: this one."""
        return 1

    # ------------------------------------------------------------ before the first step

    def train(self: Any, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer does it. A checkpoint that this job has written is not read: the job's own state is never older.

        Raises:
            JobStopped: training ends before its last step.
            UsageError: something that cannot work, or a checkpoint that another training has written.
        """
        given = resume_from_checkpoint
        if given and not self._holdfast_run.alone:
            folder = (
                get_last_checkpoint(self.args.output_dir) if given is True else given  # type: ignore[no-untyped-call]
            )
            # Of one that is not complete, a rank 0 of this job is writing it now.
            if folder is not None and (
                _job_of(folder) == self._holdfast_run.job or not (Path(folder) / TRAINER_STATE_NAME).exists()
            ):
                _log.warning(
                    "resume_from_checkpoint=%s is ignored: this job wrote that checkpoint, and resumes from its own "
                    "newest state",
                    given,
                )
                given = None
        try:
            return super().train(given, *args, **kwargs)  # type: ignore[misc]
        finally:
            # After an error. In a job the process ends with it, and the others hear of it before they hear of the end of the
            # steps; a job of one lives on in a notebook, and its loop would be ended when Python ends.
            if self._holdfast_run.alone and self._holdfast_steps is not None:
                self._holdfast_steps.close()

    def get_train_dataloader(self: Any) -> DataLoader[Any]:
        """A loader over the numbers of samples, as long as that of one worker of the full job. The Trainer asks it for
        lengths alone: what a step's samples are, the run decides."""
        workers = self._holdfast_run.full_world_size
        arguments.refuse(self.args, self.train_dataset, self.lr_scheduler, workers)
        own = super().get_train_dataloader()  # type: ignore[misc]
        arguments.refuse_loader(own, self._holdfast_micro_batch)
        self._holdfast_collate, self._holdfast_samples = own.collate_fn, own.dataset
        self._holdfast_lengths = DataLoader(
            _Numbers(len(own.dataset)),
            batch_size=self._holdfast_micro_batch * self._holdfast_readers,
            drop_last=self.args.dataloader_drop_last,
        )
        lengths: DataLoader[Any] = self._holdfast_lengths
        return lengths

    def get_total_train_batch_size(self: Any, args: Any) -> int:
        """Samples of an optimizer step over the full job."""
        return int(self._holdfast_micro_batch * args.gradient_accumulation_steps * self._holdfast_readers)

    @property
    def _holdfast_readers(self: Any) -> int:
        """Workers of the full job that have samples of their own."""
        return int(self._holdfast_run.full_world_size // sharded.alike(self.model))

    @property
    def _holdfast_micro_batch(self: Any) -> int:
        return int(self.args.per_device_train_batch_size)

    def _init_training_state(
        self: Any, max_steps: int, steps_per_epoch: int, epochs: int, resume: Any, trial: Any
    ) -> tuple[int, int]:
        """Prepares the training and joins the job; returns the epoch that it stands in."""
        # Two sources of one state would have to be compared, and the one that loses would be thrown away in
        # silence. The job's own is never older.
        if resume is not None:
            raise UsageError(
                "resume_from_checkpoint: a job resumes from its newest state without it; remove it. To start from "
                "the weights of another job, pass their folder to from_pretrained"
            )
        if trial is not None:
            raise UsageError(
                "hyperparameter_search(): a job is a single training; start one job for each trial"
            )
        super()._init_training_state(max_steps, steps_per_epoch, epochs, None, None)  # type: ignore[misc]
        sharded.join(world.own_run(), self)
        # The Trainer wants to know the epoch before it makes model and optimizer ready. A newcomer knows it when it has
        # fetched the state, which goes into these. So that part is done now, and `_prepare_for_training` hands it out.
        self._holdfast_prepared, _ = super()._prepare_for_training(max_steps, self._holdfast_lengths, None)  # type: ignore[misc]
        self.accelerator.backward = self._holdfast_backward
        self.current_gradient_accumulation_steps = 1  # the run divides by the weight of the global batch
        self._holdfast_steps_per_epoch = steps_per_epoch
        self._holdfast_progress = TrainerProgress(self)
        self._holdfast_progress.put_losses()
        # On a CPU there is none: Accelerate computes fp16 in single precision there.
        scaler = self._holdfast_scaler = self.accelerator.scaler
        if scaler is not None:
            self.optimizer.scaler = (
                None  # it would decide by this worker's gradients; the step does by those of all
            )
        run = self._holdfast_run = world.run_for_training()
        run.protect(
            model=self.model,
            optimizer=_raw(self.optimizer),
            scheduler=self.lr_scheduler,
            trainer=self._holdfast_progress,
            **({} if scaler is None else {"scaler": scaler}),
        )
        run.constant(**self._holdfast_constants())
        self._holdfast_buffers.declare(run)
        # Not `also=` of a step: the Trainer counts a step that fp16 has skipped, too.
        run.on_commit(self._holdfast_count_step)
        if self._holdfast_on_commit is not None:
            run.on_commit(self._holdfast_on_commit)
        self._holdfast_steps = run.steps(
            shuffled(
                self._holdfast_samples,
                workers=self.args.dataloader_num_workers,
                collate=self._holdfast_collate,
            ),
            global_batch=self.get_total_train_batch_size(self.args),
            micro_batch=self._holdfast_micro_batch,
            until=max_steps,
            seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
            reduction=self.reduction,
        )
        # Asked for here, before the Trainer looks at its own state: the first step comes when this worker has
        # the job's state, and what the Trainer then reads (global step, epoch) is the job's.
        self._holdfast_coming = next(self._holdfast_steps, None)
        self._holdfast_reports = self.state.is_world_process_zero = self.is_world_process_zero()
        # Callbacks that begin a training may take long, and the others wait for this worker's first step.
        self._holdfast_before_steps = ExitStack()
        self._holdfast_before_steps.enter_context(run.relaxed_watchdog())
        return (self.state.global_step - self._holdfast_progress.outstanding) // steps_per_epoch, 0

    def _holdfast_constants(self: Any) -> dict[str, torch.nn.Module]:
        """What never changes: the base under PEFT's adapters, and the reference model of TRL's DPO. So a snapshot has the
        adapters and their optimizer alone."""
        found = {}
        # Not every model with frozen parameters: a callback may train some of them from a later epoch on. PEFT
        # freezes its base for good.
        if is_peft_model(self.model) and not all(p.requires_grad for p in self.model.parameters()):
            found["model"] = self.model
        reference = getattr(self, "ref_model", None)
        if isinstance(reference, torch.nn.Module):
            found["ref_model"] = reference.requires_grad_(False)
        return found

    def _prepare_for_training(self: Any, max_steps: int, loader: Any, resume: Any) -> tuple[Any, Any]:
        return self._holdfast_prepared, loader

    # ------------------------------------------------------------ the loop over steps

    def _run_epoch(
        self: Any,
        model: Any,
        *,
        epoch: int,
        trial: Any,
        ignore_keys_for_eval: Any,
        start_time: float,
        **more: Any,
    ) -> None:
        """The steps of an epoch, from where the job stands."""
        self._holdfast_end_beginning()
        while True:
            # Not only after a step that was committed here: the state may have come from a worker that has not done what
            # follows its newest step.
            if self._holdfast_progress.outstanding and self._holdfast_follow_up(
                model, trial, ignore_keys_for_eval, start_time
            ):
                # The job may have gone back into an epoch before this one, where its newest steps were lost. The Trainer
                # counts its epochs on, and would end before the last step.
                if (
                    self.control.should_training_stop
                    or self.state.global_step > epoch * self._holdfast_steps_per_epoch
                ):
                    return
                self.control = self.callback_handler.on_epoch_begin(self.args, self.state, self.control)
            step = self._holdfast_next_step()
            if step is None:
                return
            self._holdfast_step, self._holdfast_rate = step, self._get_learning_rate()
            self.control = self.callback_handler.on_step_begin(self.args, self.state, self.control)
            with step:
                self._holdfast_count_tokens(step)
                for number, inputs in enumerate(step):
                    if number:
                        self.control = self.callback_handler.on_substep_end(
                            self.args, self.state, self.control
                        )
                    items = self._get_num_items_in_batch([inputs], self.args.device)
                    self._holdfast_weight = float(find_batch_size(inputs) if items is None else items)  # type: ignore[no-untyped-call]
                    # Where no token counts the sum of losses is 0, and dividing it by 0 would make it NaN.
                    self.training_step(model, inputs, items if self._holdfast_weight else 1)
                self.control = self.callback_handler.on_pre_optimizer_step(
                    self.args, self.state, self.control
                )
                step.apply(
                    self.optimizer,
                    max_grad_norm=self.args.max_grad_norm or None,
                    scheduler=self.lr_scheduler,
                    scaler=self._holdfast_scaler,
                )

    def _holdfast_count_tokens(self: Any, step: Step) -> None:
        """Those of the step that comes, on all workers."""
        if self._holdfast_progress.tokens is None:
            return
        counted = [_tokens(inputs) for inputs in step.load()]
        self._holdfast_tokens = int(step.sum({"tokens": counted})["tokens"])

    def _holdfast_end_beginning(self: Any) -> None:
        """The callbacks that begin a training are done."""
        if self._holdfast_before_steps is not None:
            self._holdfast_before_steps.close()
            self._holdfast_before_steps = None
            self._holdfast_progress.put_losses()

    def _holdfast_next_step(self: Any) -> Step | None:
        step, self._holdfast_coming = self._holdfast_coming or next(self._holdfast_steps, None), None
        if step is None:  # the job was asked to stop, or it ended with the step before
            self.control.should_training_stop = True
        self._holdfast_report_from_rank_0()
        return step

    def _holdfast_backward(self: Any, loss: torch.Tensor, **options: Any) -> None:
        """What `training_step` calls: its loss is a mean over what `_holdfast_weight` counts."""
        total = loss * self._holdfast_weight
        if self._holdfast_scaler is not None:
            total = self._holdfast_scaler.scale(total)
        self._holdfast_step.backward(total, weight=self._holdfast_weight)

    def _holdfast_count_step(self: Any, step: Step) -> None:
        """Part of the step's commit."""
        progress = self._holdfast_progress
        progress.loss, progress.grad_norm = step.loss, None if step.skipped else step.grad_norm
        progress.learning_rate = self._holdfast_rate
        # Inside the commit, so a newcomer that fetches the state at this moment knows that logs, evaluation
        # and callbacks of the step are still to be done, and does them.
        progress.outstanding = True
        if progress.tokens is not None:
            progress.tokens += self._holdfast_tokens
            progress.put_tokens()
        progress.add_loss(self.state.global_step)
        self.state.global_step += 1
        self.state.epoch = self._holdfast_epoch_after(self.state.global_step)

    def _holdfast_epoch_after(self: Any, steps: int) -> float:
        """What the Trainer calls the epoch after so many steps: it counts batches, and an epoch's last step may have
        fewer."""
        if not steps:
            return 0
        epoch, step = divmod(steps - 1, int(self._holdfast_steps_per_epoch))
        batches = len(self._holdfast_lengths)
        done: float = min((step + 1) * self.args.gradient_accumulation_steps, batches) / batches
        return epoch + done

    def _holdfast_follow_up(self: Any, model: Any, trial: Any, ignored: Any, start_time: float) -> bool:
        """What follows a committed step: callbacks, logs, evaluation, a checkpoint. Returns whether the epoch is over."""
        handler, progress = self.callback_handler, self._holdfast_progress
        done = self.state.global_step
        try:
            # The Trainer counts a step after this event.
            self.state.global_step, self.state.epoch = done - 1, self._holdfast_epoch_after(done - 1)
            self.control = handler.on_optimizer_step(self.args, self.state, self.control)
        finally:
            self.state.global_step, self.state.epoch = done, self._holdfast_epoch_after(done)
        self.control = handler.on_step_end(self.args, self.state, self.control)
        ends = self.state.global_step % self._holdfast_steps_per_epoch == 0
        if self.control.should_epoch_stop and not ends and not self.control.should_training_stop:
            # With the next step a new order of samples would begin, which the others, and a newcomer, could not know.
            raise UsageError(
                f"a callback set control.should_epoch_stop after step {self.state.global_step}, in the middle of an "
                "epoch: the samples of a step depend only on its number, so an epoch cannot be shortened; make the "
                "dataset smaller, or end the training with control.should_training_stop"
            )
        over: bool = ends or self.control.should_training_stop
        with (
            self._holdfast_run.relaxed_watchdog()
            if over or self.control.should_evaluate or self.control.should_save
            else nullcontext()
        ):
            for end in (False, True) if over else (False,):
                if end:
                    self.control = handler.on_epoch_end(self.args, self.state, self.control)
                self._maybe_log_save_evaluate(
                    self._tr_loss,
                    progress.grad_norm,
                    model,
                    trial,
                    self.state.epoch,
                    ignored,
                    start_time,
                    learning_rate=progress.learning_rate,
                )
        progress.outstanding = False
        return over

    # ------------------------------------------------------------ who reports, and the end

    def _holdfast_report_from_rank_0(self: Any) -> None:
        """Rank 0 reports. When its worker is lost another becomes rank 0, whose reporters have not begun yet."""
        zero = self.state.is_world_process_zero = self.is_world_process_zero()
        if zero and not self._holdfast_reports:
            handler = self.callback_handler
            for callback in handler.callbacks:
                if type(callback).__module__.startswith("transformers."):
                    callback.on_train_begin(
                        self.args,
                        self.state,
                        self.control,
                        model=self.model,
                        processing_class=self.processing_class,
                    )
        self._holdfast_reports = self._holdfast_reports or zero

    def _evaluate(
        self: Any, trial: Any, ignore_keys_for_eval: Any, skip_scheduler: bool = False
    ) -> dict[str, float]:
        if skip_scheduler and self.state.global_step:
            return {}  # eval_on_start was done when the job began
        metrics: dict[str, float] = super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)  # type: ignore[misc]
        return metrics

    def _save_checkpoint(self: Any, model: Any, trial: Any) -> None:
        # Asked of the arguments, which follow the rank: after a fault another worker is rank 0, and exactly
        # one of them saves.
        if self.args.should_save:
            folder = Path(
                self._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            )
            folder.mkdir(parents=True, exist_ok=True)
            (folder / JOB_FILE).write_text(json.dumps({"job": self._holdfast_run.job}))
            super()._save_checkpoint(model, trial)  # type: ignore[misc]
        elif best := self.state.best_global_step:
            # Every rank of torchrun's knows the best checkpoint. The one of this step is being written now.
            folder = Path(self._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{best}")
            if best == self.state.global_step or folder.exists():
                self.state.best_model_checkpoint = str(folder)

    def save_model(self: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As the Trainer does it.

        Raises:
            UsageError: no worker has the whole model.
        """
        sharded.refuse_saving(self.model)
        super().save_model(output_dir, _internal_call)  # type: ignore[misc]

    def _finalize_training(self: Any, trial: Any, num_train_samples: int, start_time: float) -> Any:
        self._holdfast_end_beginning()  # a worker that came after the last step had no epoch
        if self._holdfast_next_step() is not None:  # a callback stopped the training early
            self._holdfast_steps.close()
        return super()._finalize_training(trial, num_train_samples, start_time)  # type: ignore[misc]


class _Numbers(Dataset[int]):
    """As many samples as a dataset has."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:
        return index


def _job_of(folder: str) -> str | None:
    """The job that has written a checkpoint of the Trainer's; None: it was no job, or another program."""
    try:
        content = decode_file(json.loads, Path(folder) / JOB_FILE)
    except (OSError, Damaged):
        return None
    job = content.get("job") if isinstance(content, dict) else None
    return job if isinstance(job, str) else None


def _tokens(inputs: Any) -> int:
    """Of a micro-batch, as TRL's trainers count them."""
    mask = inputs.get("attention_mask")
    if mask is not None:
        return int(mask.sum())
    places = inputs.get("position_ids")  # of sequences in one row, without padding
    return 0 if places is None else int(places.size(1))


def _raw(optimizer: Any) -> Any:
    """The optimizer itself, without Accelerate's wrapper: what holds the state."""
    return getattr(optimizer, "optimizer", optimizer)


def wrap(
    trainer: type,
    reduction: Literal["fast", "exact"] = "fast",
    buffers: Mapping[str, BufferRule] | None = None,
    on_commit: Callable[[Step], object] | None = None,
) -> type:
    """A class of trainers derived from transformers' Trainer, as a member of a job: `wrap(trl.SFTTrainer)`.

    Args:
        trainer: the class; its methods are called as before.
        reduction: "exact": losses and parameters are those of a run on one worker, bit by bit (see `Run.steps`).
        buffers: rules for buffers that forward passes change, by their paths or patterns of these:
            `{"model.*.loads": "sum"}`. See `Run.buffers`; torch's norms have their rule without being named.
        on_commit: called with the step in every commit, on every worker: what else changes the model, the optimizer or the
            scheduler. See `Run.on_commit`.

    Raises:
        UsageError: the class is not derived from Trainer, or replaces the loop over steps itself; a rule that there is
            not; or a version of TRL that is not supported.
    """
    if any(kind.__module__.partition(".")[0] == "trl" for kind in trainer.__mro__):
        TRL.check(metadata.version("trl"), "wrap")
    if not issubclass(trainer, transformers.Trainer):
        raise UsageError(f"wrap({trainer.__name__}): the argument must be a subclass of transformers.Trainer")
    # By identity with the Trainer's own: a class that replaces the loop would run its own steps, and none of
    # them would be the job's.
    replaced = [name for name in _OURS if getattr(trainer, name) is not getattr(transformers.Trainer, name)]
    if replaced:
        raise UsageError(
            f"wrap({trainer.__name__}): it overrides {', '.join(replaced)}, which Holdfast replaces by its own loop "
            "over steps; use level 1 for this class (docs/levels.md)"
        )
    own = {
        "reduction": reduction,
        "_holdfast_buffers": Buffers(buffers, TrainersAdvice(f"wrap({trainer.__name__}, ")),
        # A function in a class would be taken for a method of it.
        "_holdfast_on_commit": staticmethod(on_commit) if on_commit is not None else None,
        "__module__": trainer.__module__,
    }
    return type(trainer.__name__, (HoldfastMixin, trainer), own)


_OURS = (
    "_inner_training_loop",
    "_init_training_state",
    "_prepare_for_training",
    "_run_epoch",
    "_finalize_training",
)


class Trainer(HoldfastMixin, transformers.Trainer):  # type: ignore[misc]
    """transformers.Trainer as a member of a job."""
