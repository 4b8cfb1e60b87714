"""Where Lightning's loops stand, as protected state."""

from __future__ import annotations

import copy
from typing import Any

from lightning.pytorch.trainer import call


class LoopProgress:
    """Protected under `trainer`: the loops' own counters, and what callbacks export.

    Attributes:
        changes_between_steps: what follows a step (hooks, validation, the end of an epoch) changes this, alike on every
            worker.
        outstanding: what follows the newest committed step was not done yet where this state was taken.
    """

    changes_between_steps = True

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._restored: dict[str, Any] | None = None
        self.outstanding = False

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors."""
        # The counters are live objects; a snapshot is read while the loops go on.
        loops = copy.deepcopy(self._trainer.fit_loop.state_dict())
        return {"loops": loops, "callbacks": call._call_callbacks_state_dict(self._trainer)}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Keeps saved values for `resume`: they come while the loops are not there yet."""
        self._restored = saved

    def resume(self) -> None:
        """Lightning's loops go on from the saved values as they do from a checkpoint in the middle of an epoch."""
        if self._restored is None:
            return
        loops = self._restored["loops"]
        self._trainer.fit_loop.load_state_dict(loops)
        call._call_callbacks_load_state_dict(self._trainer, {"callbacks": self._restored["callbacks"]})
        # Within a commit the optimizer's step is counted and its batch is not. The loops then take that batch again: they
        # get it as done, and only do what follows it. In every other state both counts are equal, or the batch is one
        # that was begun and not committed.
        batches = loops["epoch_loop.batch_progress"]["total"]["completed"]
        steps = loops["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]["total"][
            "completed"
        ]
        self.outstanding = steps > batches
