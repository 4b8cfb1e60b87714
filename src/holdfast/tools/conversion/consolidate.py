"""Merges a checkpoint of any number of ranks into one state: the pieces of a tensor are joined, and values that are equal on
all ranks are named once.

A name is the dotted path in the state. If ranks have different values under the same name, the name stands for the
lowest rank's value, and the others' are called `rank-N.` plus the name.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from holdfast.checkpoint.dcp import BYTES
from holdfast.checkpoint.layout import CHUNK_BYTES, SUM_BYTES
from holdfast.checkpoint.loading import inlined, regions_of
from holdfast.checkpoint.located import Located
from holdfast.checkpoint.regions import Region, read_regions
from holdfast.errors import StateError, UsageError
from holdfast.tensors.dtensor_shards import Leaf
from holdfast.tensors.index import TensorSpec, leaves, with_leaves
from holdfast.tensors.tree import DismantledTensor, dtype_of, pack

RANK_NAME = re.compile(r"rank-(\d+)")
Plain = bool | int | float | str | None
Tree = Any
"""A tree of `holdfast.tensors.tree` whose leaves are ["T", name of a tensor] and ["x", name of a value]."""

Seen = Callable[[int], None]


@dataclass(frozen=True)
class MergedTensor:
    """A tensor of the merged state; its pieces are read and joined on demand."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    _leaf: _Leaf

    @property
    def nbytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass
class Merged:
    """A checkpoint as one state."""

    located: Located
    tensors: dict[str, MergedTensor]
    """By name, in the order of the state."""
    values: dict[str, Plain]
    """Values other than tensors, by name, in the order of the state."""
    trees: list[dict[str, Tree]]
    """The trees of every rank's state, by top-level name; a single one if the states of all ranks are equal."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self.tensors.values())

    def read(self, wholes: Sequence[MergedTensor]) -> list[torch.Tensor]:
        """Reads these tensors into host memory, contiguous; every byte is verified.

        Raises:
            StateError: bytes are damaged, or the pieces do not cover a tensor.
            TierError: the tier cannot be read.
        """
        return _read(self.located, [w._leaf for w in wholes])

    def stripped(self, prefix: str) -> Merged:
        """The same without `prefix` at the beginning of names. Other names stay.

        Raises:
            UsageError: nothing is left of a name.
        """
        if prefix in self.tensors or prefix in self.values:
            raise UsageError(f"the name {prefix!r} would become empty: end --only at a dot")

        def short(name: str) -> str:
            return name.removeprefix(prefix)

        return Merged(
            self.located,
            {short(name): replace(whole, name=short(name)) for name, whole in self.tensors.items()},
            {short(name): value for name, value in self.values.items()},
            [
                {
                    name: with_leaves(part, lambda kind, leaf: [kind, short(leaf)])
                    for name, part in tree.items()
                }
                for tree in self.trees
            ],
        )


def merge(located: Located, only: str = "", seen: Seen = lambda nbytes: None) -> Merged:
    """Lists the content of a checkpoint. Tensors are read only if checksums do not tell whether those of two ranks are
    equal; `seen` is called for those bytes.

    Args:
        only: a prefix; other names are left out. The names are kept as they are.

    Raises:
        UsageError: no name begins with `only`, or a name of the state has the form that is reserved for ranks.
        StateError: two values have the same dotted name, pieces are missing, or an object is not a plain value.
    """
    states = _states(located)
    taken = next((n for s in states for n in s.tree if RANK_NAME.fullmatch(n)), None)
    if taken is not None:
        raise UsageError(
            f"{located.where}: the name {taken!r} is reserved for the state of one rank; save it under another name"
        )
    # The lowest rank that has a name owns it. Others are compared with that one only, so a name is either
    # common to all ranks that agree with the first, or belongs to one rank as `rank-N.name`.
    firsts: dict[str, _Leaf] = {}
    trees: list[dict[str, Tree]] = []
    named: dict[str, _Leaf] = {}
    for rank, state in enumerate(states):
        names: dict[str, tuple[str, str]] = {}
        for path, leaf in state.leaves(only).items():
            first = firsts.setdefault(path, leaf)
            # Replicas save the same tensor many times. Checksums usually show that without a read; see
            # `_equal_by_sums`.
            alike = first is leaf or _alike(located, path, first, leaf, seen)
            name = path if alike else f"rank-{rank}.{path}"
            names[path] = ("T" if leaf.is_tensor else "x", name)
            named[name] = first if alike else leaf
        trees.append(state.named(names, only))
    if only and not named:
        there = ", ".join(sorted({n.partition(".")[0] for s in states for n in s.tree}))
        raise UsageError(f"no name in {located.where} begins with {only!r}; names begin with {there}")
    return Merged(
        located,
        {name: _whole(located, name, leaf) for name, leaf in named.items() if leaf.is_tensor},
        {name: leaf.value for name, leaf in named.items() if not leaf.is_tensor},
        trees[:1] if all(t == trees[0] for t in trees) else trees,
    )


def build(tree: Tree, leaf: Callable[[str, Any], Any]) -> Any:
    """The nested state of a tree; leaf(kind, name) returns the value of a leaf. A tensor that is made of others is not
    put together: its class need not be available here.

    Raises:
        StateError: it is not such a tree.
    """
    kind, value = tree
    match kind:
        case "d":
            return {k: build(v, leaf) for k, v in value}
        case "l":
            return [build(v, leaf) for v in value]
        case "t":
            return tuple(build(v, leaf) for v in value)
        case "w":
            return DismantledTensor(kind, value[0], {at: build(v, leaf) for at, v in value[1]})
        case "p":
            return DismantledTensor(kind, value[0], build(value[1], leaf))
        case "T" | "x":
            return leaf(kind, value)
        case _:
            raise StateError(f"a state tree of another version: {kind!r}")


def union(trees: Iterable[Mapping[str, Tree]]) -> dict[str, Tree]:
    """Merges the trees of all ranks: of entries that several have, the lowest rank's is taken."""
    all_of: Tree = ["d", []]
    for tree in trees:
        all_of = _united(all_of, ["d", [[k, v] for k, v in tree.items()]])
    return dict(all_of[1])


