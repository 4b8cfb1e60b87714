"""What Lightning keeps beside module, optimizer and schedulers, as protected state: its loops' counts, and what callbacks, the
module and the datamodule would put into a checkpoint.

Hooks change it after a commit, on one worker earlier than on another, and maybe not at all on one that is struck. So what is
protected is how it was in the commit; a newcomer takes that over, and then runs the hooks that follow.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import Any

import lightning
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.model_helpers import is_overridden

from holdfast.train.step import Step

OPTIMIZER = "epoch_loop.automatic_optimization.optim_progress"
SCHEDULERS = "epoch_loop.scheduler_progress"
"""Names of counters in what Lightning saves of its loops."""

NOT_KEPT = (
    "hparams_name",
    "hparams_type",
    "hyper_parameters",
    "datamodule_hparams_name",
    "datamodule_hyper_parameters",
    "optimizer_states",
    "lr_schedulers",
    "loops",
)
"""Of what Lightning gives `on_save_checkpoint`: protected in another way, or made by the script at every start."""
LIVE = "\0holdfast: in the module"
"""In the place of a tensor of the module itself, which is protected already."""


class LoopProgress:
    """Protected under `trainer`: the loops' own counters.

    Attributes:
        changes_between_steps: what follows a step (hooks, validation, the end of an epoch) changes this, alike on every
            worker.
        outstanding: what follows the newest committed step was not done yet where this state was taken.
    """

    changes_between_steps = True

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._fetched: dict[str, Any] | None = None
        self._kept: dict[str, Any] | None = None
        self.outstanding = False
        self.loss = 0.0

    def keep(self, step: Step) -> None:
        """Part of every commit: what there is now is what a newcomer takes over."""
        self._kept = {"loops": self._loops(), "loss": step.loss}

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors, as of the newest commit."""
        return self._kept if self._kept is not None else {"loops": self._loops(), "loss": 0.0}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Keeps saved values for `resume` and `has_fetched_step`: here the loops are not there yet, or within a batch."""
        self._fetched = self._kept = saved

    def resume(self) -> None:
        """A newcomer's loops go on from the saved values, as they do from a checkpoint in the middle of an epoch."""
        saved, self._fetched = self._fetched, None
        if saved is None or not _updates(saved):
            return
        self._trainer.fit_loop.load_state_dict(saved["loops"])
        self.loss = float(saved["loss"])
        # Within a commit the optimizer's step is counted and its batch is not. The loops then take that batch again, and
        # only do what follows it.
        self.outstanding = True

    def outputs(self) -> dict[str, Any]:
        """For the hooks that follow the commit, in the place of what the `training_step` of another worker returned: the
        step's loss, which is the same on all of them."""
        return {"loss": torch.tensor(self.loss, device=self._trainer.strategy.root_device)}

    def has_fetched_step(self) -> bool:
        """Whether the others committed the step of the batch that the loops are in, and its state was fetched from them.

        That is so where the update failed on this worker alone. Its loops and callbacks stand before what follows the
        step, as theirs did in the commit; so only what the commit counts is taken over.

        Raises:
            RuntimeError: the state is of another step, to which Lightning's loops cannot go within a batch. A process that
                begins anew can: its loops are not there yet.
        """
        saved, self._fetched = self._fetched, None
        if saved is None:
            return False
        loop = self._trainer.fit_loop.epoch_loop
        updates = int(loop.automatic_optimization.optim_progress.optimizer_steps)
        fetched = _updates(saved)
        if fetched not in (updates, updates + 1):
            raise RuntimeError(
                f"the update of step {updates} failed on this worker, and the newest state of the job is that after "
                f"{fetched} steps: this worker ends, and another one replaces it"
            )
        if fetched == updates:
            return False
        loop.automatic_optimization.optim_progress.load_state_dict(saved["loops"][OPTIMIZER])
        loop.scheduler_progress.load_state_dict(saved["loops"][SCHEDULERS])
        return True

    def _loops(self) -> dict[str, Any]:
        # Of dataclasses, which are copied for it.
        state: dict[str, Any] = self._trainer.fit_loop.state_dict()
        return state


def _updates(saved: Mapping[str, Any]) -> int:
    return int(saved["loops"][OPTIMIZER]["optimizer"]["step"]["total"]["completed"])


