"""The tiers as storage of torch.distributed.checkpoint: a StorageWriter and a StorageReader.

dcp.save(state, checkpoint_id="step-100", storage_writer=holdfast.checkpoint.TieredWriter())
dcp.load(state, storage_reader=holdfast.checkpoint.TieredReader())
"""

from __future__ import annotations

import io
import logging
import os
import re
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from holdfast.checkpoint.api import backend_for, expect_as, wait_for_copy
from holdfast.checkpoint.backends import PassedOver
from holdfast.checkpoint.loading import inlined
from holdfast.checkpoint.located import Located
from holdfast.checkpoint.regions import Region, read_regions
from holdfast.errors import StateError, TierError, UnreadError, UsageError
from holdfast.tensors import loaded, staging
from holdfast.tensors.index import StateIndex, TensorSpec, leaves
from holdfast.tensors.tree import by_width, dtype_of, unpack
from holdfast.tensors.wrappers import inside_of, is_wrapper

_log = logging.getLogger(__name__)
BYTES = "bytes"
"""The dtype of what a planner gave as a stream of bytes."""

Id = str | os.PathLike[str] | None


def step_of_id(checkpoint_id: Id) -> int | None:
    """The step that a checkpoint's id names: its last number, as in `run/step-100`; None without one."""
    numbers = re.findall(r"\d+", str(checkpoint_id).rstrip("/").rpartition("/")[2]) if checkpoint_id else []
    return int(numbers[-1]) if numbers else None


