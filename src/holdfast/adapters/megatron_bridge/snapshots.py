"""Megatron-Bridge at level 1: its local checkpoints, in Holdfast's memory tier instead of files on each node."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

import numpy as np
import torch
from megatron.bridge.training import setup
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.tensor_aware_state_dict import HAVE_NVRX, MCoreTensorAwareStateDict
from megatron.core.dist_checkpointing.utils import _sharded_object_id, _sharded_tensor_shard_id

from holdfast.adapters.snapshots import DeferredState, Saver
from holdfast.adapters.versions import MEGATRON_BRIDGE
from holdfast.errors import StateError, UsageError

MANAGER = "local_checkpoint_manager"
"""The key of what keeps local checkpoints, in the context that Bridge's functions for checkpoints are given."""
KIND = "kind of value"
"""The key that marks a dict that stands for a value which is not plain."""
DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


def save_snapshots(config: Any, every: int, to: str | None = None) -> None:
    """Has Megatron-Bridge save its state with `holdfast.checkpoint` each few iterations, and go on from the newest.

        config = llama32_1b_pretrain_config()
        save_snapshots(config, every=50)
        pretrain(config, forward_step)

    Bridge's own local checkpoints are what is saved: model, optimizer, schedule, random generators, and what was
    consumed of the data. Each rank saves its own part. Checkpoints in `config.checkpoint.save` are written as before, and
    whichever is newer is loaded.

    Args:
        config: the `ConfigContainer` that `pretrain` or `finetune` is given. Its `checkpoint` is changed.
        every: iterations between two snapshots.
        to: without `holdfast run`: where to, see `holdfast.checkpoint.save`.

    Raises:
        UsageError: a version of Megatron-Bridge that is not supported; settings with which Bridge has no local checkpoints; or
            no number of iterations.
    """
    MEGATRON_BRIDGE.check(metadata.version("megatron-bridge"), "save_snapshots")
    checkpoint = config.checkpoint
    saver = Saver(every, to)
    kind = config.optimizer.optimizer
    wrong = (
        (
            not checkpoint.save,
            "checkpoint.save is not set, and Bridge does not save anything without it; set it to a folder",
        ),
        (
            checkpoint.ckpt_format != "torch_dist",
            f"checkpoint.ckpt_format is {checkpoint.ckpt_format!r}, but local checkpoints exist only for 'torch_dist'",
        ),
        (
            config.peft is not None,
            "Bridge does not look for local checkpoints with peft; do not call save_snapshots, and set "
            "checkpoint.save_interval",
        ),
        # From a local checkpoint Bridge then takes the weights alone, and begins at iteration 0.
        (
            bool(checkpoint.pretrained_checkpoint or checkpoint.finetune),
            "with checkpoint.pretrained_checkpoint or finetune Bridge would resume from a snapshot without the "
            "optimizer and the iteration; do not call save_snapshots, and set checkpoint.save_interval",
        ),
        (
            "muon" in kind or "soap" in kind,
            f"the optimizer {kind} writes its own files; do not call save_snapshots, and set checkpoint.save_interval",
        ),
        (not HAVE_NVRX, "Megatron's local checkpoints need a package: pip install nvidia-resiliency-ext"),
    )
    for what in (what for there, what in wrong if there):
        raise UsageError(f"save_snapshots: {what}")
    checkpoint.non_persistent_ckpt_type = "local"
    checkpoint.non_persistent_save_interval = every
    # Each rank keeps all that it needs. The other way keeps a part of what replicas share on each of them, and so
    # needs all of them, on GPUs, to load; other nodes have copies of a snapshot anyway.
    checkpoint.non_persistent_local_ckpt_algo = "atomic"
    checkpoint.replication = False
    own: Callable[[Any], dict[str, Any]] = setup.init_checkpointing_context

    def context(given: Any) -> dict[str, Any]:
        return {MANAGER: MegatronSnapshots(saver)} if given is checkpoint else own(given)

    setup.init_checkpointing_context = context


