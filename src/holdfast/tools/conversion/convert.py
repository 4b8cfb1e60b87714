"""Exports checkpoints for other programs and imports theirs: safetensors in Hugging Face's layout, and files of torch.save.

**safetensors**: a folder. Names are dotted paths in the state. Plain values and the nesting, which safetensors do not
know, are in `values.json` beside them:

    {"format": 1, "values": {"epoch": 3}, "nesting": [{"epoch": ["x", "epoch"], ...}]}

`nesting` has a tree for every rank, see `holdfast.tensors.tree`, with names at its leaves; a single one if no two
ranks' states differ, and null for a part that is as on rank 0.

**torch**: one file with the nested state; if ranks' states differ, the states of all ranks are in it as well, as
`rank-0`, `rank-1` and so on. Tensors that they share are in the file once.

A checkpoint of `torch.distributed.checkpoint` is flat: its storage does not contain the nesting.

A tensor that is made of others, such as a quantized moment, is exported as these others: in safetensors by their dotted
names, in
a file of torch.save as a dict of them. The information that makes it one tensor again is in `nesting`, or in the dict
under `holdfast.wrapper`.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import pickle
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from holdfast.checkpoint.archive import Archive
from holdfast.checkpoint.layout import (
    HEAD_SUFFIX,
    MANIFEST,
    Sealed,
    folder_of,
    parts_of,
    seal,
    step_of,
    sums_of_buffers,
)
from holdfast.checkpoint.loading import FlatState, flatten
from holdfast.checkpoint.located import find_in_archive
from holdfast.checkpoint.tier import ADVICE, DiskTier, sync_folder
from holdfast.errors import HoldfastError, StateError, TierError, UsageError
from holdfast.protocol import units
from holdfast.protocol.snapshots import Shard
from holdfast.protocol.wire.decoding import decode
from holdfast.tensors.tree import DismantledTensor, buffer_of
from holdfast.tools.conversion import safetensors_io
from holdfast.tools.conversion.consolidate import RANK_NAME, Merged, MergedTensor, Tree, build, merge, union

VALUES = "values.json"
VALUES_FORMAT = 1
FILE_BYTES = 5 << 30
"""The most bytes in one safetensors file, the same limit as in Hugging Face's libraries."""

BATCH_BYTES = 64 << 20
"""Small tensors are read this many bytes at a time: one by one, each would wait for an object store's answer."""

READ_BYTES = 16 << 20
ALIGNED_BYTES = 64

Seen = Callable[[str, int, int | None], None]
"""Called with the kind of work, the number of bytes just processed, and the total; None: not known."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """The content of an export."""

    files: tuple[Path, ...]
    tensors: int
    """Number of tensors."""
    values: int
    """Number of plain values."""
    nbytes: int
    """Bytes of all tensors."""
    of_ranks: tuple[str, ...]
    """Names under which other ranks have values that differ from the first rank's."""


def unseen(what: str, nbytes: int, total: int | None) -> None:
    """A `Seen` that ignores progress."""


# ---------------------------------------------------------------- export


def export_safetensors(
    archive: Archive,
    step: int,
    out: Path,
    only: str = "",
    file_bytes: int = FILE_BYTES,
    seen: Seen = unseen,
    *,
    strip: bool = False,
) -> Exported:
    """Writes a checkpoint as a folder of safetensors. The folder appears only when it is complete and durable.

    Memory: a few times that of the largest tensor, or of BATCH_BYTES.

    Args:
        out: a folder that does not exist yet, or is empty.
        only: a prefix; other names are left out.
        strip: remove the prefix `only` from the names.
        file_bytes: the most bytes of tensors in one file; a larger tensor has a file of its own.

    Raises:
        UsageError: `out` cannot be used, no name begins with `only`, or safetensors lack a dtype.
        StateError: the checkpoint is not complete.
        TierError: the tier cannot be read, or the disk not written.
    """
    _need_library()
    if out.name.endswith(safetensors_io.SUFFIX):
        raise UsageError(
            f"{out}: an export is a folder that contains model.safetensors: pass the name of a folder"
        )
    # Checked before anything is read, which may take hours from an object store. An export never replaces
    # existing files: they may be the only copy.
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UsageError(f"{out} exists: choose another folder, or remove it")
    merged = _merged(archive, step, only, seen)
    if strip:
        merged = merged.stripped(only)
    # Also before the first byte: a dtype that the format lacks must not be found in the last file only.
    safetensors_io.check_names(merged.tensors.values())
    with _written_beside(out, merged.nbytes) as work:
        files = safetensors_io.plan_files(merged.tensors.values(), file_bytes)
        for name, group in files.items():
            ordered = safetensors_io.in_file_order(group)
            tensors = _read_in_batches(merged, ordered)
            safetensors_io.write_file(
                work / name, ordered, tensors, lambda n: seen("exporting", n, merged.nbytes)
            )
        if len(files) > 1:
            (work / safetensors_io.INDEX).write_text(safetensors_io.index_of(files))
        (work / VALUES).write_text(_values_text(merged))
        names = sorted(path.name for path in work.iterdir())
        for name in names:
            # Files, then the folder, then the rename, then the folder around it: `out` appears complete or
            # not at all, also after a power failure.
            _make_durable(work / name)
        sync_folder(work)
        work.rename(out)
    return _exported(merged, tuple(out / name for name in names))