class CallbackState:
    """Protected under `callbacks`: what callbacks, the module and the datamodule export for checkpoints.

    Attributes:
        compared: values of one worker may be among them, such as a loss that a callback has seen; replicas are not apart
            for that.
        changes_between_steps: as of the newest commit, so it does not; the object as such does.
        files: the checkpoint files that the job knows.
    """

    compared = False
    changes_between_steps = True

    def __init__(self, trainer: Any, alone: bool) -> None:
        """alone: nobody takes it over, so nothing is kept."""
        self._trainer, self._alone = trainer, alone
        self._saved: dict[str, Any] = {}
        self._fetched: dict[str, Any] | None = None
        self.files: set[str] = set()
        module, callbacks = trainer.lightning_module, trainer.callbacks
        self._has_hooks = is_overridden("on_save_checkpoint", module) or any(
            is_overridden("on_save_checkpoint", callback, parent=Callback) for callback in callbacks
        )

    def keep(self, step: Step) -> None:
        """Part of every commit."""
        if self._alone:
            return
        trainer = self._trainer
        if self._has_hooks:
            checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
            precision = type(trainer.precision_plugin).__qualname__
            checkpoint = {k: v for k, v in checkpoint.items() if k not in (*NOT_KEPT, precision)}
        else:
            checkpoint = {"callbacks": call._call_callbacks_state_dict(trainer)}
        live = {
            (tensor.data_ptr(), tensor.shape, tensor.stride()): name
            for name, tensor in (trainer.lightning_module.state_dict().items() if self._has_hooks else ())
            if tensor.numel()
        }
        self._saved = {
            "checkpoint": _copied(checkpoint, live),
            "datamodule": _copied(self._of_datamodule(), {}),
            "metrics": _copied(dict(trainer._logger_connector._callback_metrics), {}),
            "files": sorted(self.files),
        }

    def state_dict(self) -> dict[str, Any]:
        """As of the newest commit; nothing before the first, when hooks that make what they save have not run yet."""
        return self._saved

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Keeps saved values for `resume`."""
        self._fetched = self._saved = saved

    def knows(self, file: Any) -> bool:
        """Whether there is a checkpoint file of this path, as far as the job knows."""
        return os.path.normpath(file) in self.files

    def resume(self) -> None:
        """A newcomer's callbacks and module take it over, in the order in which Lightning restores a checkpoint."""
        saved, self._fetched = self._fetched, None
        if not saved:
            return
        trainer, module = self._trainer, self._trainer.lightning_module
        checkpoint = _restored(saved["checkpoint"], module.state_dict())
        checkpoint.setdefault("pytorch-lightning_version", lightning.__version__)
        if self._has_hooks:
            checkpoint["optimizer_states"] = [optimizer.state_dict() for optimizer in trainer.optimizers]
            checkpoint["lr_schedulers"] = [c.scheduler.state_dict() for c in trainer.lr_scheduler_configs]
            checkpoint["loops"] = trainer._checkpoint_connector._get_loops_state_dict()
        if saved["datamodule"]:
            call._call_lightning_datamodule_hook(trainer, "load_state_dict", saved["datamodule"])
        call._call_lightning_module_hook(trainer, "on_load_checkpoint", checkpoint)
        call._call_callbacks_on_load_checkpoint(trainer, checkpoint)
        call._call_callbacks_load_state_dict(trainer, checkpoint)
        trainer._logger_connector._callback_metrics.update(saved["metrics"])
        self.files = set(saved["files"])

    def _of_datamodule(self) -> dict[str, Any]:
        datamodule = self._trainer.datamodule
        if datamodule is None or not is_overridden("state_dict", datamodule, parent=LightningDataModule):
            return {}
        found: dict[str, Any] = call._call_lightning_datamodule_hook(self._trainer, "state_dict")
        return found


def _copied(value: Any, live: Mapping[Any, str]) -> Any:
    """Of its own memory; what is a tensor of the module by its name."""
    if isinstance(value, torch.Tensor):
        known = live.get((value.data_ptr(), value.shape, value.stride()))
        return (LIVE, known) if known is not None else value.detach().clone()
    if isinstance(value, Mapping):
        return {key: _copied(part, live) for key, part in value.items()}
    if isinstance(value, list | tuple):
        parts = [_copied(part, live) for part in value]
        return tuple(parts) if isinstance(value, tuple) else parts
    return copy.copy(value)


def _restored(value: Any, live: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, tuple) and len(value) == 2 and value[0] == LIVE:
        return live[value[1]]
    if isinstance(value, dict):
        return {key: _restored(part, live) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_restored(part, live) for part in value)
    return value


class OptimizerSettings:
    """What the optimizer is set to, such as its learning rate.

    Hooks, and schedulers that go by a metric, set it after a commit. That is no part of the commit's state, and takes effect in
    the next step: then it is put in place, and taken back where the step is struck, or ends.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._own: list[dict[str, Any]] | None = None
        self.committed()

    def committed(self) -> None:
        """The optimizer is as a commit left it."""
        self._committed, self._own = self._now(), None

    def put_back(self) -> None:
        """As the newest commit left it; until `resume`."""
        if self._own is None:
            self._own = self._now()
            self._set(self._committed)

    def resume(self) -> None:
        """As it was before `put_back`."""
        if self._own is not None:
            self._set(self._own)
            self._own = None

    def _now(self) -> list[dict[str, Any]]:
        return [{k: v for k, v in group.items() if k != "params"} for group in self._optimizer.param_groups]

    def _set(self, groups: list[dict[str, Any]]) -> None:
        for group, values in zip(self._optimizer.param_groups, groups, strict=True):
            group.update(values)
