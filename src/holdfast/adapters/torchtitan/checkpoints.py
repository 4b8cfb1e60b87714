"""torchtitan's own checkpoint manager in a job: it reads what a training begins with, and writes what other tools read."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.checkpointer.base import DATALOADER, MODEL, ModelWrapper
from torchtitan.tools.logging import logger

from holdfast.errors import Damaged, UsageError
from holdfast.protocol.wire.stored import decode_file
from holdfast.tensors.dtensor_shards import local_of, start_of

OWNER = "job.json"
"""Beside torchtitan's checkpoints: an `Owner`."""
WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
"""What is in the name of a module, but not in those of its parameters in a state."""


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """Whose the checkpoints in a folder are."""

    version: int = 1
    job: str


class Checkpoints(CheckpointManager):  # type: ignore[misc] # it has no types here
    """torchtitan's, between two steps of a job.

    The model's first weights are read before the workers of a replica are connected, by each worker for itself. One replica
    writes. Nothing that is written is read again by the job: its own state is newer, and comes back without files.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        """torchtitan's: each manager must have a class of its own."""

    folder: str

    def __init__(self, config: Config, *, model_parts: list[torch.nn.Module], **more: Any) -> None:
        self.enable = False  # until it is complete: torchtitan closes one whose making failed
        # Of models that are there already. torchtitan would ask each for its state, and hooks of its own gather some of that
        # from workers who are not connected yet.
        super().__init__(config, model_parts=[], **more | {"dataloader": None})
        self.parts = model_parts
        self.hooks = StateHooks(model_parts)
        if not self.enable:
            return
        # Each micro-batch of a step has a stream of its own here, which follows from the step.
        del self.states[DATALOADER]

    def claim(self, job: str) -> None:
        """Says in the folder that its checkpoints are those of this job.

        Raises:
            UsageError: it has checkpoints that this job did not write, or cannot be written.
        """
        if not self.enable or self.load_only:
            return
        folder = Path(self.folder)
        # A newcomer writes nothing: the disk may be full by then.
        if (owner := _owner(folder)) == job:
            return
        if (step := self._find_load_step()) >= 0:
            whose = "a run without Holdfast" if owner is None else f"the job {owner!r}"
            raise UsageError(
                f"--checkpoint.folder: {folder} has checkpoints up to step {step} of {whose}, which this job would "
                "overwrite. Choose another folder. To start from those weights, use --checkpoint.initial_load_path "
                f"{folder}/step-{step}"
            )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # As a whole: all workers of the job come here at once, on one machine or several, and read what another one writes.
            work = folder / f".{OWNER}.{os.uname().nodename}.{os.getpid()}"
            work.write_bytes(msgspec.json.encode(Owner(job=job)))
            work.replace(folder / OWNER)
        except OSError as error:
            raise UsageError(f"--checkpoint.folder: {folder} cannot be written: {error}") from error

    def load_first(self) -> None:
        """The model's first weights, where --checkpoint.initial_load_path or initial_load_in_hf names them.

        Raises:
            UsageError: weights that are not there, or do not fit.
        """
        if not self.enable or not (self.initial_load_path or self.initial_load_in_hf):
            return
        self.states[MODEL] = _Apart(self.parts, self.hooks)
        try:
            self._load()
        except (ValueError, RuntimeError, KeyError, CheckpointException) as error:
            given = self.initial_load_path or "--hf_assets_path"
            raise UsageError(
                f"holdfast.titan: the initial weights of the model cannot be read from {given}: {_cause(error)}"
            ) from error
        finally:
            del self.states[MODEL]

    def due(self, step: int, last: bool) -> bool:
        """Whether `write` would write anything after this step."""
        return bool(self.enable and self._should_save(step, last))

    def write(self, step: int, last: bool) -> None:
        """Called by all workers of one replica, and by no others, between two steps.

        A disk that takes nothing is told, and ends no training: the job's own state is elsewhere.
        """
        with self.hooks.back():
            self.states[MODEL] = ModelWrapper(self.parts)
            try:
                self.save(step, last)
            except CheckpointException as error:
                # All workers get it at once, so none of them is still in a collective of the save.
                logger.warning(
                    f"holdfast: torchtitan's checkpoint of step {step} was not written: {_cause(error)}"
                )
            finally:
                # It keeps copies of what its hooks make.
                del self.states[MODEL]

    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        """torchtitan's choice of what is read, as if the folder were empty: the job goes on from its own state."""
        folder, self.folder = self.folder, ""
        try:
            return bool(super()._load(-1))
        finally:
            self.folder = folder

    @torch.no_grad()
    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """torchtitan's, but each worker reads for itself what it needs: no other is connected yet."""
        wanted, reader = state_dict, None
        if from_hf:
            if self.sd_adapter is None:
                raise ValueError("torchtitan cannot read Hugging Face's weights into this model")
            wanted = self.sd_adapter.to_hf(state_dict)
            reader = self.sd_adapter.get_hf_storage_reader(checkpoint_id, from_quantized)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # it takes this for a mistake
            dcp.state_dict_loader.load(
                wanted, storage_reader=reader, checkpoint_id=None if reader else checkpoint_id, no_dist=True
            )
        self.states[MODEL].load_state_dict(self.sd_adapter.from_hf(wanted) if from_hf else wanted)


