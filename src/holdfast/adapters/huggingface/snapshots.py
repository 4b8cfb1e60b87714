"""Hugging Face's Trainer at level 1: its state in Holdfast's memory tier, and its own way to resume from there."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState, TrainerState

from holdfast.adapters.snapshots import DeferredState, Saver, random_state, set_random_state
from holdfast.errors import UsageError

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainingArguments

STATE_FILE = "trainer_state.json"
"""What the Trainer reads of a checkpoint by itself. The rest it asks its own methods for, which are answered here."""


class Snapshots(TrainerCallback):
    """Saves a trainer's state with `holdfast.checkpoint` each few steps, and lets `train` resume from the newest.

        snapshots = Snapshots(trainer, every=50)
        trainer.train(resume_from_checkpoint=snapshots.newest())

    Saved are the model, the optimizer, the scheduler, fp16's scaler, TrainerState, and the random generators of each rank. The
    Trainer itself finds its place in the data again, as with a checkpoint of its own.
    """

    def __init__(self, trainer: transformers.Trainer, every: int, to: str | None = None) -> None:
        """
        Args:
            trainer: any Trainer, in one process or with DDP.
            every: steps between two snapshots.
            to: without `holdfast run`: where to, see `holdfast.checkpoint.save`.

        Raises:
            UsageError: DeepSpeed or FSDP, whose state is not the model's and the optimizer's own; holdfast.transformers was
                imported; or no number of steps.
        """
        self._saver = Saver(every, to, level_2="holdfast.transformers")
        if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
            raise UsageError(
                "Snapshots: DeepSpeed and FSDP split the state over ranks; save with the Trainer's own checkpoints "
                "(save_steps, resume_from_checkpoint), which work at level 0"
            )
        self._trainer: Any = trainer
        # Of fp16, and on a GPU only. Without one a snapshot has no such name, as those of earlier versions.
        scaler = trainer.accelerator.scaler
        self._scaler = {} if scaler is None else {"scaler": scaler}
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        trainer.add_callback(self)

    def newest(self, own: str | None = None) -> str | None:
        """Loads the newest snapshot that all ranks have, for `train(resume_from_checkpoint=...)`; None: there is none, and
        the training begins.

        Args:
            own: a checkpoint of the Trainer's own, as `transformers.trainer_utils.get_last_checkpoint` finds it. It is
                what comes back where no snapshot is newer.

        Raises:
            StateError: snapshots are there, but of another model, or none could be read.
        """
        optimizer, scheduler, state, generators = (DeferredState() for _ in range(4))
        found = self._saver.load(
            {
                "model": self._trainer.model,
                "optimizer": optimizer,
                "scheduler": scheduler,
                "trainer": state,
                "random": generators,
                **self._scaler,
            },
            own=None if own is None else TrainerState.load_from_json(str(Path(own) / STATE_FILE)).global_step,
        )
        if found is None:
            return own
        self._folder = tempfile.TemporaryDirectory(prefix="holdfast-")
        TrainerState(**state.value).save_to_json(str(Path(self._folder.name) / STATE_FILE))
        self._answer("_load_from_checkpoint", lambda: None)  # the model has it already
        self._answer("_load_optimizer_and_scheduler", lambda: self._give(optimizer, scheduler))
        self._answer("_load_rng_state", lambda: set_random_state(generators.value))
        self._answer("_load_scaler", lambda: None)  # the scaler has it already
        return self._folder.name

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        """The optimizer is there, which it was not when a snapshot was looked for; and the Trainer has read its state."""
        if self._folder is not None:
            self._folder.cleanup()
        optimizer = getattr(self._trainer.optimizer, "optimizer", self._trainer.optimizer)
        self._saver.expect({"model": self._trainer.model, "optimizer": optimizer})

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        """Where the epoch's samples are dealt after the Trainer has set the generators, they must be as here."""
        self._save(state)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        """Logs, evaluation and callbacks of the step before are done. The next samples are read, and the Trainer sets the
        generators after that, too."""
        self._save(state)

    def _save(self, state: TrainerState) -> None:
        step = state.global_step
        if not self._saver.due(step):
            return
        trainer = self._trainer
        exported: dict[str, Any] = {}
        for callback in [*trainer.callback_handler.callbacks, trainer.control]:
            if isinstance(callback, ExportableState):
                exported.setdefault(type(callback).__name__, []).append(callback.state())
        fields = {
            **vars(state),
            "stateful_callbacks": {n: s if len(s) > 1 else s[0] for n, s in exported.items()},
        }
        self._saver.save(
            {
                "model": trainer.model,
                "optimizer": getattr(trainer.optimizer, "optimizer", trainer.optimizer),
                "scheduler": trainer.lr_scheduler,
                "trainer": DeferredState(fields),
                "random": DeferredState(random_state()),
                **self._scaler,
            },
            step,
        )

    def _give(self, optimizer: DeferredState, scheduler: DeferredState) -> None:
        self._trainer.optimizer.load_state_dict(optimizer.value)
        self._trainer.lr_scheduler.load_state_dict(scheduler.value)

    def _answer(self, name: str, give: Any) -> None:
        """The trainer asks for a part of a checkpoint: of ours, or of another one by its own method."""
        own = getattr(self._trainer, name)

        def asked(folder: str | None, *more: Any) -> None:
            # Only for the folder that `newest` made: the same methods also load a checkpoint of the Trainer's
            # own, such as the best one at the end.
            if self._folder is not None and folder == self._folder.name:
                give()
            else:
                own(folder, *more)

        setattr(self._trainer, name, asked)
