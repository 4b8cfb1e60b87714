"""DeepSpeed at level 1: what an engine saves of itself, in Holdfast's memory tier instead of files."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import LossScalerBase

from holdfast.adapters.snapshots import DeferredState, Saver, random_state, set_random_state
from holdfast.adapters.versions import DEEPSPEED
from holdfast.errors import UsageError

TAG = "snapshot"
NOT_LOADED = ("ds_config", "param_shapes", "frozen_param_shapes", "param_slice_mappings")
"""Of what an engine saves: for DeepSpeed's tools that read its files. Nothing of it is read by `load_checkpoint`, and it may be
objects of any kind."""
SCALER = "loss_scaler"


class Snapshots:
    """Saves a DeepSpeed engine's state with `holdfast.checkpoint` each few steps, and goes on from the newest.

        engine, optimizer, loader, scheduler = deepspeed.initialize(...)
        snapshots = Snapshots(engine, every=50)
        for step in range(snapshots.newest() or 0, 1000):
            loss = engine(batch(step))
            engine.backward(loss)
            engine.step()
            snapshots.save()

    The engine itself says what its state is, and takes it back: `save_checkpoint` and `load_checkpoint` are called with a
    checkpoint engine that keeps what it is given, in the place of one that writes files. Each rank saves its own
    partition. The random generators of each rank are saved as well.
    """

    def __init__(self, engine: Any, every: int, to: str | None = None) -> None:
        """
        Args:
            engine: what `deepspeed.initialize` returned first.
            every: optimizer steps between two snapshots.
            to: without `holdfast run`: where to, see `holdfast.checkpoint.save`.

        Raises:
            UsageError: a version of DeepSpeed that is not supported; experts, a pipeline, or states on NVMe, whose files
                DeepSpeed writes by other ways; or no number of steps.
        """
        DEEPSPEED.check(deepspeed.__version__, "Snapshots")
        self._saver = Saver(every, to)
        wrong = {
            "a model with experts": engine.has_moe_layers,
            "a PipelineEngine": hasattr(engine, "is_pipe_partitioned"),
            "an optimizer on NVMe": engine.zero_nvme_offload_optimizer(),
            "load_universal": engine.load_universal_checkpoint(),
        }
        for what in (name for name, there in wrong.items() if there):
            raise UsageError(
                f"Snapshots: the state of {what} is not completely passed to checkpoint engines; save with "
                "engine.save_checkpoint, which works at level 0"
            )
        self._engine = engine

    def newest(self, own: int | None = None) -> int | None:
        """Loads the newest snapshot that all ranks have; call it on every rank. The engine's `global_steps` then; None: there is
        none, and the training begins. `client_state` is what `save` was given.

        Args:
            own: the `global_steps` of a checkpoint that `engine.load_checkpoint` has loaded: only a newer snapshot is loaded.

        Raises:
            StateError: snapshots are there, but of another state, or none could be read.
            UsageError: the newest is of another number of ranks, among which DeepSpeed's partitions cannot be divided anew.
        """
        files, generators, ranks = DeferredState(), DeferredState(), DeferredState()
        found = self._saver.load({"deepspeed": files, "random": generators, "ranks": ranks}, own=own)
        if found is None:
            return None
        engine = self._engine
        # Refused before DeepSpeed sees it: it would load the partitions of the first ranks and go on with a
        # part of the optimizer's state.
        if ranks.value != engine.world_size:
            raise UsageError(
                f"Snapshots: the snapshot of step {found} was made by {ranks.value} ranks, but now there are "
                f"{engine.world_size}; DeepSpeed's partitions can only be loaded by the same number of ranks"
            )
        memory = _Memory(_with_scaler(files.value, engine))
        with tempfile.TemporaryDirectory(prefix="holdfast-") as folder, self._saving_to(memory):
            (Path(folder) / TAG).mkdir()
            for name in (
                memory.files
            ):  # the engine looks which files there are, and reads them by the checkpoint engine
                (Path(folder) / TAG / name).touch()
            _, self.client_state = engine.load_checkpoint(folder, tag=TAG)
        set_random_state(generators.value)
        return found

    def save(self, client_state: Mapping[str, Any] | None = None) -> bool:
        """Saves, where it is time; call it on every rank after each `engine.step()`.

        Args:
            client_state: plain values and tensors of the script's own, as for `engine.save_checkpoint`.

        Returns:
            Whether it saved. Not between two updates, where gradients that are kept over several batches would be lost.
        """
        engine = self._engine
        step = int(engine.global_steps)
        # Between two updates gradients that are kept over several batches are in no state that DeepSpeed
        # saves: a snapshot there would lose them, and the next update would be of fewer samples.
        if not self._saver.due(step) or engine.micro_steps % engine.gradient_accumulation_steps():
            return False
        memory = _Memory({})
        with self._saving_to(memory):
            engine.save_checkpoint(
                "holdfast", tag=TAG, client_state=dict(client_state or {}), save_latest=False
            )
        state = {
            "deepspeed": DeferredState(_plain(memory.files)),
            "random": DeferredState(random_state()),
            "ranks": DeferredState(int(engine.world_size)),
        }
        return self._saver.save(state, step)

    @contextmanager
    def _saving_to(self, memory: _Memory) -> Iterator[None]:
        """Every rank saves all that it needs, also what is the same on all of them: so each finds it where it is."""
        engine = self._engine
        names = ("checkpoint_engine", "save_non_zero_checkpoint", "_copy_recovery_script")
        # Put back in any case: a save of the script's own, into files, uses the same three, and would go into
        # memory that nobody reads.
        before = {name: getattr(engine, name) for name in names}
        engine.checkpoint_engine, engine.save_non_zero_checkpoint = memory, True
        engine._copy_recovery_script = lambda folder: None
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(engine, name, value)


class _Memory(CheckpointEngine):  # type: ignore[misc] # it has no types
    """DeepSpeed's own seam for where checkpoints go: here they stay, by their names."""

    def __init__(self, files: dict[str, Any]) -> None:
        super().__init__()
        self.files = files

    def create(self, info: Any) -> None:
        """Nothing is to be made."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Nothing is to be made."""

    def save(self, state_dict: Any, path: str) -> None:
        """Keeps it."""
        self.files[Path(path).name] = state_dict

    def load(self, path: str, map_location: Any = None) -> Any:
        """What was kept under this name."""
        return self.files[Path(path).name]

    def commit(self, info: Any) -> bool:
        """All is there."""
        return True

    def preserves_storage_sharing(self) -> bool:
        """Tensors are copied one by one, so views of a large one need not be cloned."""
        return False


def _plain(value: Any) -> Any:
    """What DeepSpeed saves, of plain values and tensors."""
    if isinstance(value, LossScalerBase):
        return dict(vars(value))
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items() if key not in NOT_LOADED}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(part) for part in value]
    return value


def _with_scaler(files: dict[str, Any], engine: Any) -> dict[str, Any]:
    """The loss scaler is an object: the engine's own, with the saved values."""
    for file in files.values():
        state = file.get("optimizer_state_dict") or {}
        if isinstance(state.get(SCALER), dict):
            # Values from the snapshot, the class from the engine. A snapshot never says which class is made:
            # it holds plain values, and whoever could write one could otherwise choose the code that runs.
            scaler = copy.copy(engine.optimizer.loss_scaler)
            vars(scaler).update(state[SCALER])
            state[SCALER] = scaler
    return files
