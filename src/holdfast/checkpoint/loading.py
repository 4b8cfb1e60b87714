"""A state dict as a tree of plain values and a blob of tensors, of one rank; and back into a live state: is it of the same kind, what of
it is needed here, and who gets what. Tensors may be pieces (DTensor)."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from holdfast.checkpoint.backends import Backend
from holdfast.checkpoint.located import Located
from holdfast.checkpoint.regions import Region, read_regions
from holdfast.errors import StateError, TierError, UnreadError, UsageError
from holdfast.protocol.wire.decoding import decode
from holdfast.tensors.dtensor_shards import Leaf, like, piece_of
from holdfast.tensors.index import LARGE, StateIndex, TensorSpec, leaves
from holdfast.tensors.loaded import (
    check_fits,
    check_restorable,
    check_source,
    check_writable,
    overwrite,
    tensors_of,
    write_into,
)
from holdfast.tensors.loaded import load as load_into
from holdfast.tensors.tree import (
    Placing,
    by_width,
    dtype_of,
    lay_out,
    no_mesh,
    pack,
    shards_of_wrappers,
    unpack,
    within_wrappers,
    wrapped,
)
from holdfast.tensors.wrappers import shard_of

SMALL_BYTES = 8 << 10
"""Smaller tensors (states of random generators and the like) go with the plain values, so that ranks that differ in
nothing else have equal blobs, which are stored once."""


@dataclass
class FlatState:
    """A flattened state."""

    index: StateIndex
    tensors: list[torch.Tensor]
    """In the blob's order."""


def flatten(state: Mapping[str, Any], step: int) -> FlatState:
    """Takes a state apart. Nothing is copied; tensors may be on any device.

    Raises:
        UsageError: a value that is neither plain nor a tensor, or a tensor that could not be restored, with its path.
    """
    tensors: list[tuple[str, torch.Tensor]] = []
    tree = {}
    for name, value in state.items():
        # The index of a head is JSON, whose names are strings: 1 would come back as "1".
        if not isinstance(name, str):
            raise UsageError(f"the name {name!r} in the state is not a string: use {str(name)!r}")
        part = plain(value)
        check_restorable(name, value, part)
        tree[name] = pack(part, name, tensors)
    # A path names a tensor when it is loaded, and for other sharding it is the only name. Two of one path
    # would be saved, and one of them loaded twice.
    twice = [path for path, count in Counter(path for path, _ in tensors).items() if count > 1]
    if twice:
        raise UsageError(f"two tensors of the state have the same path {twice[0]}: rename one of them")
    kept: dict[int, int] = {}
    small: dict[int, list[Any]] = {}
    leaves: list[Leaf] = []
    for number in by_width([tensor for _, tensor in tensors]):
        path, tensor = tensors[number]
        # Small tensors go with the values for two reasons: a read for each would cost a request to an object
        # store, and random states, which differ between ranks, would make every rank's blob different, so
        # that replicas could not share one.
        if not isinstance(tensor, DTensor) and tensor.numel() * tensor.element_size() <= SMALL_BYTES:
            small[number] = _inline(path, tensor)
        else:
            kept[number] = len(leaves)
            leaves.append(leaf_of(path, tensor))
    specs, nbytes = lay_out(leaves)
    tree = {name: _final(value, name, kept, small) for name, value in tree.items()}
    return FlatState(StateIndex(step, tree, specs, nbytes), [leaf.local for leaf in leaves])


def plain(value: Any) -> Any:
    """An object's state dict; any other value as it is."""
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return value.state_dict()
    return value


def leaf_of(path: str, tensor: torch.Tensor) -> Leaf:
    """What a rank has of a tensor.

    Raises:
        UsageError: a DTensor whose placement keeps no contiguous box of it (or sums that are still to be reduced).
    """
    return piece_of(path, tensor if isinstance(tensor, DTensor) else _strided(path, tensor))


def inlined(leaf: list[Any]) -> Any:
    """The tensor, or the large whole number, of a leaf that went with the plain values.

    Raises:
        StateError: its bytes are none of its dtype and shape.
    """
    return decode(_inlined, leaf, "a small tensor of the state is damaged", error=StateError)


