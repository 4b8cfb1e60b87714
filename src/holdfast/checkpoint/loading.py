"""A checkpoint into a live state: is it of the same kind, what of it is needed here, and who gets what."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from holdfast.checkpoint.backends import Backend
from holdfast.checkpoint.flatten import LARGE, leaf_of, plain, rebuild
from holdfast.checkpoint.located import Located
from holdfast.checkpoint.regions import Region, read_regions
from holdfast.errors import StateError, TierError, UnreadError, UsageError
from holdfast.tensors.dtensor_shards import Leaf
from holdfast.tensors.index import Index, TensorSpec
from holdfast.tensors.tree import dtype_of, leaves, pack

MOST_DIFFERENCES = 20


def compare(state: Mapping[str, Any], located: Located, rank: int) -> list[str]:
    """What a checkpoint has otherwise than a state: names, shapes, dtypes. Objects other than modules decide for
    themselves when they are given theirs."""
    index = _own_head(located, rank)
    # What DCP saves has tensors but no tree. Treating it as an empty state would report every name as
    # missing, and hide the real reason.
    if not index.tree and index.tensors:
        raise UsageError(
            f"{located.where} was saved by torch.distributed.checkpoint: load it with dcp.load and TieredReader"
        )
    saved = set(index.tree)
    differences = [f"{name}: is not in the checkpoint" for name in state if name not in saved]
    differences += [f"{name}: is only in the checkpoint" for name in saved if name not in state]
    for name, value in state.items():
        if name in saved and isinstance(value, torch.optim.Optimizer):
            differences += _other_groups(name, value, index)
        if name not in saved or not _is_strict(value):
            continue
        mine = _leaves(name, value)
        theirs = _saved_leaves(name, index)
        _let_plain_be(mine, theirs)
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
    tensors: list[tuple[str, torch.Tensor]] = []
    tree = pack(plain(value), name, tensors)
    kinds: dict[str, Kind] = {path: None for path, kind, _ in leaves(tree, name) if kind == "x"}
    return kinds | {path: (str(t.dtype)[6:], tuple(t.shape)) for path, t in tensors}


def _let_plain_be(mine: dict[str, Kind], theirs: dict[str, Kind]) -> None:
    """Plain values are replaced, so it does not matter which there are: a list of losses grows. But a tensor where
    there is a plain value is a difference."""
    for one, other in ((mine, theirs), (theirs, mine)):
        for path in [p for p, kind in one.items() if kind is None and other.get(p) is None]:
            del one[path]
            other.pop(path, None)


def _other_groups(name: str, optimizer: torch.optim.Optimizer, index: Index) -> list[str]:
    """Differences of an optimizer's groups of parameters, at which it would refuse its state."""
    try:
        groups = rebuild(dict(index.tree[name][1])["param_groups"], [None] * len(index.tensors))
        theirs = [len(g["params"]) for g in groups]
    except (KeyError, TypeError):
        return [f"{name}: is not an optimizer's state in the checkpoint"]
    mine = [len(g["params"]) for g in optimizer.param_groups]
    if mine == theirs:
        return []
    return [f"{name}: groups of {theirs} parameters in the checkpoint, of {mine} here"]


def _saved_leaves(name: str, index: Index) -> dict[str, Kind]:
    """Every leaf of a name in the checkpoint."""
    kinds: dict[str, Kind] = {}
    specs = {t.path: t for t in index.tensors}
    for path, kind, value in leaves(index.tree[name], name):
        if kind == "b" and value[0] != LARGE:
            kinds[path] = (value[0], tuple(value[1]))
        elif kind == "T":
            spec = specs[path]
            kinds[path] = (spec.dtype, spec.global_shape or spec.shape)
        else:
            kinds[path] = None
    return kinds


def _own_head(located: Located, rank: int) -> Index:
    """Plain values come from the same rank where there is one."""
    return located.heads[located.nearest(rank)].index


def check(state: Mapping[str, Any], located: Located, rank: int) -> None:
    """Raises StateError when a checkpoint is of another state."""
    differences = compare(state, located, rank)
    if differences:
        more = len(differences) - MOST_DIFFERENCES
        shown = "\n  ".join([*differences[:MOST_DIFFERENCES], *([f"and {more} more"] if more > 0 else [])])
        raise StateError(
            f"{located.where} holds another state than this script's; nothing was loaded:\n  {shown}"
        )


