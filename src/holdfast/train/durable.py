"""A plain checkpoint on disk: what survives the whole job until the tiers of `checkpoint` are built.

`holdfast.checkpoint.disk` describes the format; here the live tensors are written and read.
"""

from __future__ import annotations

import mmap
import os
import shutil
from pathlib import Path

import msgspec
import xxhash

from holdfast.checkpoint.disk import DATA, MANIFEST, check_chunk, find, read_manifest
from holdfast.checkpoint.layout import Saved
from holdfast.errors import HoldfastError, StateError
from holdfast.train.state import Image, Protected, load, targets

CHUNK_BYTES = 4 << 20
KEEP = 2


def save(image: Image, folder: Path) -> Path:
    """Writes the image below `folder`; returns the checkpoint's path. Keeps the newest two."""
    step = image.manifest.step
    final = folder / f"step-{step}"
    work = folder / f".step-{step}.{os.getpid()}"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    digests = []
    with (work / DATA).open("wb") as out:
        for low in range(0, image.manifest.nbytes, CHUNK_BYTES):
            row = xxhash.xxh3_64()
            for piece in image.pieces(low, min(low + CHUNK_BYTES, image.manifest.nbytes)):
                row.update(piece)
                out.write(piece)
            digests.append(row.hexdigest())
        out.flush()
        os.fsync(out.fileno())
    with (work / MANIFEST).open("wb") as out:
        out.write(msgspec.json.encode(Saved(image.manifest, CHUNK_BYTES, tuple(digests))))
        out.flush()
        os.fsync(out.fileno())
    shutil.rmtree(final, ignore_errors=True)
    work.rename(final)
    for old in sorted(find(folder), key=lambda d: d.step)[:-KEEP]:
        shutil.rmtree(old.path, ignore_errors=True)
    return final


def restore(objects: Protected, path: Path) -> int:
    """Loads a checkpoint into the objects; returns its step and verifies every byte.

    Raises:
        StateError: unreadable, cut short or of other objects.
        ChecksumError: its bytes were changed.
    """
    saved = read_manifest(path)
    total = saved.manifest.nbytes
    image = targets(objects, saved.manifest)
    try:
        data = (path / DATA).open("rb")
    except OSError as error:
        raise StateError(f"{path}/{DATA} cannot be read: {error}") from error
    with data:
        if os.fstat(data.fileno()).st_size != total:
            raise StateError(f"{path}/{DATA} is cut short: it should have {total} bytes")
        if total:
            with mmap.mmap(data.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as row:
                _copy(image, row, saved, path)
    load(objects, image)
    return saved.manifest.step


def _copy(image: Image, row: memoryview, saved: Saved, path: Path) -> None:
    size = saved.chunk_bytes
    for number, expected in enumerate(saved.chunks):
        low = number * size
        chunk = row[low : min(low + size, saved.manifest.nbytes)]
        try:
            check_chunk(chunk, number, expected, saved, path)
        except HoldfastError:
            chunk.release()
            raise
        at = 0
        for piece in image.pieces(low, low + len(chunk)):
            piece[:] = chunk[at : at + len(piece)]
            at += len(piece)
        chunk.release()