def _united(first: Tree, second: Tree) -> Tree:
    # Only dicts are united. Lists of different ranks may differ in length and meaning, and joined by position
    # they would be a value that no rank had.
    if first[0] != "d" or second[0] != "d":
        return first
    theirs = dict(second[1])
    mine = [[k, _united(v, theirs.pop(k)) if k in theirs else v] for k, v in first[1]]
    return ["d", mine + [[k, v] for k, v in theirs.items()]]


# ---------------------------------------------------------------- a rank's state


@dataclass(frozen=True)
class _Leaf:
    """A plain value or a tensor of one rank."""

    value: Plain = None
    """The value, if it is plain."""
    rank: int = 0
    """The rank whose file has the tensor."""
    spec: TensorSpec | None = None
    """The tensor's place in that file; None: it is in no file."""
    local: torch.Tensor | None = None
    """The tensor itself, if it was saved with the values; else None."""

    @property
    def is_tensor(self) -> bool:
        return self.spec is not None or self.local is not None


@dataclass
class _State:
    """One rank's state under one top-level name."""

    where: str
    """Its name for people."""
    tree: dict[str, Any]
    """The tree as it was saved: a tensor is a number."""
    tensors: list[_Leaf]
    """The tensors by these numbers."""

    def leaves(self, only: str) -> dict[str, _Leaf]:
        """The leaves by dotted path."""
        by_path: dict[str, _Leaf] = {}
        for name, tree in self.tree.items():
            for path, kind, value in leaves(tree, name):
                if not path.startswith(only):
                    continue
                if path in by_path:
                    raise StateError(
                        f"{self.where}: two entries are named {path}, so the exported name would be ambiguous; "
                        "exclude them with --only, or save them under other keys"
                    )
                by_path[path] = self._leaf(kind, value)
        return by_path

    def named(self, names: Mapping[str, tuple[str, str]], only: str) -> dict[str, Tree]:
        """The tree with the entries of `names` at its leaves, restricted to names that begin with `only`."""
        trees = {name: _kept(tree, name, names, only) for name, tree in self.tree.items()}
        return {name: tree for name, tree in trees.items() if tree is not None}

    def _leaf(self, kind: str, value: Any) -> _Leaf:
        match kind:
            case "T":
                leaf: _Leaf = self.tensors[value]
                return leaf
            case "b":
                return self._small(value)
            case "x":
                return _Leaf(value)
            case _:
                raise StateError(f"{self.where} has a state tree of another version: {kind!r}")

    def _small(self, saved: Any) -> _Leaf:
        try:
            value = inlined(saved)
        except (AttributeError, RuntimeError, ValueError, TypeError) as error:
            raise StateError(
                f"{self.where} has a small value that this torch cannot read: {error}"
            ) from error
        return _Leaf(local=value) if isinstance(value, torch.Tensor) else _Leaf(value)


