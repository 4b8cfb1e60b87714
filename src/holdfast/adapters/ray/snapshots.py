"""Ray Train at level 1: a worker's state in Holdfast's tiers, for the workers that Ray starts after a failure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
import ray.train

from holdfast.adapters.snapshots import DeferredState, Saver, random_state, set_random_state
from holdfast.adapters.versions import RAY
from holdfast.errors import UsageError


class Snapshots:
    """Saves a worker's state each few steps, and finds the newest, in the function that a `TorchTrainer` runs:

        def train(config):
            model = ray.train.torch.prepare_model(build())
            snapshots = Snapshots({"model": model, "optimizer": optimizer}, every=10)
            for step in range(snapshots.newest() or 0, 1000):
                ...
                snapshots.save(step + 1)

        TorchTrainer(train, run_config=RunConfig(failure_config=FailureConfig(max_failures=3)), ...).fit()

    Ray starts and restarts the processes, so there is no agent of Holdfast's, and its memory does not outlive a worker. A
    snapshot is copied into the worker's memory, and written from there to the run's storage while training goes on.
    """

    def __init__(self, state: Mapping[str, Any], every: int, to: str | None = None) -> None:
        """
        Args:
            state: as for `holdfast.checkpoint.save`: models, optimizers, schedulers, and values of your own.
            every: steps between two snapshots.
            to: where to, see `holdfast.checkpoint.save`; by default a folder in the run's storage, where that is a path.

        Raises:
            UsageError: outside of a worker of Ray Train; a version of Ray that is not supported; a storage that is no path;
                or no number of steps.
        """
        RAY.check(ray.__version__, "Snapshots")
        self._saver = Saver(every, to or _in_the_runs_storage())
        self._state = dict(state)

    def newest(self) -> int | None:
        """Loads the newest snapshot that all ranks have; call it on every rank. Its step; None: there is none, and the training
        begins.

        Raises:
            StateError: snapshots are there, but of another model, or none could be read.
        """
        generators = DeferredState()
        found = self._saver.load({**self._state, "random": generators})
        if found is not None:
            set_random_state(generators.value)
        else:
            self._saver.expect(self._state)
        return found

    def save(self, step: int) -> bool:
        """Saves, where it is time; call it on every rank after each step, when all of it is done.

        Args:
            step: steps so far.

        Returns:
            Whether it saved.
        """
        if not self._saver.due(step):
            return False
        return self._saver.save({**self._state, "random": DeferredState(random_state())}, step)


def _in_the_runs_storage() -> str:
    if not ray.is_initialized():
        raise UsageError("Snapshots: create it in the function that a TorchTrainer runs on its workers")
    storage = ray.train.get_context().get_storage()
    where = getattr(storage, "storage_filesystem", None)
    if getattr(where, "type_name", None) != "local":
        kind = getattr(where, "type_name", type(where).__name__)
        raise UsageError(
            f"Snapshots: the run's storage is {kind}; pass Snapshots(..., to='s3://bucket/run,every=1') or a shared "
            "folder"
        )
    return f"{Path(storage.experiment_fs_path) / 'holdfast'},every=1,keep=2"