def export_torch(archive: Archive, step: int, out: Path, only: str = "", seen: Seen = unseen) -> Exported:
    """Writes a checkpoint as one file of torch.save, for `torch.load(weights_only=True)`. It appears only when it is
    complete and durable.

    torch.save takes all tensors at once: they are first put into a file beside it, and mapped from there. So it takes
    twice the space on the disk, and as little memory as `export_safetensors`.

    Raises:
        As `export_safetensors`.
    """
    if out.exists():
        raise UsageError(f"{out} exists: choose another file, or remove it")
    merged = _merged(archive, step, only, seen)
    with _written_beside(out, 2 * merged.nbytes) as work:
        tensors = _mapped_tensors(merged, work / "tensors", seen)

        def leaf(kind: str, name: str) -> Any:
            value = tensors[name] if kind == "T" else merged.values[name]
            return sys.intern(value) if isinstance(value, str) else value

        # Tensors that ranks share are the same object in every rank's state, and torch.save writes an
        # object's storage once.
        state = _nested(union(merged.trees), leaf)
        if len(merged.trees) > 1:
            state |= {f"rank-{rank}": _nested(tree, leaf) for rank, tree in enumerate(merged.trees)}
        with (work / "state").open(
            "wb"
        ) as file:  # an open file: of a path torch.save writes the name into it
            try:
                torch.save(state, file)
            except RuntimeError as error:  # also raised in place of an OSError that passes through C++
                raise TierError(f"{out} could not be written: {_reason(error)}") from error
        _make_durable(work / "state")
        (work / "state").rename(out)
    return _exported(merged, (out,))


def _merged(archive: Archive, step: int, only: str, seen: Seen) -> Merged:
    found = find_in_archive(archive, step)
    return merge(found, only, lambda nbytes: seen("comparing ranks", nbytes, None))


def _exported(merged: Merged, files: tuple[Path, ...]) -> Exported:
    named = [*merged.tensors, *merged.values]
    of_ranks = tuple(n for n in named if RANK_NAME.fullmatch(n.partition(".")[0]))
    return Exported(
        files=files,
        tensors=len(merged.tensors),
        values=len(merged.values),
        nbytes=merged.nbytes,
        of_ranks=of_ranks,
    )


def _read_in_batches(merged: Merged, ordered: Sequence[MergedTensor]) -> Iterator[torch.Tensor]:
    batch: list[MergedTensor] = []
    for tensor in ordered:
        if batch and sum(t.nbytes for t in batch) + tensor.nbytes > BATCH_BYTES:
            yield from merged.read(batch)
            batch = []
        batch.append(tensor)
    yield from merged.read(batch)


def _values_text(merged: Merged) -> str:
    first = merged.trees[0]
    nesting = [first] + [
        {name: None if first.get(name) == part else part for name, part in tree.items()}
        for tree in merged.trees[1:]
    ]
    values = {name: _to_json(value) for name, value in merged.values.items()}
    # One line each: not meant for people.
    trees = ",\n  ".join(json.dumps(part, allow_nan=False) for part in nesting)
    return (
        f'{{\n "format": {VALUES_FORMAT},\n "values": {json.dumps(values, indent=2, allow_nan=False)},\n'
        f' "nesting": [\n  {trees}\n ]\n}}\n'
    )


def _to_json(value: Any) -> Any:
    """JSON has neither infinity nor NaN."""
    return {"float": str(value)} if isinstance(value, float) and not math.isfinite(value) else value