def _kept(tree: Any, path: str, names: Mapping[str, tuple[str, str]], only: str) -> Tree | None:
    """A list of which only some entries are kept becomes a dict by number, so that paths stay the same; a tensor that
    is made of others, only some of which are kept, becomes a dict of these."""
    kind, value = tree
    if kind == "p":
        shard = _kept(value[1], path, names, only)
        return shard if shard is None or shard[0] != "w" else [kind, [value[0], shard]]
    if kind not in ("d", "l", "t", "w"):
        return [*names[path]] if path in names else None
    pairs = value if kind == "d" else value[1] if kind == "w" else list(enumerate(value))
    parts = [(key, _kept(part, f"{path}.{key}", names, only)) for key, part in pairs]
    kept = [[key, part] for key, part in parts if part is not None]
    if not kept and not path.startswith(only):
        return None
    if kind == "w" and len(kept) == len(parts):
        return [kind, [value[0], kept]]
    # Never closed up: in a shorter list the entries behind the gap would have other numbers, and so other
    # names.
    if kind == "d" or len(kept) < len(parts):
        return ["d", kept]
    return [kind, [part for _, part in kept]]


def _states(located: Located) -> list[_State]:
    """Every rank's state; for a checkpoint of torch.distributed.checkpoint a single one for all ranks, because there a
    name means the same on every rank."""
    if not any(head.index.tree for head in located.heads) and located.paths():
        return [_flat_state(located)]
    return [
        _State(located.where, head.index.tree, [_Leaf(rank=rank, spec=spec) for spec in head.index.tensors])
        for rank, head in enumerate(located.heads)
    ]


def _flat_state(located: Located) -> _State:
    """Names to tensors and objects; their nesting is not saved."""
    tree: dict[str, Any] = {}
    tensors: list[_Leaf] = []
    for path in located.paths():
        rank, spec = located.pieces(path)[0]
        if spec.dtype != BYTES:
            tree[path] = ["T", len(tensors)]
            tensors.append(_Leaf(rank=rank, spec=spec))
            continue
        inner: list[tuple[str, torch.Tensor]] = []
        tree[path] = _shifted(pack(_object(located, rank, spec), path, inner), len(tensors))
        tensors += [_Leaf(local=tensor.detach().contiguous()) for _, tensor in inner]
    return _State(located.where, tree, tensors)


def _object(located: Located, rank: int, spec: TensorSpec) -> Any:
    """An entry that was saved as an object, read through torch's unpickler for plain values and tensors."""
    data = torch.empty(spec.nbytes, dtype=torch.uint8)
    stream = TensorSpec(
        path=spec.path, dtype="uint8", shape=(spec.nbytes,), offset=spec.offset, nbytes=spec.nbytes
    )
    read_regions(located, [Region(rank, stream, (0,), data)])
    try:
        value = torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True)
        pack(value, spec.path, [])
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, UsageError) as error:
        raise StateError(
            f"{located.where}: {spec.path} is an object, not a plain value, so it cannot be exported: exclude it "
            f"with --only, or save its state_dict() ({str(error).splitlines()[0]})"
        ) from error
    return value


def _shifted(tree: Any, by: int) -> Any:
    return with_leaves(tree, lambda kind, value: [kind, value + by if kind == "T" else value])


# ---------------------------------------------------------------- tensors