class MegatronSnapshots:
    """In the place of NVRx's `LocalCheckpointManager`, which has the same methods. Each is called on every rank."""

    local_ckpt_dir = "holdfast"
    """Bridge makes names of files from it, and prints them. It opens none of them for local checkpoints."""

    def __init__(self, saver: Saver) -> None:
        self._saver = saver
        self._found: tuple[int, _Loaded] | None = None

    def save(self, state: Any, iteration: int, is_async: bool = False) -> AsyncRequest | None:
        """Saves what Bridge made of its state. It is skipped while earlier snapshots are on their way.

        Args:
            state: of this rank, an `MCoreTensorAwareStateDict`.
            iteration: after which it was.
            is_async: Bridge then expects something to wait for. The state is copied when this returns, so nothing is left to do.

        Raises:
            UsageError: a value in it that cannot be saved, with its path.
        """
        self._found = None
        tensors: dict[str, dict[str, torch.Tensor]] = {}
        objects: dict[str, Any] = {}
        for part in nested_values(state.sharded_state_dict):
            if isinstance(part, ShardedTensor):
                kind = tensors.setdefault(part.data.device.type, {})
                kind[_name(_sharded_tensor_shard_id(part))] = part.data
            else:
                objects[_name(_sharded_object_id(part))] = _plain(part.data)
        kept = {"common": _plain(state.common), "tensors": tensors, "objects": objects}
        self._saver.save({"megatron": DeferredState(kept), "ranks": DeferredState(_ranks())}, iteration)
        return AsyncRequest(async_fn=None, async_fn_args=(), finalize_fns=[]) if is_async else None

    def find_latest(self) -> int:
        """Loads the newest snapshot that all ranks have. The iteration after which it was; -1: there is none.

        Raises:
            StateError: snapshots are there, but none could be read.
            UsageError: the newest is of another number of ranks.
        """
        if self._found is None:
            kept, ranks = DeferredState(), DeferredState()
            found = self._saver.load({"megatron": kept, "ranks": ranks})
            if found is None:
                return -1
            # Refused before Bridge sees it: a rank's part of the optimizer would fit no rank of another number.
            if ranks.value != _ranks():
                raise UsageError(
                    f"save_snapshots: the snapshot of iteration {found} was made by {ranks.value} ranks, but now "
                    f"there are {_ranks()}; start {ranks.value}, or remove the job's snapshots to resume from "
                    "config.checkpoint.load"
                )
            self._found = found, _Loaded(kept.value)
        return self._found[0]

    def load(self) -> tuple[MCoreTensorAwareStateDict, str]:
        """What `find_latest` found, and a name for it."""
        assert self._found is not None, "find_latest comes first"
        (iteration, loaded), self._found = self._found, None
        return loaded, f"snapshot of iteration {iteration}"


class _Loaded(MCoreTensorAwareStateDict):  # type: ignore[misc] # it has no types here
    """A state whose parts are found by their names.

    Megatron's own keeps its descriptions of the parts, which are objects. Nothing but plain values and tensors comes from a
    snapshot: the running model says what the parts are, and they are filled in.
    """

    def __init__(self, saved: Mapping[str, Any]) -> None:
        super().__init__(common=_restored(saved["common"]), sharded_state_dict={})
        self._objects = saved["objects"]
        self._tensors = {
            name: (device, tensor)
            for device, kind in saved["tensors"].items()
            for name, tensor in kind.items()
        }

    def _insert_sharded_data(
        self, fully_parallel: bool, sharded_part: Any, parallelization_group: Any, exchange_algo: str
    ) -> None:
        def value(part: ShardedTensor | ShardedObject) -> Any:
            if isinstance(part, ShardedObject):
                return _restored(_found(self._objects, _name(_sharded_object_id(part))))
            device, tensor = _found(self._tensors, _name(_sharded_tensor_shard_id(part)))
            if part.data is not None and (tensor.shape, tensor.dtype) != (part.data.shape, part.data.dtype):
                raise StateError(
                    f"the snapshot's {part.key} is {tuple(tensor.shape)} {tensor.dtype}, but the model's is "
                    f"{tuple(part.data.shape)} {part.data.dtype}: the snapshot was made with another model"
                )
            return tensor.to(device)

        dict_list_map_inplace(value, sharded_part)


def _found(parts: Mapping[str, Any], name: str) -> Any:
    if name not in parts:
        raise StateError(
            f"the snapshot does not contain {name}: it was made with another model, or with another parallel "
            "configuration"
        )
    return parts[name]


def _name(part: tuple[Any, ...]) -> str:
    """Of a part: its key, where it begins, and its shape or range. The same in a snapshot and in the running model."""
    return " ".join(map(str, part))


def _ranks() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def _plain(value: Any) -> Any:
    """The same in values that a snapshot can hold; what is none of them stays, and is refused when it is saved."""
    match value:
        case Mapping() if all(isinstance(key, str | int) for key in value):
            return {key: _plain(part) for key, part in value.items()}
        case Mapping():
            return {KIND: "dict", "items": [[_plain(key), _plain(part)] for key, part in value.items()]}
        case list():
            return [_plain(part) for part in value]
        case tuple():
            return tuple(_plain(part) for part in value)
        case torch.dtype():
            return {KIND: "dtype", "name": str(value).removeprefix("torch.")}
        case np.ndarray():
            return {KIND: "array", "values": value.tolist(), "dtype": str(value.dtype)}
        case io.BytesIO():
            return {KIND: "file", "content": value.getvalue()}
        case _:
            return value


def _restored(value: Any) -> Any:
    """What `_plain` was given."""
    if isinstance(value, list | tuple):
        return type(value)(map(_restored, value))
    if not isinstance(value, dict):
        return value
    match value.get(KIND):
        case "dict":
            return {_restored(key): _restored(part) for key, part in value["items"]}
        case "dtype":
            return DTYPES[value["name"]]
        case "array":
            return np.array(value["values"], dtype=value["dtype"])
        case "file":
            return io.BytesIO(value["content"])
        case _:
            return {key: _restored(part) for key, part in value.items()}