class _Rewritten(NamedTuple):
    """A module whose state torchtitan's hooks rewrite."""

    part: torch.nn.Module
    prefix: str
    """Of the names of its tensors in the state of the part."""
    module: torch.nn.Module
    after: list[Any]
    """What rewrites its state once it is there."""
    before: list[Any]
    """What rewrites a state back before it is loaded."""


class StateHooks:
    """torchtitan's hooks that rewrite the state of a model for the checkpoints of others, taken off.

    What computes queries, keys and values in one has a hook that gathers all of it and gives out three copies. A job's
    state is never gathered, and a newcomer gets the same layout, so its hooks are back only while torchtitan writes.
    """

    def __init__(self, parts: list[torch.nn.Module]) -> None:
        self._taken: list[tuple[Any, int, Any]] = []
        self._modules: list[_Rewritten] = []
        for part in parts:
            for name, module in part.named_modules():
                after, before = (
                    self._take(module._state_dict_hooks),
                    self._take(module._load_state_dict_pre_hooks),
                )
                if after or before:
                    for wrapper in WRAPPERS:
                        name = name.replace(wrapper, "")
                    prefix = f"{name}." if name else ""
                    self._modules.append(_Rewritten(part, prefix, module, after, before))

    def _take(self, hooks: Any) -> list[Any]:
        # Torch puts the function of a load hook into a wrapper of its own.
        ours = {k: h for k, h in hooks.items() if _is_titans(getattr(h, "hook", h))}
        for key, hook in ours.items():
            del hooks[key]
            self._taken.append((hooks, key, hook))
        return list(ours.values())

    @contextmanager
    def back(self) -> Iterator[None]:
        """Inside, a model's state is as torchtitan writes it."""
        for hooks, key, hook in self._taken:
            hooks[key] = hook
        try:
            yield
        finally:
            for hooks, key, _ in self._taken:
                del hooks[key]

    def rewritten(self, part: torch.nn.Module, state: dict[str, Any]) -> None:
        """Puts room for what these hooks would give in the place of what they would gather: whole tensors, in the host's
        memory."""
        for one in self._of(part):
            for name in [n for n in state if n.startswith(one.prefix)]:
                state[name] = torch.empty(state[name].shape, dtype=state[name].dtype)
            for hook in one.after:
                hook(one.module, state, one.prefix, {})

    def merged(self, part: torch.nn.Module, state: dict[str, Any]) -> None:
        """Puts what was read into that room where it belongs: of each whole tensor, what of it is here."""
        lies = part.state_dict()
        for one in self._of(part):
            for hook in one.before:
                hook(state, one.prefix, {}, True, [], [], [])
            for name in [n for n in state if n.startswith(one.prefix) and n in lies]:
                _put(state.pop(name), lies[name])

    def _of(self, part: torch.nn.Module) -> list[_Rewritten]:
        return [one for one in self._modules if one.part is part]


class _Apart:
    """What the weights of a model are read into."""

    def __init__(self, parts: list[torch.nn.Module], hooks: StateHooks) -> None:
        self._parts, self._hooks = parts, hooks

    def state_dict(self) -> dict[str, Any]:
        all_of_them: dict[str, Any] = {}
        for part in self._parts:
            state = dict(part.state_dict())
            self._hooks.rewritten(part, state)
            all_of_them |= state
        return all_of_them

    def load_state_dict(self, read: dict[str, Any]) -> None:
        for part in self._parts:
            state = dict(read)
            self._hooks.merged(part, state)
            part.load_state_dict(state, strict=False)  # the others' stages are in it


def _put(whole: Any, into: torch.Tensor) -> None:
    here, start = local_of(into), (0,) * into.ndim
    if isinstance(into, DTensor):
        if (begin := start_of(into, here)) is None:
            raise ValueError(f"{into.placements}: the local part of the tensor is not a single box of it")
        start = begin
    at = tuple(slice(first, first + size) for first, size in zip(start, here.shape, strict=True))
    here.copy_(whole[at])


def _is_titans(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torchtitan")


def _cause(error: BaseException) -> str:
    """torch puts what failed on any worker, with its traceback, into an exception of its own."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {error}"


_owners = msgspec.json.Decoder(Owner)


def _owner(folder: Path) -> str | None:
    """The job whose checkpoints these are; None: nobody has said so. A file that cannot be read is of a job without a name."""
    try:
        return decode_file(_owners.decode, folder / OWNER).job
    except FileNotFoundError:
        return None
    except (OSError, Damaged):
        return ""


def as_checkpoints(config: Any) -> Any:
    """torchtitan's configuration of its manager as that of ours. One of another manager's stays if it is used, and is refused."""
    if type(config) is not CheckpointManager.Config:
        return config if config.enable else Checkpoints.Config()
    ours = Checkpoints.Config.__new__(
        Checkpoints.Config
    )  # without the warnings that torchtitan has given already
    for field in fields(config):
        setattr(ours, field.name, getattr(config, field.name))
    return ours