def _nested(tree: Mapping[str, Tree], leaf: Callable[[str, Any], Any]) -> dict[str, Any]:
    """Uses one object for equal strings: pickle writes an object once, so equal states give equal files."""
    return {
        sys.intern(name): _with_interned_keys(_as_dicts(build(part, leaf))) for name, part in tree.items()
    }


WRAPPER = "holdfast.wrapper"
"""The key of a dict in a file of torch.save that marks it as a tensor that is made of others."""


def _as_dicts(value: Any) -> Any:
    """The nested state with a dict for every tensor that is made of others."""
    if isinstance(value, DismantledTensor):
        inner = value.value if value.kind == "w" else {"shard": value.value}
        return {**{at: _as_dicts(part) for at, part in inner.items()}, WRAPPER: [value.kind, value.about]}
    if isinstance(value, dict):
        return {k: _as_dicts(v) for k, v in value.items()}
    return type(value)(map(_as_dicts, value)) if isinstance(value, list | tuple) else value


def _from_dicts(value: Any) -> Any:
    """The opposite of `_as_dicts`."""
    if isinstance(value, dict):
        inner = {k: _from_dicts(v) for k, v in value.items() if k != WRAPPER}
        if WRAPPER not in value:
            return inner
        kind, about = value[WRAPPER]
        if kind not in ("w", "p") or not isinstance(about, dict):
            raise ValueError(f"unknown kind: {kind!r}")
        return DismantledTensor(kind, about, inner if kind == "w" else inner["shard"])
    return type(value)(map(_from_dicts, value)) if type(value) in (list, tuple) else value


def _with_interned_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {sys.intern(k) if isinstance(k, str) else k: _with_interned_keys(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_with_interned_keys, value))
    return value


def _mapped_tensors(merged: Merged, path: Path, seen: Seen) -> dict[str, torch.Tensor]:
    """All tensors in an unlinked temporary file, and mapped from it."""
    wholes = list(merged.tensors.values())
    begins: list[int] = []
    with path.open("w+b") as file:
        # Open but without a name: the kernel frees the disk space when the mapping ends, even if this process
        # is killed.
        path.unlink()
        for tensor in _read_in_batches(merged, wholes):
            file.write(bytes(-file.tell() % ALIGNED_BYTES))
            begins.append(file.tell())
            data = buffer_of(tensor)
            for low in range(0, len(data), READ_BYTES):
                seen("exporting", file.write(data[low : low + READ_BYTES]), merged.nbytes)
        file.write(b"\0")  # an empty file cannot be mapped
        file.flush()
        blob = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return {
        w.name: torch.frombuffer(blob, dtype=torch.uint8, count=w.nbytes, offset=at)
        .view(w.dtype)
        .view(w.shape)
        if w.nbytes
        else torch.empty(w.shape, dtype=w.dtype)
        for w, at in zip(wholes, begins, strict=True)
    }