class TieredWriter(StorageWriter):
    """Saves into the tiers, see `holdfast.checkpoint.save`.

    `dcp.save` returns when every rank's part is with its agent, or, without a job, when the checkpoint is in the
    durable tier. The step is the number in `checkpoint_id` (`step-100`), or what `step` is set to, or one more than
    at the last save. Every rank of the default process group takes part.
    """

    def __init__(self, to: str | None = None, step: int | None = None) -> None:
        """to: without a job: the durable tier, as for `save`."""
        self.step = step
        self._to = to
        self._named: int | None = None
        self._saved = 0

    def reset(self, checkpoint_id: Id = None) -> None:
        """A new checkpoint begins."""
        self._named = step_of_id(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing is agreed on between ranks."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Copies this rank's items into memory.

        Raises:
            TierError: there was no memory for it; the message says why.
            UsageError: a tensor that is made of others, or one that could not be restored.
        """
        wait_for_copy()
        # The id's number wins, since a user who writes `step-100` means it. Every rank computes the same,
        # because all get the same id and make the same calls.
        step = next(s for s in (self._named, self.step, self._saved + 1) if s is not None)
        self._named = None
        given = [_resolve(item, planner) for item in plan.items]
        order = by_width(given)
        items, tensors = [plan.items[n] for n in order], [given[n] for n in order]
        specs: list[TensorSpec] = []
        offset = 0
        for item, tensor in zip(items, tensors, strict=True):
            spec = _spec_of(item, tensor, offset)
            specs.append(spec)
            offset += spec.nbytes
        index = StateIndex(step, {}, tuple(specs), offset)
        backend = backend_for(self._to)
        ready = staging.now(tensors)
        # Whoever saves with dcp is told that it is saved, or gets an error: it is never passed over.
        fill = backend.begin(index, wanted=True)
        if (
            isinstance(fill, PassedOver)
            or fill(lambda blob: staging.copy_into(blob, tensors, ready)) is not True
        ):
            raise TierError(f"step {step} was not saved: see the previous message")
        self._saved = step
        done: Future[list[WriteResult]] = Future()
        done.set_result(
            [WriteResult(item.index, spec.nbytes, None) for item, spec in zip(items, specs, strict=True)]
        )
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """The coordinator of the job, or the saving thread, writes the manifest; here it is waited for.

        Raises:
            TierError: it is not in the durable tier.
        """
        backend = backend_for(self._to)
        # dcp calls `finish` on its coordinator only. When `dcp.save` returns there, the checkpoint must be
        # complete in the durable tier, or a script that removes the previous one by itself could lose both.
        backend.flush()
        why = backend.why_not(self._saved)
        if why:
            raise TierError(f"step {self._saved} was not saved: {why}")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """An id with a number in it."""
        return step_of_id(checkpoint_id) is not None


class TieredReader(StorageReader):
    """Loads from the nearest tier that has the complete checkpoint, into any sharding; only the bytes that are needed.

    Attributes:
        found: what is being read; its `fetched_bytes` grows.
    """

    def __init__(self, source: str | None = None, step: int | None = None) -> None:
        """source: without a job: the durable tier. step: this one; by default the newest, or what `checkpoint_id`
        names."""
        self.found: Located | None = None
        self._step, self._source = step, source

    def reset(self, checkpoint_id: Id = None) -> None:
        """A new load begins."""
        named = step_of_id(checkpoint_id)
        if named is not None:
            self._step = named
        self.found = None

    def read_metadata(self, *args: Any, **more: Any) -> Metadata:
        """Finds the checkpoint. (With an argument called kwargs, torch would take an error for the wish to be asked
        again by rank.)

        Raises:
            StateError: there is none, or none that is complete.
        """
        wait_for_copy()
        backend = backend_for(self._source)
        reasons: list[str] = []
        for located in backend.candidates(reasons.append):
            if self._step not in (None, located.step):
                continue
            try:
                metadata = metadata_of(located)
            except UnreadError as error:
                reasons.append(str(error))
            else:
                self.found = located
                break
        for why in reasons:
            _log.warning(f"rank {backend.rank} skipped a checkpoint: {why}")
        if self.found is None:
            if self._step is None and not reasons:
                backend.loaded(None)
            wanted = "" if self._step is None else f" of step {self._step}"
            raise StateError(
                f"no complete checkpoint{wanted} was found{': ' if reasons else ''}{'; '.join(reasons)}"
            )
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing is agreed on between ranks."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Adds to the plan which parts of the checkpoint this rank has located."""
        assert self.found is not None
        return replace(plan, storage_data=(self.found.step, self.found.identity, self.found.where))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are.

        Raises:
            StateError: the ranks found different checkpoints.
        """
        choices = [plan.storage_data for plan in plans]
        # Compared on the coordinator, before any rank reads. Each rank located its checkpoint alone, and a
        # tier may have gained a newer one between two ranks' listings.
        if len({(step, identity) for step, identity, _ in choices}) > 1:
            where = "; ".join(f"rank {rank}: {where}" for rank, (_, _, where) in enumerate(choices))
            raise StateError(f"the ranks found different checkpoints; choose one by its step: {where}")
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads every item.

        Raises:
            StateError: bytes that no source has, or objects that are no plain values.
        """
        located = self.found
        assert located is not None
        backend = backend_for(self._source)
        reader = backend.rank
        values = _values(located)
        regions: list[Region] = []
        targets: list[tuple[ReadItem, torch.Tensor, torch.Tensor]] = []
        streams: list[tuple[ReadItem, torch.Tensor]] = []
        for item in plan.items:
            fqn = item.storage_index.fqn
            if item.type is LoadItemType.BYTE_IO:
                if fqn in values:
                    planner.load_bytes(item, _pickled(values[fqn]))
                    continue
                owner, spec = located.pieces(fqn, reader)[0]
                data = torch.empty(spec.nbytes, dtype=torch.uint8)
                stream = TensorSpec(
                    path=spec.path,
                    dtype="uint8",
                    shape=(spec.nbytes,),
                    offset=spec.offset,
                    nbytes=spec.nbytes,
                )
                regions.append(Region(owner, stream, (0,), data))
                streams.append((item, data))
                continue
            target = planner.resolve_tensor(item).detach()
            if fqn in values:
                box = _box(item.storage_offsets, item.lengths)
                targets.append((item, target, values[fqn][box]))
                continue
            owner, spec = _piece(located, item, reader)
            dtype = dtype_of(spec)
            # Read in place where that is possible: a staging tensor for each item would take the memory of
            # the state a second time.
            plain = is_wrapper(target) or not loaded.is_expanded(target)
            direct = target.device.type == "cpu" and target.dtype == dtype and plain
            into = target if direct else torch.empty(tuple(item.lengths), dtype=dtype)
            regions.append(Region(owner, spec, tuple(item.storage_offsets), into))
            targets.append((item, target, into))
        total = sum(r.target.numel() * r.target.element_size() for r in regions)
        with backend.loading(located.where, total) as seen:
            read_regions(located, regions, seen=seen)
        with torch.no_grad():
            for item, target, into in targets:
                if into is not target and is_wrapper(target):
                    target.copy_(into)
                elif into is not target:
                    loaded.check_source(item.storage_index.fqn, target, into)
                    loaded.write_into(target, into)
                planner.commit_tensor(item, target)
        for item, data in streams:
            # The planner unpickles whatever it is given, and a checkpoint may come from anywhere. So its
            # bytes pass torch's restricted unpickler first: see `_harmless`.
            planner.load_bytes(item, _harmless(data, item.storage_index.fqn))
        backend.loaded(located.step)
        expect_as(located, backend)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """An id with a number in it."""
        return step_of_id(checkpoint_id) is not None


def metadata_of(located: Located) -> Metadata:
    """What torch.distributed.checkpoint plans a load with."""
    entries: dict[str, Any] = {}
    for path in located.paths():
        # Pieces in whatever sharding they were saved: torch's planner then cuts its reads from them, so a
        # checkpoint of eight ranks loads on three without a step in between.
        pieces = [spec for _, spec in located.pieces(path)]
        first = pieces[0]
        if first.dtype == BYTES:
            entries[path] = BytesStorageMetadata()
            continue
        chunks = [
            ChunkStorageMetadata(torch.Size(s.start or (0,) * len(s.shape)), torch.Size(s.shape))
            for s in pieces
        ]
        size = torch.Size(first.global_shape or first.shape)
        entries[path] = TensorStorageMetadata(TensorProperties(dtype=dtype_of(first)), size, chunks)
    for path, value in _values(located).items():
        if isinstance(value, torch.Tensor):
            chunk = ChunkStorageMetadata(torch.Size((0,) * value.dim()), value.shape)
            entries[path] = TensorStorageMetadata(TensorProperties(dtype=value.dtype), value.shape, [chunk])
        else:
            entries[path] = BytesStorageMetadata()
    return Metadata(entries)


def _values(located: Located) -> dict[str, Any]:
    """What `holdfast.checkpoint.save` keeps with the index: plain values and small tensors, by their path."""
    values: dict[str, Any] = {}
    for name, tree in located.heads[0].index.tree.items():
        for path, kind, value in leaves(tree, name, _is_plain):
            if kind in ("l", "t"):
                values[path] = unpack([kind, value], [])
            elif kind != "T":
                values[path] = inlined(value) if kind == "b" else value
    return values


def _is_plain(tree: Any) -> bool:
    """A list without tensors and dicts in it is one value to torch's planners."""
    kind, value = tree
    return kind == "x" or (kind in ("l", "t") and all(map(_is_plain, value)))


def _piece(located: Located, item: ReadItem, reader: int) -> tuple[int, TensorSpec]:
    """The saved piece that an item reads from."""
    offset = tuple(item.storage_index.offset or ())
    for owner, spec in located.pieces(item.storage_index.fqn, reader):
        if (spec.start or (0,) * len(spec.shape)) == (offset or (0,) * len(spec.shape)):
            return owner, spec
    raise StateError(f"{item.storage_index.fqn}: the checkpoint does not contain a piece at {offset}")


def _resolve(item: WriteItem, planner: SavePlanner) -> torch.Tensor:
    data = planner.resolve_data(item)
    if item.type is WriteItemType.BYTE_IO:
        assert isinstance(data, io.BytesIO)
        return torch.frombuffer(bytearray(data.getbuffer()), dtype=torch.uint8)
    assert isinstance(data, torch.Tensor)
    inside = inside_of(data)
    if is_wrapper(inside):
        raise UsageError(
            f"{item.index.fqn}: a {type(inside).__name__} consists of several tensors, but "
            "torch.distributed.checkpoint has only one entry for it: save it with holdfast.checkpoint.save, or put "
            "its inner tensors into the state"
        )
    loaded.check_writable(item.index.fqn, inside)
    return data.detach()


def _spec_of(item: WriteItem, tensor: torch.Tensor, offset: int) -> TensorSpec:
    fqn, nbytes = item.index.fqn, tensor.numel() * tensor.element_size()
    if item.type is WriteItemType.BYTE_IO:
        return TensorSpec(path=fqn, dtype=BYTES, shape=(nbytes,), offset=offset, nbytes=nbytes)
    data = item.tensor_data
    assert data is not None
    shape, global_shape = tuple(data.chunk.sizes), tuple(data.size)
    piece = shape != global_shape
    return TensorSpec(
        path=fqn,
        dtype=str(tensor.dtype)[6:],
        shape=shape,
        offset=offset,
        nbytes=nbytes,
        global_shape=global_shape if piece else (),
        start=tuple(data.chunk.offsets) if piece else (),
    )


def _box(offsets: torch.Size, lengths: torch.Size) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))


def _pickled(value: Any) -> io.BytesIO:
    """A plain value in the form in which planners expect objects."""
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream


def _harmless(data: torch.Tensor, fqn: str) -> io.BytesIO:
    """An object's bytes for the planner, which unpickles whatever it is given: not those that were saved, but those of
    the object that torch's own unpickler made of them, which refuses everything that could run code."""
    try:
        value = torch.load(io.BytesIO(bytes(data.numpy())), weights_only=True)
    except Exception as error:
        raise StateError(
            f"{fqn} is an object that could run code when it is loaded: save plain values and tensors, or allow its "
            f"class with torch.serialization.add_safe_globals ({str(error).partition(chr(10))[0]})"
        ) from error
    return _pickled(value)
