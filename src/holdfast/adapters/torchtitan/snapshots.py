"""torchtitan at level 1: its checkpoint manager, with snapshots in Holdfast's memory tier between its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.tools.logging import logger

from holdfast.adapters.snapshots import DeferredState, Saver, random_state, set_random_state
from holdfast.adapters.versions import TORCHTITAN
from holdfast.errors import UsageError


class Snapshots(CheckpointManager):  # type: ignore[misc] # it has no types here
    """torchtitan's own manager, which also saves with `holdfast.checkpoint` each few steps, and loads what is newest.

        config.checkpoint = Snapshots.Config(enable=True, every=10, interval=500)

    Saved is what torchtitan's checkpoints have, and the random generators of each rank. torchtitan's own checkpoints are
    written and read as before, each `interval` steps.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        """torchtitan's, and how often a snapshot is taken."""

        every: int = 10
        """Steps between two snapshots."""

        to: str | None = None
        """Without `holdfast run`: where to, see `holdfast.checkpoint.save`."""

    def __init__(self, config: Config, **more: Any) -> None:
        """
        Raises:
            UsageError: a version of torchtitan that is not supported; a model of several pipeline stages; or no number of
                steps.
        """
        TORCHTITAN.check(metadata.version("torchtitan"), "Snapshots")
        self.enable = False  # until this manager is complete: torchtitan closes one whose making failed
        if len(more["model_parts"]) > 1:
            raise UsageError(
                "Snapshots: several stages of a pipeline on one worker are not supported; use torchtitan's "
                "CheckpointManager, which works at level 0"
            )
        self._saver = Saver(config.every, config.to)
        super().__init__(config, **more)

    @torch.no_grad()
    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        # The last step is torchtitan's own: what it writes then is the result of the training.
        if not self.load_only and not last_step and self._saver.due(curr_step):
            self._saver.save({**self._holdfast_states(), "random": DeferredState(random_state())}, curr_step)
        saved: bool = super()._save(curr_step, last_step)
        return saved

    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        # A step that a person names is one of torchtitan's checkpoints: a snapshot must not take its place.
        if step == -1:
            own, generators = self._find_load_step(), DeferredState()
            found = self._saver.load(
                {**self._holdfast_states(), "random": generators}, own=None if own < 0 else own
            )
            if found is not None:
                set_random_state(generators.value)
                logger.info(f"Loaded the snapshot of step {found}.")
                return True
        loaded: bool = super()._load(step)
        return loaded

    def _holdfast_states(self) -> dict[str, Any]:
        return {name: _Plain(thing) for name, thing in self.states.items() if thing is not None}


class _Plain:
    """A part of the state; bytes that it holds, such as where a data loader is, become tensors and back."""

    def __init__(self, thing: Any) -> None:
        self._thing = thing

    def state_dict(self) -> Any:
        return _to_tensors(self._thing.state_dict())

    def load_state_dict(self, saved: Any) -> None:
        self._thing.load_state_dict(_to_bytes(saved))


MARK = "holdfast bytes"


def _to_tensors(value: Any) -> Any:
    if isinstance(value, bytes):
        # A copy that can be written: torch warns of a tensor over bytes, which nobody may change.
        return {MARK: torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.empty(0)}
    if isinstance(value, dict):
        return {name: _to_tensors(part) for name, part in value.items()}
    return value


def _to_bytes(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {MARK}:
            return bytes(value[MARK].to(torch.uint8).numpy())
        return {name: _to_bytes(part) for name, part in value.items()}
    return value