def read(state: Mapping[str, Any], located: Located, backend: Backend) -> list[torch.Tensor]:
    """Reads everything that this rank needs; tensors that are there are filled.

    Raises:
        UsageError: a tensor of which it cannot be known what is needed.
        UnreadError: no source has all of it.
    """
    rank = backend.rank
    index = _own_head(located, rank)
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
            # Plain tensors can be allocated here and handed to `load_state_dict`. Of a sharded one nobody can
            # tell which part belongs to this rank, unless a DTensor with a mesh is there.
            if spec.global_shape:
                raise UsageError(
                    f"{spec.path}: the checkpoint has it in pieces, and there is no DTensor here to say which are "
                    "wanted; give the optimizer its state first (torch.distributed.checkpoint.state_dict)"
                )
            target = torch.empty(spec.shape, dtype=dtype_of(spec))
        tensors.append(target)
        try:
            regions += regions_of(located, leaf_of(spec.path, target), rank, late)
        except StateError as error:
            # The caller tries an older checkpoint after an UnreadError, and only then. A state that does not
            # fit would not fit an older checkpoint either, and passing it over silently would restart the run
            # from scratch.
            raise UnreadError(str(error)) from error
    total = sum(r.target.numel() * r.target.element_size() for r in regions)
    try:
        with backend.loading(located.where, total) as seen:
            read_regions(located, regions, seen=seen)
    except (StateError, TierError) as error:
        raise UnreadError(str(error)) from error
    with torch.no_grad():
        # Only when all bytes were verified: a read that fails half way must leave tensors on devices as they
        # are, because the ranks may agree on another checkpoint.
        for ours, staged in late:
            ours.copy_(staged)
    return tensors


def give(state: MutableMapping[str, Any], located: Located, rank: int, tensors: list[torch.Tensor]) -> None:
    """Gives every object its part.

    Raises:
        StateError: one refuses it.
    """
    index = _own_head(located, rank)
    for name, value in list(state.items()):
        loaded = rebuild(index.tree[name], tensors)
        if hasattr(value, "load_state_dict"):
            try:
                value.load_state_dict(loaded)
            except (RuntimeError, ValueError, KeyError, TypeError) as error:
                raise StateError(f"{name} cannot load its state from {located.where}: {error}") from error
        else:
            state[name] = _replaced(value, loaded)


def _fits(target: torch.Tensor, spec: TensorSpec) -> bool:
    return str(target.dtype)[6:] == spec.dtype and tuple(target.shape) == (spec.global_shape or spec.shape)


def _replaced(value: Any, loaded: Any) -> Any:
    """Tensors that were filled in place stay the same objects, so do dicts and lists that hold them."""
    if isinstance(value, dict) and isinstance(loaded, dict):
        for key in [k for k in value if k not in loaded]:
            del value[key]
        for key in loaded:
            value[key] = _replaced(value.get(key), loaded[key])
        return value
    if isinstance(value, list | tuple) and isinstance(loaded, list | tuple):
        there = [_replaced(a, b) for a, b in itertools.zip_longest(value, loaded)][: len(loaded)]
        if isinstance(value, list):
            value[:] = there
            return value
        return tuple(there)
    if isinstance(value, torch.Tensor) and isinstance(loaded, torch.Tensor) and value is not loaded:
        with torch.no_grad():
            value.copy_(loaded)
        return value
    return loaded


def regions_of(
    located: Located, leaf: Leaf, rank: int, late: list[tuple[torch.Tensor, torch.Tensor]]
) -> list[Region]:
    """The parts of saved pieces that make up what is here of a tensor, through the planner of
    torch.distributed.checkpoint. late: gets a staged tensor for what is not in host memory.

    Raises:
        StateError: the pieces do not cover it.
    """
    local = leaf.local
    if local.device.type != "cpu":
        staged = torch.empty(local.shape, dtype=local.dtype)
        late.append((local, staged))
        local = staged
    own = located.own(leaf.path, rank)
    # The same piece as it was saved, which is the rule after a restart: read as one region, without the
    # planner, whose work grows with the number of pieces.
    if own is not None and (own.shape, own.global_shape, own.start) == (
        tuple(local.shape),
        leaf.global_shape,
        leaf.start,
    ):
        return [Region(located.nearest(rank), own, (0,) * local.dim(), local)]
    pieces = located.pieces(leaf.path, rank)
    size = torch.Size(leaf.global_shape or tuple(local.shape))
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
    # The planner gives what overlaps and says nothing of gaps. A tensor that is only partly filled would keep
    # its random initialization there, and training would go on with it unnoticed.
    if covered != local.numel():
        raise StateError(f"{leaf.path}: the checkpoint has {covered} of the {local.numel()} elements needed")
    return regions
