"""Checkpoints in a folder: which there are, and which are whole.

`FOLDER/step-N/` holds `state.bin` (the row of bytes) and `manifest.json`, written last; the folder appears under
its name by one rename. A checkpoint is whole if its manifest can be read and every chunk of its bytes has the
checksum that the manifest names.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import xxhash

from holdfast.checkpoint.layout import Saved
from holdfast.errors import ChecksumError, StateError
from holdfast.protocol.job import Durable

MANIFEST = "manifest.json"
DATA = "state.bin"


def find(folder: Path) -> list[Durable]:
    """The checkpoints below a folder that have a manifest, oldest first. Whether they are whole is not looked at."""
    found = []
    for path in folder.glob("step-*"):
        number = path.name.removeprefix("step-")
        if number.isdigit() and (path / MANIFEST).is_file():
            found.append(Durable(int(number), str(path)))
    return sorted(found, key=lambda d: d.step)


def read_manifest(path: Path) -> Saved:
    """The manifest of the checkpoint in folder `path`.

    Raises:
        StateError: there is none, it cannot be read, or it says what cannot be.
    """
    try:
        saved = msgspec.json.decode((path / MANIFEST).read_bytes(), type=Saved)
    except (OSError, msgspec.MsgspecError) as error:
        raise StateError(f"{path} is no checkpoint: {error}") from error
    size, total = saved.chunk_bytes, saved.manifest.nbytes
    if size <= 0 or len(saved.chunks) != -(-total // size):
        raise StateError(f"{path}/{MANIFEST} names {len(saved.chunks)} checksums for {total} bytes")
    return saved


def verify(path: Path, seen: Callable[[int], None] = lambda nbytes: None) -> Saved:
    """Reads every byte; returns the manifest of a whole checkpoint. `seen` is told of every chunk's bytes.

    Raises:
        StateError: no checkpoint, cut short, or unreadable.
        ChecksumError: bytes were changed; the message says which.
    """
    saved = read_manifest(path)
    total = saved.manifest.nbytes
    try:
        with (path / DATA).open("rb") as data:
            for number, expected in enumerate(saved.chunks):
                chunk = data.read(min(saved.chunk_bytes, total - number * saved.chunk_bytes))
                check_chunk(chunk, number, expected, saved, path)
                seen(len(chunk))
            if data.read(1):
                raise StateError(f"{path}/{DATA} is longer than the {total} bytes of its manifest")
    except OSError as error:
        raise StateError(f"{path}/{DATA} cannot be read: {error}") from error
    return saved


def check_chunk(chunk: bytes | memoryview, number: int, expected: str, saved: Saved, path: Path) -> None:
    """Raises StateError or ChecksumError unless this is chunk `number` as it was saved."""
    low = number * saved.chunk_bytes
    high = min(low + saved.chunk_bytes, saved.manifest.nbytes)
    if len(chunk) < high - low:
        raise StateError(
            f"{path}/{DATA} is cut short: it ends at byte {low + len(chunk)} of {saved.manifest.nbytes}"
        )
    if xxhash.xxh3_64_hexdigest(chunk) != expected:
        names = [t.path for t in saved.manifest.tensors if t.offset < high and t.offset + t.nbytes > low]
        held = f" ({names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''})" if names else ""
        raise ChecksumError(f"{path}/{DATA}: bytes {low} to {high}{held} were changed")


def newest_whole(folder: Path, passed_over: Callable[[str], None] = lambda why: None) -> Durable | None:
    """The newest checkpoint whose every byte is as it was saved; `passed_over` is told why newer ones are not it."""
    for durable in reversed(find(folder)):
        try:
            verify(Path(durable.path))
        except (StateError, ChecksumError) as error:
            passed_over(str(error))
        else:
            return durable
    return None
