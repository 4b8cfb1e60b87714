"""Where Lightning's loops stand, as protected state."""

from __future__ import annotations

import copy
from typing import Any

from lightning.pytorch.trainer import call

OPTIMIZER = "epoch_loop.automatic_optimization.optim_progress"
SCHEDULERS = "epoch_loop.scheduler_progress"
"""Names of counters in what Lightning saves of its loops."""


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
        self._fetched: dict[str, Any] | None = None
        self.outstanding = False

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors."""
        # The counters are live objects; a snapshot is read while the loops go on.
        loops = copy.deepcopy(self._trainer.fit_loop.state_dict())
        return {"loops": loops, "callbacks": call._call_callbacks_state_dict(self._trainer)}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Keeps saved values for `resume` and `has_fetched_step`: here the loops are not there yet, or within a batch."""
        self._fetched = saved

    def resume(self) -> None:
        """A newcomer's loops go on from the saved values, as they do from a checkpoint in the middle of an epoch."""
        saved, self._fetched = self._fetched, None
        if saved is None:
            return
        self._trainer.fit_loop.load_state_dict(saved["loops"])
        call._call_callbacks_load_state_dict(self._trainer, {"callbacks": saved["callbacks"]})
        # Within a commit the optimizer's step is counted and its batch is not. The loops then take that batch again: they
        # get it as done, and only do what follows it. In every other state both counts are equal, or the batch is one
        # that was begun and not committed.
        self.outstanding = self._steps() > self._trainer.fit_loop.epoch_loop.batch_progress.total.completed

    def has_fetched_step(self) -> bool:
        """Whether the others committed the step of the batch that the loops are in, and its state was fetched from them.

        That is so where the update failed on this worker alone. Its loops and callbacks stand before what follows the
        step, whatever the others have done since; so only what the commit counts is taken over.

        Raises:
            RuntimeError: the state is of another step, to which Lightning's loops cannot go within a batch. A process that
                begins anew can: its loops are not there yet.
        """
        saved, self._fetched = self._fetched, None
        if saved is None:
            return False
        loop = self._trainer.fit_loop.epoch_loop
        batches = int(loop.batch_progress.total.completed)
        fetched = int(saved["loops"][OPTIMIZER]["optimizer"]["step"]["total"]["completed"])
        if fetched not in (batches, batches + 1):
            raise RuntimeError(
                f"the update of step {batches} failed here, and the newest state of the job is that after {fetched} steps: "
                "this worker ends, and another one takes its place"
            )
        loop.automatic_optimization.optim_progress.load_state_dict(saved["loops"][OPTIMIZER])
        loop.scheduler_progress.load_state_dict(saved["loops"][SCHEDULERS])
        return fetched > batches

    def _steps(self) -> int:
        return int(self._trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer_steps)
