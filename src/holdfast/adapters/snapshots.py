"""Level 1, whatever the framework: when its state is saved with `holdfast.checkpoint`, and whether it is loaded."""

from __future__ import annotations

import random
from collections.abc import Mapping, MutableMapping
from typing import Any, cast

import numpy as np
import torch

from holdfast import checkpoint
from holdfast.adapters import world
from holdfast.checkpoint import api
from holdfast.checkpoint.loading import flatten
from holdfast.errors import UsageError


class Saver:
    """Saves a state each few steps, and finds the newest."""

    def __init__(self, every: int, to: str | None, level_2: str | None = None) -> None:
        """
        Args:
            every: steps between two snapshots.
            to: without `holdfast run`: where to, see `holdfast.checkpoint.save`.
            level_2: the module that takes a script of this framework to level 2, if there is one.

        Raises:
            UsageError: no number of steps; or that module was imported.
        """
        if every < 1:
            raise UsageError(f"Snapshots(every={every}): every must be a number of steps, at least 1")
        if level_2 is not None and world.entered():
            raise UsageError(
                f"Snapshots: {level_2} is imported, which runs the job at level 2 and saves the state itself; remove "
                f"either Snapshots or the import of {level_2}"
            )
        self._every, self._to = every, to
        self._step = 0

    def check(self, state: Mapping[str, Any]) -> None:
        """Before anything is trained: raises UsageError for a value that cannot be saved, with its path."""
        flatten(state, 0)

    def expect(self, state: Mapping[str, Any]) -> None:
        """Before the first step: if nothing was loaded, the memory of the first snapshot is brought in while training goes on."""
        if not self._step:
            api.expect(state, api.backend_for(self._to))

    def due(self, step: int) -> bool:
        """Whether a state of this step is to be saved. Where several updates count as steps, a multiple may be jumped
        over."""
        # By the multiples that lie between the two steps, not by the remainder: where several updates count
        # as one call, the exact multiple may never be seen.
        return step // self._every > self._step // self._every

    def save(self, state: Mapping[str, Any], step: int) -> bool:
        """Saves a state; call it on every rank. False: it was skipped, see `holdfast.checkpoint.save`.

        Raises:
            UsageError: a value that cannot be saved, or nowhere to save to.
        """
        self._step = step
        return checkpoint.save(state, step, to=self._to)

    def load(self, state: MutableMapping[str, Any], own: int | None = None) -> int | None:
        """Loads the newest snapshot that all ranks have; call it on every rank. Its step, or None.

        Args:
            state: as for `holdfast.checkpoint.load`.
            own: the step of a checkpoint of the framework's own, which is better than a snapshot that is not newer.

        Raises:
            StateError: snapshots are there, but of another state, or none could be read.
        """
        found = checkpoint.load(state, source=self._to, newer_than=own)
        # From what was loaded: a run that goes on at step 130 saves next at 150 with `every=50`, as the run
        # before it would have.
        self._step = found or own or 0
        return found


class DeferredState:
    """Saved as it is; keeps what is loaded, because its owner is not there yet, or takes it in another way."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> Any:
        """What is saved."""
        return self.value

    def load_state_dict(self, saved: Any) -> None:
        """Keeps it."""
        self.value = saved


def random_state() -> dict[str, Any]:
    """Where this process's random generators are: Python's, NumPy's, torch's and that of its GPU."""
    kind, words, *rest = cast("tuple[Any, ...]", np.random.get_state())
    return {
        "python": random.getstate(),
        "numpy": (kind, words.tolist(), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_random_state(saved: Mapping[str, Any]) -> None:
    """Puts the generators where `random_state` found them."""
    random.setstate(saved["python"])
    kind, words, *rest = saved["numpy"]
    np.random.set_state((kind, np.array(words, dtype=np.uint32), *rest))
    torch.set_rng_state(saved["torch"])
    # Only where both have a GPU. A state that moves to a machine without one still trains, with other random
    # numbers from there on.
    if saved["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved["cuda"])
