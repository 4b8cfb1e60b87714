"""`holdfast.checkpoint.save` and `load`: a state dict into the tiers, and back from the nearest that has it whole."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.optim.optimizer import register_optimizer_step_pre_hook

from holdfast.checkpoint.flat import Leaf, flatten, leaf_of, plain, rebuild
from holdfast.checkpoint.found import Found
from holdfast.checkpoint.layout import Index, TensorSpec
from holdfast.checkpoint.places import AgentPlace, LonePlace, Place, say
from holdfast.checkpoint.regions import Region, dtype_of, read_regions
from holdfast.checkpoint.tier import parse_tier
from holdfast.errors import StateError, TierError, UsageError
from holdfast.train import worker
from holdfast.train.state import pack

MOST_DIFFERENCES = 20
COPY_BYTES = 16 << 20

_places: dict[str, Place] = {}
_copying: list[threading.Thread] = []


def save(state: Mapping[str, Any], step: int, *, to: str | None = None, overlap: bool = False) -> bool:
    """Saves this rank's part of a state; call it on every rank, between two steps.

    Under `holdfast run` it is copied into memory of the node's agent, which sends it to other nodes and to the
    durable tiers that `--checkpoint` names; this returns when the copy is complete. Without a job it is copied into
    memory of this process and written to the tier `to` behind the running script; `flush` waits for that.

    Args:
        state: names to tensors, DTensors, plain values, nested dicts and lists of them, or objects with
            `state_dict` and `load_state_dict`.
        step: committed steps.
        to: without a job: `URL[,every=STEPS|10m][,keep=2][,keep-every=STEPS]`; by default $HOLDFAST_CHECKPOINT.
        overlap: return at once and copy while the next forward and backward pass run; every optimizer waits for it
            before its next step. Only for states that nothing but an optimizer changes.

    Returns:
        False when the snapshot was skipped, because memory is short or the one before is still on its way.

    Raises:
        UsageError: a value that cannot be saved, or nowhere to save to.
    """
    wait_for_copy()
    place = place_for(to)
    flat = flatten(state, step)
    if not overlap:
        return place.put(flat.index, lambda row: copy_tensors(row, flat.tensors))
    _hook_optimizers()
    thread = threading.Thread(
        target=place.put,
        args=(flat.index, lambda row: copy_tensors(row, flat.tensors)),
        name="holdfast-copy",
        daemon=True,
    )
    _copying.append(thread)
    thread.start()
    return True


def load(
    state: MutableMapping[str, Any], *, source: str | None = None, step: int | None = None
) -> int | None:
    """Loads the newest whole checkpoint into a state of the same kind as was saved; call it on every rank.

    It is read from the nearest tier that has it whole, shard by shard: memory of the node's agent, of another node,
    disk, object store. The number of ranks and the sharding may be others than at its saving.

    Args:
        state: as for `save`. Tensors are filled in place, plain values replaced, objects given their state dict.
        source: without a job: the tier; by default $HOLDFAST_CHECKPOINT.
        step: this one and no other; by default the newest.

    Returns:
        The step it was saved with; None when there is no checkpoint.

    Raises:
        StateError: checkpoints are there, but none could be loaded; or it is of another model: the message lists the
            differences, and nothing was changed.
    """
    wait_for_copy()
    place = place_for(source)
    reasons: list[str] = []

    def passed_over(why: str) -> None:
        reasons.append(why)
        say(f"rank {place.rank}: passed over: {why}")

    for found in place.candidates(passed_over):
        if step is not None and found.step != step:
            continue
        differences = compare(state, found, place.rank)
        if differences:
            more = len(differences) - MOST_DIFFERENCES
            shown = "\n  ".join(
                [*differences[:MOST_DIFFERENCES], *([f"and {more} more"] if more > 0 else [])]
            )
            raise StateError(f"{found.where} is of another state than this; nothing was loaded:\n  {shown}")
        try:
            _fill(state, found, place.rank)
        except (StateError, TierError) as error:
            passed_over(f"{found.where}: {error}")
            continue
        return found.step
    if reasons:
        raise StateError(f"no checkpoint could be loaded: {'; '.join(reasons)}")
    return None


def flush() -> None:
    """Waits until what was saved is where it is to be."""
    wait_for_copy()
    for place in _places.values():
        place.flush()


def wait_for_copy() -> None:
    """Waits until nothing reads the saved tensors any more."""
    while _copying:
        _copying.pop().join()


# ---------------------------------------------------------------- where to


def place_for(to: str | None) -> Place:
    """This rank's place; made at the first use."""
    to = to or os.environ.get("HOLDFAST_CHECKPOINT") or ""
    link = worker.link()
    key = "agent" if link is not None else to
    if key not in _places:
        _places[key] = AgentPlace(link) if link is not None else _alone(to)
    return _places[key]