def _inlined(leaf: list[Any]) -> Any:
    dtype, shape, data = leaf
    if dtype == LARGE:
        return int(data)
    value = (
        torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    )
    try:
        return value.view(getattr(torch, dtype)).reshape(tuple(shape))
    except RuntimeError as error:  # torch's own word for a shape that does not fit
        raise ValueError(str(error).partition("\n")[0]) from None


def rebuild(tree: Any, tensors: list[Any], placing: Placing = no_mesh) -> Any:
    """The state from its tree, with these tensors at its leaves. placing: makes a DTensor of a shard that is a wrapper."""
    return unpack(tree, tensors, inlined, placing)


def _strided(path: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as bytes in memory.

    Raises:
        UsageError: it is none: sparse, quantized, without data, or a piece of a kind that is not known here.
    """
    check_writable(path, tensor)
    return tensor.detach().resolve_conj().resolve_neg()


def _inline(path: str, tensor: torch.Tensor) -> list[Any]:
    value = _strided(path, tensor).cpu().clone(memory_format=torch.contiguous_format)
    data = bytes(value.reshape(-1).view(torch.uint8).numpy()) if value.numel() else b""
    return ["b", [str(value.dtype)[6:], list(value.shape), data]]


def _final(tree: Any, path: str, kept: Mapping[int, int], small: Mapping[int, list[Any]]) -> Any:
    """The tree as it is saved: the blob's tensors by their number there, plain values that every reader can read."""
    kind, value = tree
    match kind:
        case "T":
            return small[value] if value in small else ["T", kept[value]]
        case "d":
            return ["d", [[_key(k, path), _final(v, f"{path}.{k}", kept, small)] for k, v in value]]
        case "l" | "t":
            return [kind, [_final(v, f"{path}.{i}", kept, small) for i, v in enumerate(value)]]
        case "w":
            about, parts = value
            return [kind, [about, [[at, _final(v, f"{path}.{at}", kept, small)] for at, v in parts]]]
        case "p":
            return [kind, [value[0], _final(value[1], path, kept, small)]]
        case _:
            return _exact(value, path)


def _key(key: Any, path: str) -> str | int:
    kind, value = _exact(key, path)
    if kind != "x":
        raise UsageError(f"{path}: the key {key} has more than 64 bits")
    exact: str | int = value
    return exact


def _exact(value: Any, path: str) -> list[Any]:
    """A leaf of a plain value, and of no subclass of it (numpy's floats, enumerations).

    Raises:
        UsageError: text that is not Unicode.
    """
    if value is None or isinstance(value, bool):
        return ["x", value]
    if isinstance(value, float):
        # By the base type's own method: a subclass may override `__float__`, and its class could not be
        # loaded again.
        return ["x", float.__float__(value)]
    if isinstance(value, int):
        # msgpack holds 64 bits, NumPy's generators have 128. Larger numbers travel as decimal text and come
        # back exactly.
        number = int.__int__(value)
        if -(1 << 63) <= number < 1 << 64:
            return ["x", number]
        return ["b", [LARGE, [], str(number).encode()]]
    text = str.__str__(value)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{path}: {text!r} cannot be saved: {error}") from error
    return ["x", text]


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
        _let_parts_be(mine, theirs, index)
        differences += [f"{p}: is not in the checkpoint" for p in mine if p not in theirs]
        differences += [f"{p}: is only in the checkpoint" for p in theirs if p not in mine]
        differences += [
            f"{path}: {_words(theirs[path])} in the checkpoint, {_words(mine[path])} here"
            for path in mine
            if path in theirs and mine[path] != theirs[path]
        ]
    return differences + _other_shards(state, index)


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
    return kinds | {path: (str(t.dtype)[6:], tuple(t.shape)) for path, t in tensors} | _wrappers(name, tree)


def _wrappers(name: str, tree: Any) -> dict[str, Kind]:
    """The tensors of a tree that are made of others."""
    return {path: _wrapper_kind(part) for path, part in wrapped(tree, name)}


def _wrapper_kind(tree: Any) -> Kind:
    kind, (about, inner) = tree
    if kind == "p":
        return _wrapper_kind(inner)
    settings = "" if about["context"] == ["x", None] else f" {about['context']}"
    return about["class"].rpartition(":")[2] + settings, tuple(about["shape"])


def _let_plain_be(mine: dict[str, Kind], theirs: dict[str, Kind]) -> None:
    """Plain values are replaced, so it does not matter which there are: a list of losses grows. But a tensor where
    there is a plain value is a difference."""
    for one, other in ((mine, theirs), (theirs, mine)):
        for path in [p for p, kind in one.items() if kind is None and other.get(p) is None]:
            del one[path]
            other.pop(path, None)


def _let_parts_be(mine: dict[str, Kind], theirs: dict[str, Kind], index: StateIndex) -> None:
    """What a wrapper is made of may come and go, as a scale that is computed ahead. A wrapper of the same class takes it."""
    parts = within_wrappers(index)
    wrappers = [path for path, kind in mine.items() if kind is not None and theirs.get(path) == kind]
    for one, other in ((mine, theirs), (theirs, mine)):
        for path in [p for p in one if p not in other]:
            if path in parts or any(path.startswith(f"{wrapper}.") for wrapper in wrappers):
                del one[path]


def _other_shards(state: Mapping[str, Any], index: StateIndex) -> list[str]:
    """Shards that are made of other tensors, and cannot be cut anew."""
    outer = _outer(state, index)
    differences = []
    for lies in shards_of_wrappers(index):
        model = outer.get(lies["path"])
        if not isinstance(model, DTensor):
            why = "this script has no DTensor that determines the position; initialize the optimizer's state first"
        elif shard_of(lies["path"], model) != lies:
            why = "this script shards it differently; start with the same sharding as when it was saved"
        else:
            continue
        differences.append(
            f"{lies['path']}: a shard at {lies['start']} of {lies['shape']} in the checkpoint: {why}"
        )
    return differences


def _outer(state: Mapping[str, Any], index: StateIndex) -> dict[str, torch.Tensor]:
    """The tensors by whose layout saved shards of wrappers are placed here, by their paths."""
    paths = [lies["path"] for lies in shards_of_wrappers(index)]
    if not paths:
        return {}
    there = dict(at for name, value in state.items() for at in tensors_of(name, plain(value)))
    moments = _Moments(state)
    found = {path: there.get(path, moments.lie_as(path)) for path in paths}
    return {path: tensor for path, tensor in found.items() if tensor is not None}


class _Moments:
    """An optimizer that has made no step has no moments yet. Those of a sharded parameter lie as it does."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._parameters = {
            f"{name}.state.{number}": parameter
            for name, optimizer in state.items()
            if isinstance(optimizer, torch.optim.Optimizer)
            for number, parameter in enumerate(p for g in optimizer.param_groups for p in g["params"])
            if isinstance(parameter, DTensor)
        }

    def lie_as(self, path: str) -> DTensor | None:
        """The parameter whose moment the path names."""
        while path:
            if (parameter := self._parameters.get(path)) is not None:
                return parameter
            path = path.rpartition(".")[0]
        return None

    def made(self, spec: TensorSpec) -> torch.Tensor | None:
        """One to be filled; None where it has another shape than its parameter, or has none."""
        parameter = self.lie_as(spec.path)
        if parameter is None or tuple(parameter.shape) != spec.global_shape:
            return None
        return torch.empty_like(parameter, dtype=dtype_of(spec), requires_grad=False)


def _other_groups(name: str, optimizer: torch.optim.Optimizer, index: StateIndex) -> list[str]:
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


def _saved_leaves(name: str, index: StateIndex) -> dict[str, Kind]:
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
    return kinds | _wrappers(name, index.tree[name])


def _own_head(located: Located, rank: int) -> StateIndex:
    """Plain values come from the same rank where there is one."""
    return located.heads[located.nearest(rank)].index


def check(state: Mapping[str, Any], located: Located, rank: int) -> None:
    """Raises StateError when a checkpoint is of another state."""
    differences = compare(state, located, rank)
    if differences:
        more = len(differences) - MOST_DIFFERENCES
        shown = "\n  ".join([*differences[:MOST_DIFFERENCES], *([f"and {more} more"] if more > 0 else [])])
        raise StateError(
            f"{located.where} does not match the state of this script; nothing was loaded:\n  {shown}"
        )


@dataclass(frozen=True)
class LoadedState:
    """What was read, and not yet given to anybody."""

    parts: dict[str, Any]
    """By name, what was saved of it. The tensors in it are the live ones where there are such, not yet written to."""
    late: list[tuple[str, torch.Tensor, torch.Tensor]]
    """Path, live tensor, and what is to be written into it."""


def read(state: Mapping[str, Any], located: Located, backend: Backend) -> LoadedState:
    """Reads everything that this rank needs. Nothing of the state is changed: the ranks may agree on another checkpoint.

    Memory: that of this rank's part of the state, in the host.

    Raises:
        UsageError: a tensor of which it cannot be known what is needed.
        StateError: a live tensor that cannot be written to, as it was saved.
        UnreadError: no source has all of it.
    """
    rank = backend.rank
    index = _own_head(located, rank)
    live: list[tuple[str, torch.Tensor]] = []
    for name, value in state.items():
        pack(plain(value), name, live)
    there, moments = dict(live), _Moments(state)
    parts = within_wrappers(index)
    tensors: list[torch.Tensor] = []
    regions: list[Region] = []
    late: list[tuple[str, torch.Tensor, torch.Tensor]] = []
    for spec in index.tensors:
        target = there.get(spec.path)
        if target is None and spec.global_shape and (target := moments.made(spec)) is not None:
            there[spec.path] = target
        if target is None or not _fits(target, spec):
            # Plain tensors can be allocated here and handed to `load_state_dict`. Of a sharded one nobody can
            # tell which part belongs to this rank, unless a DTensor with a mesh is there.
            if spec.global_shape:
                raise UsageError(
                    f"{spec.path}: the checkpoint contains it in pieces, but this script has no DTensor that "
                    "determines which of them are needed; initialize the optimizer's state first "
                    "(torch.distributed.checkpoint.state_dict)"
                )
            leaf = Leaf(path=spec.path, local=torch.empty(spec.shape, dtype=dtype_of(spec)))
            tensors.append(leaf.local)
        else:
            piece = piece_of(spec.path, target)
            leaf = replace(piece, local=torch.empty(piece.local.shape, dtype=piece.local.dtype))
            if spec.path in parts:
                # The wrapper is made anew, of tensors of its own: what takes it may copy it into the live one.
                tensors.append(like(leaf.local, target))
            else:
                check_writable(spec.path, piece.local)
                late.append((spec.path, piece.local, leaf.local))
                tensors.append(target)
        try:
            regions += regions_of(located, leaf, rank, [])
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
    outer = _outer(state, index)
    for number, spec in enumerate(index.tensors):
        if spec.path in parts and isinstance(target := there.get(spec.path), torch.Tensor):
            tensors[number] = tensors[number].to(target.device)
    parts_there = {
        name: rebuild(index.tree[name], tensors, lambda lies, shard: like(shard, outer[lies["path"]]))
        for name in state
    }
    for path, ours, staged in late:
        check_source(path, ours, staged)
    for name, value in state.items():
        check_fits(name, value, parts_there[name])
    return LoadedState(parts_there, late)


def give(state: MutableMapping[str, Any], located: Located, loaded: LoadedState) -> None:
    """Gives every object its part.

    Raises:
        StateError: one refuses it.
    """
    for _, ours, staged in loaded.late:
        write_into(ours, staged)
    for name, value in list(state.items()):
        part = loaded.parts[name]
        if hasattr(value, "load_state_dict"):
            try:
                load_into(name, value, part)
            except (RuntimeError, ValueError, KeyError, TypeError, StateError) as error:
                raise StateError(f"{name} cannot load its state from {located.where}: {error}") from error
        else:
            state[name] = _replaced(name, value, part)


def _fits(target: torch.Tensor, spec: TensorSpec) -> bool:
    return str(target.dtype)[6:] == spec.dtype and tuple(target.shape) == (spec.global_shape or spec.shape)


def _replaced(path: str, value: Any, loaded: Any) -> Any:
    """Tensors that were filled in place stay the same objects, so do dicts and lists that hold them."""
    if isinstance(value, dict) and isinstance(loaded, dict):
        for key in [k for k in value if k not in loaded]:
            del value[key]
        for key in loaded:
            value[key] = _replaced(f"{path}.{key}", value.get(key), loaded[key])
        return value
    if isinstance(value, list | tuple) and isinstance(loaded, list | tuple):
        pairs = itertools.zip_longest(value, loaded)
        there = [_replaced(f"{path}.{i}", a, b) for i, (a, b) in enumerate(pairs)][: len(loaded)]
        if isinstance(value, list):
            value[:] = there
            return value
        return tuple(there)
    if isinstance(value, torch.Tensor) and isinstance(loaded, torch.Tensor) and value is not loaded:
        overwrite(path, value, loaded)
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