@contextmanager
def _written_beside(out: Path, nbytes: int) -> Iterator[Path]:
    """A temporary folder beside `out` to write into; it is removed at the end.

    Raises:
        UsageError: there is no folder for `out`.
        TierError: there is no space for `nbytes`, or the disk cannot be written.
    """
    folder = out.absolute().parent
    if not folder.is_dir():
        raise UsageError(f"{folder} is not an existing folder: create it first, or choose another one")
    check_room(out, nbytes, shutil.disk_usage(folder).free)
    work = folder / f".{out.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}"
    try:
        work.mkdir()
        yield work
        sync_folder(folder)
    except OSError as error:
        advice = ADVICE.get(error.errno or 0, error.strerror or str(error))
        raise TierError(f"{out} could not be written: {advice}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def check_room(out: Path, nbytes: int, free_bytes: int) -> None:
    """Raises TierError unless enough space is free."""
    if nbytes > free_bytes:
        raise TierError(
            f"{out} could not be written: it needs {units.size(nbytes)}, but only {units.size(free_bytes)} are free: "
            "free some space, or choose another folder"
        )


def _make_durable(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


# ---------------------------------------------------------------- import


def read_portable(source: Path) -> list[dict[str, Any]]:
    """Reads a safetensors file or folder, or a file of torch.save: the state of every rank, a single one if no two differ.
    Tensors are mapped from the files. Nothing that could run code is loaded.

    Raises:
        UsageError: it does not exist, is none of these, is cut short, or contains objects.
    """
    if not source.exists():
        raise UsageError(
            f"{source} does not exist: pass a safetensors file, a folder of them, or a file written by torch.save"
        )
    # Its files have pieces of tensors, and checksums between them.
    if _is_checkpoint(source if source.is_dir() else source.parent):
        raise UsageError(
            f"{source} is a checkpoint of Holdfast: it is loaded as it is, from the folder around it; to put it "
            "elsewhere, copy its folder"
        )
    if source.is_dir() and any(map(_is_checkpoint, source.glob("step-*"))):
        raise UsageError(
            f"{source} contains checkpoints of Holdfast: they are loaded from there as they are; to put one elsewhere, "
            "copy its folder"
        )
    if source.is_dir() or source.name.endswith((safetensors_io.SUFFIX, safetensors_io.INDEX_SUFFIX)):
        _need_library()
        return _with_values(safetensors_io.read_files(source), source)
    try:
        state = _from_dicts(_load_torch(source))
    except (KeyError, ValueError, TypeError) as error:
        raise UsageError(
            f"{source}: its description of a tensor subclass ({WRAPPER}) was changed: export it again ({error!r})"
        ) from error
    ranks = [name for name in state if RANK_NAME.fullmatch(name)]
    if not ranks:
        return [state]
    if set(ranks) != {f"rank-{n}" for n in range(len(ranks))} or not all(
        isinstance(state[r], dict) for r in ranks
    ):
        raise UsageError(
            f"{source}: its entries {', '.join(ranks)} look like states of ranks, but are not those of all ranks "
            "from 0 on: rename them"
        )
    return [state[f"rank-{n}"] for n in range(len(ranks))]


def _is_checkpoint(folder: Path) -> bool:
    # Not by its name: "." has none, and a copy has another one.
    return (folder / MANIFEST).is_file() and any(folder.glob(f"*{HEAD_SUFFIX}"))


def import_checkpoint(source: Path, archive: Archive, step: int, seen: Seen = unseen) -> tuple[int, int]:
    """Makes a checkpoint from files of another program, or of `export_safetensors` and `export_torch`.

    Args:
        source: see `read_portable`.
        step: the step of the new checkpoint.

    Returns:
        The number of its ranks, and the bytes of its tensors.

    Raises:
        UsageError: the source cannot be used, or there is a checkpoint of that step.
        TierError: the tier cannot be written.
        In each case nothing is left in the tier.
    """
    # A common mistake: the folder of one checkpoint instead of the one around it. The import would create
    # step-N/step-N, which nothing ever finds.
    if step_of(archive.tier.url.rpartition("/")[2]) is not None:
        raise UsageError(
            f"{archive.tier.url} is a single checkpoint: pass the folder that contains it, and its --step"
        )
    if folder_of(step) in archive.tier.folders():
        raise UsageError(f"{archive.where(step)} already exists: choose another --step, or remove it")
    shards = _shards_of(read_portable(source), source, step, seen)
    with _nothing_left_of(archive, step):
        written: set[str] = set()
        total = sum({shard.blob_name: shard.flat.index.nbytes for shard in shards}.values())
        for shard in shards:
            # Ranks with equal bytes share a blob, as in a live job. Only the head differs.
            if shard.blob_name in written:
                archive.save_head(shard.planned, shard.sealed.head)
                continue
            archive.save_shard(
                step,
                shard.rank,
                shard.sealed,
                _buffers(shard.flat),
                lambda nbytes: seen("writing", nbytes, total),
            )
            written.add(shard.blob_name)
        manifest = archive.commit(step, [s.planned for s in shards])
    return manifest.world, manifest.nbytes


@dataclass(frozen=True, kw_only=True)
class _RankShard:
    """A rank's part, ready to be written."""

    rank: int
    flat: FlatState
    sealed: Sealed
    planned: Shard
    """The names and digests of its files."""

    @property
    def blob_name(self) -> str:
        return self.planned.blob.name


def _shards_of(states: Sequence[dict[str, Any]], source: Path, step: int, seen: Seen) -> list[_RankShard]:
    """Ranks whose tensors have equal names and bytes share a blob. Bytes at the same addresses are summed only once."""
    sums_at: dict[tuple[tuple[int, int], ...], bytes] = {}
    blobs: dict[str, str] = {}
    shards = []
    for rank, state in enumerate(states):
        try:
            flat = flatten(state, step)
        except UsageError as error:
            raise UsageError(f"{source}: {error}") from error
        addresses = tuple(
            (t.data_ptr(), s.nbytes) for t, s in zip(flat.tensors, flat.index.tensors, strict=True)
        )
        # By address: ranks that share storage in the file are mapped from the same bytes. Summing them for
        # each rank would read a large model as often as it has ranks.
        if addresses not in sums_at:
            sums_at[addresses] = sums_of_buffers(_counted(_buffers(flat), seen))
        sealed = seal(flat.index, sums_at[addresses])
        blob = parts_of(step, rank, sealed).blob
        planned = parts_of(step, rank, sealed, blobs.setdefault(blob.xxh3, blob.name))
        shards.append(_RankShard(rank=rank, flat=flat, sealed=sealed, planned=planned))
    return shards


def _buffers(flat: FlatState) -> Iterator[memoryview]:
    for tensor in flat.tensors:
        data = buffer_of(tensor.contiguous())
        for low in range(0, len(data), READ_BYTES):
            yield data[low : low + READ_BYTES]


def _counted(buffers: Iterator[memoryview], seen: Seen) -> Iterator[memoryview]:
    for buffer in buffers:
        yield buffer
        seen("reading", len(buffer), None)


@contextmanager
def _nothing_left_of(archive: Archive, step: int) -> Iterator[None]:
    """Removes the files of a checkpoint that could not be completed, with the folders made for it."""
    made: list[Path] = []
    if isinstance(archive.tier, DiskTier):
        folder = archive.tier.folder
        made = [f for f in (folder, *folder.parents) if not f.exists()]
    try:
        yield
    except BaseException:
        with suppress(HoldfastError):
            # The step did not exist before, which was checked above, so everything in its folder is ours.
            archive.remove(step)
        for folder in made:
            with suppress(OSError):
                folder.rmdir()
        raise


def _with_values(tensors: dict[str, torch.Tensor], source: Path) -> list[dict[str, Any]]:
    """The nested states, with plain values, from `values.json`; without that file, names to tensors."""
    path = (source if source.is_dir() else source.parent) / VALUES
    if not path.exists():
        return [dict(tensors)]
    try:
        document = decode(json.loads, path.read_bytes(), f"{path} is damaged", error=StateError)
        version, values, nesting = document["format"], document["values"], document["nesting"]
        if version > VALUES_FORMAT:
            raise UsageError(
                f"{path} has format {version}, but this version of Holdfast reads formats up to {VALUES_FORMAT}: "
                "update Holdfast"
            )
        used: set[str] = set()

        def leaf(kind: str, name: str) -> Any:
            used.add(name)
            if kind == "T":
                return tensors[name]
            value = values[name]
            return float(value["float"]) if isinstance(value, dict) else value

        trees = [{n: nesting[0][n] if t is None else t for n, t in part.items()} for part in nesting]
        states = [{name: build(tree, leaf) for name, tree in tree.items()} for tree in trees]
    except KeyError as error:
        raise UsageError(
            f"{path} names {error}, which does not exist: copy all files of the export, or remove {VALUES} to import "
            "only the tensors"
        ) from error
    except (OSError, ValueError, TypeError, AttributeError, IndexError, StateError) as error:
        raise UsageError(
            f"{path} was not written by an export, or was changed: copy it again, or remove it to import only the "
            f"tensors ({error})"
        ) from error
    more = sorted(tensors.keys() - used)
    if more or not states:
        raise UsageError(
            f"{path} does not name {', '.join(more[: safetensors_io.MOST_NAMED]) or 'any state'}: it belongs to "
            "other files; remove it to import only the tensors"
        )
    return states


def _load_torch(source: Path) -> dict[str, Any]:
    """The state in a file of torch.save."""
    try:
        state = torch.load(source, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise UsageError(
            f"{source} either contains objects that could run code when they are loaded, or is cut short: save only "
            f"tensors and plain values (a state_dict()) with torch.save ({_reason(error)})"
        ) from error
    except (RuntimeError, OSError, ValueError, EOFError, KeyError, AttributeError, TypeError) as error:
        raise UsageError(
            f"{source} cannot be read as a file of torch.save: it may be cut short or have another format. Copy it "
            f"again; files from before torch 1.6 must be saved again with a newer torch ({_reason(error)})"
        ) from error
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        what = (
            "a dict with keys that are not strings"
            if isinstance(state, dict)
            else f"a {type(state).__name__}"
        )
        raise UsageError(
            f"{source} contains {what}: save a dict of names to tensors and values, for example a state_dict()"
        )
    return state


def _reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _need_library() -> None:
    try:
        import safetensors  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "safetensors support is not installed: pip install 'holdfast-train[export]'; or use --format torch "
            f"({error})"
        ) from error