def _alone(to: str) -> LonePlace:
    if not to:
        raise UsageError(
            "nowhere to save to: start the script with `holdfast run`, give save(..., to='folder or URL'), "
            "or set HOLDFAST_CHECKPOINT"
        )
    tier = parse_tier(to, every="1")
    if dist.is_available() and dist.is_initialized():
        store: Any = dist.distributed_c10d._get_default_store()
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        return LonePlace((tier,), dist.get_rank(), dist.get_world_size(), store.clone())
    return LonePlace((tier,), 0, 1)


# ---------------------------------------------------------------- copying


def copy_tensors(row: memoryview, tensors: Sequence[torch.Tensor]) -> None:
    """The tensors one after the other, without holding the GIL while bytes move."""
    target = np.frombuffer(row, dtype=np.uint8)
    at = 0
    for tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes:
            if tensor.device.type == "cpu" and tensor.is_contiguous():
                source = tensor.reshape(-1).view(torch.uint8).numpy()
                for low in range(0, nbytes, COPY_BYTES):
                    high = min(low + COPY_BYTES, nbytes)
                    np.copyto(target[at + low : at + high], source[low:high])
            else:
                into = torch.from_numpy(target[at : at + nbytes]).view(tensor.dtype).view(tensor.shape)
                into.copy_(tensor)
        at += nbytes
    del target


_hooked: list[bool] = []


def _hook_optimizers() -> None:
    if not _hooked:
        _hooked.append(True)
        register_optimizer_step_pre_hook(lambda *_: wait_for_copy())


# ---------------------------------------------------------------- loading


def compare(state: Mapping[str, Any], found: Found, rank: int) -> list[str]:
    """What a checkpoint has otherwise than a state: names, shapes, dtypes. Objects other than modules decide for
    themselves when they are given theirs."""
    index = _own_head(found, rank)
    if not index.tree and index.tensors:
        raise UsageError(
            f"{found.where} was saved by torch.distributed.checkpoint: load it with dcp.load and TieredReader"
        )
    saved = set(index.tree)
    differences = [f"{name}: is not in the checkpoint" for name in state if name not in saved]
    differences += [f"{name}: is only in the checkpoint" for name in saved if name not in state]
    for name, value in state.items():
        if name not in saved or not _is_strict(value):
            continue
        mine = _leaves(name, value)
        theirs = _saved_leaves(name, index, found)
        differences += [f"{p}: is not in the checkpoint" for p in mine if p not in theirs]
        differences += [f"{p}: is only in the checkpoint" for p in theirs if p not in mine]
        differences += [
            f"{path}: {_words(theirs[path])} in the checkpoint, {_words(mine[path])} here"
            for path in mine
            if path in theirs and mine[path] != theirs[path]
        ]
    return differences


def _is_strict(value: Any) -> bool:
    """Whether what is there must be what was saved. An optimizer that never took a step has no moments yet; it and
    other objects judge for themselves."""
    return isinstance(value, torch.nn.Module) or not hasattr(value, "load_state_dict")


Kind = tuple[str, tuple[int, ...]] | None
"""dtype and whole shape of a tensor; None: a plain value."""


def _words(kind: Kind) -> str:
    return "a plain value" if kind is None else f"{kind[0]} {'x'.join(map(str, kind[1])) or 'scalar'}"


def _leaves(name: str, value: Any) -> dict[str, Kind]:
    """Every leaf of a state that is there."""
    found: list[tuple[str, torch.Tensor]] = []
    tree = pack(plain(value), name, found)
    leaves: dict[str, Kind] = dict.fromkeys(_plain_paths(tree, name))
    leaves |= {path: (str(t.dtype)[6:], tuple(t.shape)) for path, t in found}
    return leaves


def _plain_paths(tree: Any, path: str) -> list[str]:
    kind, value = tree
    if kind == "d":
        return [p for k, v in value for p in _plain_paths(v, f"{path}.{k}")]
    if kind in ("l", "t"):
        return [p for i, v in enumerate(value) for p in _plain_paths(v, f"{path}.{i}")]
    return [path] if kind == "x" else []


