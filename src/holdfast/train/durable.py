"""A plain checkpoint on disk: what survives the whole job until the tiers of `checkpoint` are built.

A folder `step-N` with `state.bin` (the image's bytes) and `manifest.json`, written last; the folder appears
under its name by one rename, so it is whole or not there.
"""

from __future__ import annotations

import mmap
import os
import shutil
from pathlib import Path

import msgspec
import xxhash

from holdfast.errors import ChecksumError, StateError
from holdfast.protocol.job import Durable
from holdfast.train.state import Image, Manifest, Protected, load, targets

CHUNK_BYTES = 4 << 20
KEEP = 2


class _Saved(msgspec.Struct, frozen=True):
    manifest: Manifest
    chunk_bytes: int
    chunks: tuple[str, ...]


def save(image: Image, folder: Path) -> Path:
    """Writes the image below `folder`; returns the checkpoint's path. Keeps the newest two."""
    step = image.manifest.step
    final = folder / f"step-{step}"
    work = folder / f".step-{step}.{os.getpid()}"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    digests = []
    with (work / "state.bin").open("wb") as out:
        for low in range(0, image.manifest.nbytes, CHUNK_BYTES):
            row = xxhash.xxh3_64()
            for piece in image.pieces(low, min(low + CHUNK_BYTES, image.manifest.nbytes)):
                row.update(piece)
                out.write(piece)
            digests.append(row.hexdigest())
        out.flush()
        os.fsync(out.fileno())
    with (work / "manifest.json").open("wb") as out:
        out.write(msgspec.json.encode(_Saved(image.manifest, CHUNK_BYTES, tuple(digests))))
        out.flush()
        os.fsync(out.fileno())
    shutil.rmtree(final, ignore_errors=True)
    work.rename(final)
    for old in sorted(find(folder), key=lambda d: d.step)[:-KEEP]:
        shutil.rmtree(old.path, ignore_errors=True)
    return final


def find(folder: Path) -> list[Durable]:
    """The checkpoints below a folder that have a manifest, oldest first."""
    found = []
    for path in folder.glob("step-*"):
        number = path.name.removeprefix("step-")
        if number.isdigit() and (path / "manifest.json").is_file():
            found.append(Durable(int(number), str(path)))
    return sorted(found, key=lambda d: d.step)


def restore(objects: Protected, path: Path) -> int:
    """Loads a checkpoint into the objects; returns its step and verifies every byte.

    Raises:
        StateError: unreadable, cut short or of other objects.
        ChecksumError: its bytes were changed.
    """
    try:
        saved = msgspec.json.decode((path / "manifest.json").read_bytes(), type=_Saved)
        data = (path / "state.bin").open("rb")
    except (OSError, msgspec.MsgspecError) as error:
        raise StateError(f"{path} is no checkpoint: {error}") from error
    total = saved.manifest.nbytes
    image = targets(objects, saved.manifest)
    with data:
        if os.fstat(data.fileno()).st_size != total:
            raise StateError(f"{path}/state.bin is cut short: it should have {total} bytes")
        if total:
            with mmap.mmap(data.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as row:
                _copy(image, row, saved, path)
    load(objects, image)
    return saved.manifest.step


def _copy(image: Image, row: memoryview, saved: _Saved, path: Path) -> None:
    size = saved.chunk_bytes
    for number, expected in enumerate(saved.chunks):
        low = number * size
        chunk = row[low : min(low + size, saved.manifest.nbytes)]
        if xxhash.xxh3_64_hexdigest(chunk) != expected:
            chunk.release()
            raise ChecksumError(f"{path}/state.bin: bytes {low} to {low + size} were changed")
        at = 0
        for piece in image.pieces(low, low + len(chunk)):
            piece[:] = chunk[at : at + len(piece)]
            at += len(piece)
        chunk.release()
