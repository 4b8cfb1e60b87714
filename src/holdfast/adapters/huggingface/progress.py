"""Where a Trainer stands, as protected state: what of it must be the same on every worker, and survive."""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers.trainer_callback import ExportableState

COMMITTED = ("epoch", "global_step")
FOLLOWED = ("best_metric", "best_global_step")
"""Of TrainerState: what a commit changes, and what is changed by what follows a step. The others follow from the arguments,
or are this process's own (`is_world_process_zero`)."""

ALIKE = frozenset({"epoch", "grad_norm", "learning_rate", "loss", "step", "train_loss"})
EVALUATED = "eval_"
"""Names of logged values, and how they begin, that every worker has alike: of the step's commit, and of evaluations, which
each worker does over all samples. What else is logged (TRL's rewards and entropies) comes from a worker's own samples."""

TOKENS = "_total_train_tokens"
"""Where TRL's trainers count what they have trained on, for `num_tokens` in their logs."""

COUNTING = frozenset({"SFTTrainer", "DPOTrainer", "RewardTrainer"})
"""Those that count what a batch has, before they change it."""

CLOCKED = ("_runtime", "_per_second")
"""How the names of logged values end that were read from this process's clock: no two workers have the same."""


class TrainerProgress:
    """Protected under `trainer`.

    Attributes:
        changes_between_steps: what follows a step changes this, too: each worker does the same with the same numbers.
        outstanding: what follows the newest committed step (callbacks, logs, evaluation, a checkpoint) was not done yet.
        loss: of the newest committed step.
        grad_norm: of it, before clipping; None where fp16 has skipped its update.
        learning_rate: with which it was made.
        tokens: of all workers, in all committed steps, where the trainer counts them as TRL's do; else None.
    """

    changes_between_steps = True

    def __init__(self, trainer: Any) -> None:
        """trainer: a Trainer with `HoldfastMixin`."""
        self._trainer = trainer
        # The mark is part of the state. A snapshot is taken with the commit, so whoever goes on from one finds it set and
        # does what follows the step; whoever fetches the state later from a survivor that has done it finds it cleared,
        # and does not log, or count towards early stopping, a second time.
        self.outstanding = False
        self.loss = 0.0
        self.grad_norm: float | None = None
        self.learning_rate: float | None = None
        self.tokens = 0 if _counts_tokens(trainer) else None
        self._losses: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Plain values. Of callbacks it holds what they export."""
        trainer = self._trainer
        return {
            "outstanding": self.outstanding,
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "learning_rate": self.learning_rate,
            **({} if self.tokens is None else {"tokens": self.tokens}),
            "state": {name: getattr(trainer.state, name) for name in COMMITTED + FOLLOWED},
            # Values of a worker's own would make replicas differ that are equal, and a snapshot's copies as well.
            "history": [
                {name: value for name, value in logs.items() if _is_alike(name)}
                for logs in trainer.state.log_history
            ],
            "losses": {
                "since_log": float(trainer._tr_loss),
                "before": float(trainer._total_loss_scalar),
                "last_log": trainer._globalstep_last_logged,
            },
            "callbacks": [exporter.state() for exporter in self._exporters()],
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Takes over saved values.

        Raises:
            ValueError: they were saved with other callbacks.
        """
        trainer, exporters = self._trainer, self._exporters()
        step = trainer._holdfast_step
        if step is not None and saved["state"]["global_step"] == step.index + 1:
            # The update of this very step failed on this worker alone. Here everything is as it was before the commit, and
            # what follows the step is still to be done, whatever the giver of the state has done since.
            if trainer.state.global_step == step.index:
                self._take_commit(saved)
                self.add_loss(step.index)
            return
        if len(exporters) != len(saved["callbacks"]):
            raise ValueError(
                f"the saved state has {len(saved['callbacks'])} callbacks that export their state, but this trainer "
                f"has {len(exporters)}: pass the same callbacks to the trainer, in the same order"
            )
        self._take_commit(saved)
        self.outstanding = saved["outstanding"]
        for name in FOLLOWED:
            setattr(trainer.state, name, saved["state"][name])
        trainer.state.log_history = list(saved["history"])
        self._losses = saved["losses"]
        self.put_losses()
        for exporter, exported in zip(exporters, saved["callbacks"], strict=True):
            for name, value in (exported["args"] | exported["attributes"]).items():
                setattr(exporter, name, value)

    def _take_commit(self, saved: dict[str, Any]) -> None:
        self.outstanding = True
        self.loss, self.grad_norm = saved["loss"], saved["grad_norm"]
        self.learning_rate = saved["learning_rate"]
        if self.tokens is not None:
            self.tokens = saved.get("tokens", 0)
            self.put_tokens()
        for name in COMMITTED:
            setattr(self._trainer.state, name, saved["state"][name])

    def add_loss(self, steps_before: int) -> None:
        """Adds the newest step's to what is logged next. As in the Trainer, one that is not finite (fp16 overflows) counts as
        the mean of those before it."""
        trainer, loss = self._trainer, self.loss
        if trainer.args.logging_nan_inf_filter and not math.isfinite(loss):
            loss = trainer._tr_loss / (1 + steps_before - trainer._globalstep_last_logged)
        trainer._tr_loss += loss

    def put_tokens(self) -> None:
        """What the trainer says of them next. By itself it counts those of this worker, again where a step is computed
        again."""
        if self.tokens is not None:
            setattr(self._trainer, TOKENS, self.tokens)
            self._trainer._metrics["train"]["num_tokens"] = [self.tokens]

    def put_losses(self) -> None:
        """The sums of losses that are logged next. The Trainer clears them when its loop begins, which is after the state
        came: so they are put in once more then."""
        trainer, losses = self._trainer, self._losses or {"since_log": 0.0, "before": 0.0, "last_log": 0}
        trainer._tr_loss = torch.tensor(losses["since_log"], dtype=torch.float64)
        trainer._total_loss_scalar = losses["before"]
        trainer._globalstep_last_logged = losses["last_log"]
        trainer._initial_global_step = 0

    def _exporters(self) -> list[ExportableState]:
        callbacks = [*self._trainer.callback_handler.callbacks, self._trainer.control]
        return [callback for callback in callbacks if isinstance(callback, ExportableState)]


def _counts_tokens(trainer: Any) -> bool:
    return hasattr(trainer, TOKENS) and any(kind.__name__ in COUNTING for kind in type(trainer).__mro__)


def _is_alike(name: str) -> bool:
    return (name in ALIKE or name.startswith(EVALUATED)) and not name.endswith(CLOCKED)