def _saved_leaves(name: str, index: Index, found: Found) -> dict[str, Kind]:
    """Every leaf of a name in the checkpoint."""
    leaves: dict[str, Kind] = {}

    def walk(tree: Any, path: str) -> None:
        kind, value = tree
        if kind == "d":
            for k, v in value:
                walk(v, f"{path}.{k}")
        elif kind in ("l", "t"):
            for i, v in enumerate(value):
                walk(v, f"{path}.{i}")
        elif kind == "b":
            leaves[path] = (value[0], tuple(value[1]))
        elif kind == "T":
            spec = found.pieces(path)[0][1]
            leaves[path] = (spec.dtype, spec.whole or spec.shape)
        else:
            leaves[path] = None

    walk(index.tree[name], name)
    return leaves


def _own_head(found: Found, rank: int) -> Index:
    """Plain values come from the same rank where there is one."""
    return found.heads[rank if rank < found.world else rank % found.world].index


def _fill(state: MutableMapping[str, Any], found: Found, rank: int) -> None:
    """Reads everything that this rank needs, then gives every object its part."""
    index = _own_head(found, rank)
    live: list[tuple[str, torch.Tensor]] = []
    for name, value in state.items():
        pack(plain(value), name, live)
    there = dict(live)
    tensors: list[torch.Tensor] = []
    regions: list[Region] = []
    late: list[tuple[torch.Tensor, torch.Tensor]] = []
    for spec in index.tensors:
        target = there.get(spec.path)
        if target is None or not _fits(target, spec):
            if spec.whole:
                raise UsageError(
                    f"{spec.path}: the checkpoint has it in pieces, and there is no DTensor here to say which are "
                    "wanted; give the optimizer its state first (torch.distributed.checkpoint.state_dict)"
                )
            target = torch.empty(spec.shape, dtype=dtype_of(spec))
        tensors.append(target)
        regions += regions_of(found, leaf_of(spec.path, target), rank, late)
    read_regions(found, regions)
    with torch.no_grad():
        for ours, staged in late:
            ours.copy_(staged)
    for name, value in list(state.items()):
        loaded = rebuild(index.tree[name], tensors)
        if hasattr(value, "load_state_dict"):
            value.load_state_dict(loaded)
        else:
            state[name] = _replaced(value, loaded)


def _fits(target: torch.Tensor, spec: TensorSpec) -> bool:
    return str(target.dtype)[6:] == spec.dtype and tuple(target.shape) == (spec.whole or spec.shape)


def _replaced(value: Any, loaded: Any) -> Any:
    """Tensors that were filled in place stay the same objects, so do dicts and lists that hold them."""
    if isinstance(value, dict) and isinstance(loaded, dict):
        for key in loaded:
            value[key] = _replaced(value.get(key), loaded[key])
        return value
    if isinstance(value, torch.Tensor) and isinstance(loaded, torch.Tensor) and value is not loaded:
        with torch.no_grad():
            value.copy_(loaded)
        return value
    return loaded


def regions_of(
    found: Found, leaf: Leaf, rank: int, late: list[tuple[torch.Tensor, torch.Tensor]]
) -> list[Region]:
    """The parts of saved pieces that make up what is here of a tensor, through the planner of
    torch.distributed.checkpoint. late: gets a staged tensor for what is not in host memory.

    Raises:
        StateError: the pieces do not cover it.
    """
    pieces = found.pieces(leaf.path, rank)
    local = leaf.local
    if local.device.type != "cpu":
        staged = torch.empty(local.shape, dtype=local.dtype)
        late.append((local, staged))
        local = staged
    size = torch.Size(leaf.whole or tuple(local.shape))
    chunks = [
        ChunkStorageMetadata(torch.Size(s.start or (0,) * len(s.shape)), torch.Size(s.shape))
        for _, s in pieces
    ]
    saved = TensorStorageMetadata(TensorProperties(dtype=local.dtype), size, chunks)
    start = leaf.start or (0,) * local.dim()
    mine = ChunkStorageMetadata(torch.Size(start), local.shape)
    by_start = {tuple(c.offsets): piece for c, piece in zip(chunks, pieces, strict=True)}
    regions, covered = [], 0
    for item in create_read_items_for_chunk_list(leaf.path, saved, [mine]):
        owner, spec = by_start[tuple(item.storage_index.offset or ())]
        box = tuple(slice(o, o + n) for o, n in zip(item.dest_offsets, item.lengths, strict=True))
        regions.append(Region(owner, spec, tuple(item.storage_offsets), local[box]))
        covered += item.lengths.numel()
    if covered != local.numel():
        raise StateError(f"{leaf.path}: the checkpoint has {covered} of the {local.numel()} elements needed")
    return regions