def _whole(located: Located, name: str, leaf: _Leaf) -> MergedTensor:
    spec = leaf.spec
    if spec is None:
        assert leaf.local is not None
        return MergedTensor(name, leaf.local.dtype, tuple(leaf.local.shape), leaf)
    shape = spec.global_shape or spec.shape
    if spec.global_shape:
        there = sum(math.prod(s.shape) for _, s in located.pieces(spec.path))
        # Counting elements is enough, because pieces of one tensor never overlap: ranks save disjoint boxes,
        # and equal boxes were taken for one by `pieces`.
        if there != math.prod(shape):
            raise StateError(
                f"{located.where}: {spec.path}: the pieces of the ranks have {there} elements, but the whole tensor "
                f"has {math.prod(shape)}"
            )
    return MergedTensor(name, dtype_of(spec), shape, leaf)


def _read(located: Located, leaves: Sequence[_Leaf]) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    regions: list[Region] = []
    for leaf in leaves:
        spec = leaf.spec
        if spec is None:
            assert leaf.local is not None
            tensors.append(leaf.local)
            continue
        target = torch.empty(spec.global_shape or spec.shape, dtype=dtype_of(spec))
        tensors.append(target)
        if spec.global_shape:
            regions += regions_of(
                located,
                Leaf(
                    path=spec.path,
                    local=target,
                    global_shape=spec.global_shape,
                    start=(0,) * len(spec.global_shape),
                ),
                leaf.rank,
                [],
            )
        else:
            regions.append(Region(leaf.rank, spec, (0,) * len(spec.shape), target))
    read_regions(located, regions)
    return tensors


def _alike(located: Located, path: str, first: _Leaf, other: _Leaf, seen: Seen) -> bool:
    """Whether two ranks saved the same value under a path."""
    if not first.is_tensor or not other.is_tensor:
        return (
            first.is_tensor == other.is_tensor
            and type(first.value) is type(other.value)
            and repr(first.value) == repr(other.value)  # repr, because NaN is not equal to itself
        )
    if first.spec is not None and other.spec is not None:
        if first.spec.dtype != other.spec.dtype:
            return False
        if first.spec.global_shape or other.spec.global_shape:
            if first.spec.global_shape == other.spec.global_shape:
                return True
            raise StateError(
                f"{located.where}: {path} is a piece of {first.spec.global_shape} on rank {first.rank} and of "
                f"{other.spec.global_shape} on rank {other.rank}: they cannot be put together"
            )
        if first.spec.shape != other.spec.shape:
            return False
        equal = _equal_by_sums(located, first, first.spec, other, other.spec)
        if equal is not None:
            return equal
    elif first.local is None or other.local is None:
        return False  # one is too large to be saved with the plain values, the other is not
    mine, theirs = _read(located, [first, other])
    seen(2 * mine.nbytes)
    return (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape) and torch.equal(
        mine.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8)
    )


def _equal_by_sums(
    located: Located, first: _Leaf, mine: TensorSpec, other: _Leaf, theirs: TensorSpec
) -> bool | None:
    """Whether two tensors' bytes are equal, from the checksums of the chunks that contain them; None: the checksums do
    not tell."""
    # Chunks begin at multiples of CHUNK_BYTES of the blob. Only tensors at the same offset are cut at the
    # same bytes, so only then equal bytes have equal sums.
    if mine.offset != theirs.offset:
        return None
    end = mine.offset + mine.nbytes
    sums = [located.heads[leaf.rank].sums for leaf in (first, other)]

    def of_chunks(low: int, high: int) -> list[bytes]:
        return [s[low * SUM_BYTES : high * SUM_BYTES] for s in sums]

    # The outer chunks also hold bytes of the neighbours. Equal sums around the tensor prove it equal; unequal
    # ones may be the neighbours' fault. The chunks that lie completely inside prove it different. Between
    # these two answers the bytes must be read.
    around = of_chunks(mine.offset // CHUNK_BYTES, -(-end // CHUNK_BYTES))
    if around[0] == around[1]:
        return True
    low, high = -(-mine.offset // CHUNK_BYTES), end // CHUNK_BYTES
    if low < high:
        inside = of_chunks(low, high)
        if inside[0] != inside[1]:
            return False
    return None
