"""What a durable tier can do: keep named bytes. A folder (`DiskTier`), of this machine or of a shared file system, and an object store
(`objects`) are the two kinds.

Names are relative, with `/` between folder and file. Every method may be called from several threads at once and
blocks; it raises TierError when the tier cannot do it, with what to do about it.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from holdfast.checkpoint.policy import parse_cadence
from holdfast.errors import StateError, TierError, UsageError
from holdfast.protocol.snapshots import DurableTier

TIER_EXAMPLE = "s3://bucket/run,every=10m,keep=3,keep-every=10000"


class Tier(Protocol):
    """Storage that keeps bytes for longer than the job lives."""

    url: str
    """Names it to a person, and opens it again."""

    def check(self) -> None:
        """Raises TierError unless it can be read and written now. Leaves nothing behind."""

    def folders(self) -> list[str]:
        """The names of the folders at the top."""

    def size(self, name: str) -> int | None:
        """Bytes of a file; None when it is not there."""

    def read(self, name: str) -> bytes:
        """A small file, whole."""

    def read_into(self, name: str, offset: int, view: memoryview) -> None:
        """Fills `view` from byte `offset` on; raises StateError when the file ends before."""

    def write(
        self,
        name: str,
        buffers: Iterable[memoryview],
        nbytes: int,
        seen: Callable[[int], None] = lambda n: None,
    ) -> None:
        """A file of any size. It appears under its name when all of it is there and durable, or not at all.

        seen: told of bytes as they are written.
        """

    def publish(self, name: str, data: bytes) -> None:
        """A small file, in one indivisible step; one of the same name is replaced."""

    def remove(self, name: str) -> None:
        """Removes a file; one that is not there is removed already."""

    def files(self, folder: str) -> dict[str, int]:
        """The files in a folder, and the bytes of each; none when it is not there."""

    def remove_folder(self, name: str, last: str = "") -> None:
        """Removes a folder and all files in it; the file `last` when the others are gone."""


def open_tier(url: str | Path) -> Tier:
    """The tier behind a path, `file://` URL, or object store URL (`s3://`, `gs://`, `az://`, `memory://`).

    Raises:
        UsageError: no such kind of tier, or its library is not installed.
    """
    # Imported on use: the command line asks for tiers, and the object store's library takes a noticeable part
    # of its start.
    # house: nothing left

    text = str(url)
    parts = urlsplit(text)
    if "://" not in text:
        return DiskTier(Path(text))
    if parts.scheme == "file":
        return DiskTier(Path(parts.path))
    try:
        from holdfast.checkpoint.objects import SCHEMES, ObjectTier
    except ImportError as error:
        raise UsageError(
            f"{text}: support for object stores is not installed: pip install 'holdfast-train[object]' ({error})"
        ) from error
    if parts.scheme not in SCHEMES:
        raise UsageError(
            f"{text}: {parts.scheme} is not a known kind of tier; use a folder, or a URL with one of "
            f"{', '.join(SCHEMES)}"
        )
    return ObjectTier(text)


def parse_tier(text: str, every: str = "auto") -> DurableTier:
    """`URL[,every=CADENCE][,keep=N][,keep-every=STEPS]`; `every` is what holds when it is not given.

    Raises:
        UsageError: no folder or URL, an option that is none of it, or a value that cannot be.
    """
    url, *options = text.split(",")
    if not url:
        raise UsageError(f"{text!r}: not a folder or URL, for example {TIER_EXAMPLE}")
    fields: dict[str, str] = {}
    for option in options:
        name, equals, value = option.partition("=")
        if name not in ("every", "keep", "keep-every") or not equals or name in fields:
            raise UsageError(f"{text!r}: {option!r} is not a known option; write for example {TIER_EXAMPLE}")
        fields[name] = value
    for name in ("keep", "keep-every"):
        if not re.fullmatch(r"\d+", fields.get(name, "1")):
            raise UsageError(f"{text!r}: {name} must be a whole number, for example {TIER_EXAMPLE}")
    # Refused, not raised to 1: who writes 0 may mean all or none, and with one of the two meanings
    # checkpoints would be deleted.
    if int(fields.get("keep", "2")) < 1:
        raise UsageError(f"{text!r}: keep must be at least 1, because the newest checkpoint is always kept")
    every = fields.get("every", every)
    try:
        parse_cadence(every)
    except UsageError as error:
        raise UsageError(f"{text!r}: every: {error}") from error
    # Absolute before it leaves this process: agents have another working folder, and each would write to its
    # own.
    absolute = url if "://" in url else str(Path(url).absolute())
    return DurableTier(absolute, every, int(fields.get("keep", "2")), int(fields.get("keep-every", "0")))


WRITE_BYTES = 8 << 20
ADVICE = {
    errno.ENOSPC: "the disk is full: free some space, keep fewer checkpoints, or choose another folder",
    errno.EDQUOT: "the quota is used up: free some space, keep fewer checkpoints, or choose another folder",
    errno.EACCES: "no permission: choose a folder that belongs to you, or change its owner",
    errno.EPERM: "no permission: choose a folder that belongs to you, or change its owner",
    errno.EROFS: "the file system is read-only: choose another folder",
    errno.EEXIST: "there is a file where a folder should be: choose another folder",
    errno.ENOTDIR: "there is a file where a folder should be: choose another folder",
}


class DiskTier:
    """Files below a folder, written beside their names and renamed when they are durable."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.url = str(self.folder)

    def check(self) -> None:
        """Writes and removes a small file."""
        # A complete publish, not `os.access`: quotas, full disks, read-only mounts and root squash on NFS
        # show only when bytes are written and synced.
        self.publish(f".check-{uuid.uuid4().hex}", b"holdfast")

    def folders(self) -> list[str]:
        """The names of the folders at the top."""
        with self._explained("listed"):
            if not self.folder.exists():
                return []
            return sorted(e.name for e in os.scandir(self.folder) if e.is_dir())

    def size(self, name: str) -> int | None:
        """Bytes of a file; None when it is not there."""
        try:
            with self._explained(f"asked for the size of {name}"):
                return (self.folder / name).stat().st_size
        except StateError:
            return None

    def read(self, name: str) -> bytes:
        """A small file, whole."""
        with self._explained(f"read ({name})"):
            return (self.folder / name).read_bytes()

    def read_into(self, name: str, offset: int, view: memoryview) -> None:
        """Fills `view` from byte `offset` on."""
        with self._explained(f"read ({name})"), (self.folder / name).open("rb", buffering=0) as file:
            at = 0
            while at < len(view):
                # A single read returns at most 2 GiB and may return less, so the loop goes on until `view` is
                # full. preadv releases the GIL and leaves the file's offset alone.
                got = os.preadv(file.fileno(), [view[at : at + WRITE_BYTES]], offset + at)
                if not got:
                    raise StateError(f"{self.folder / name} is cut short: it ends at byte {offset + at}")
                at += got

    def write(
        self,
        name: str,
        buffers: Iterable[memoryview],
        nbytes: int,
        seen: Callable[[int], None] = lambda n: None,
    ) -> None:
        """Written to a file beside it, made durable, renamed."""
        with self._explained(f"written ({name})"), self._replacing(name) as fd:
            done = 0
            for buffer in buffers:
                at = 0
                while at < len(buffer):
                    wrote = os.write(fd, buffer[at : at + WRITE_BYTES])
                    at, done = at + wrote, done + wrote
                    seen(wrote)
            # Raised inside `_replacing`, before the rename: a source that ended early leaves no file under
            # the final name.
            if done != nbytes:
                raise StateError(f"{name}: received {done} bytes instead of {nbytes}")

    def publish(self, name: str, data: bytes) -> None:
        """Written beside it, made durable, renamed."""
        self.write(name, [memoryview(data)], len(data))
        if name.startswith(".check-"):
            self.remove(name)

    def remove(self, name: str) -> None:
        """Removes a file; one that is not there is removed already."""
        with self._explained(f"cleared ({name})"):
            (self.folder / name).unlink(missing_ok=True)

    def files(self, folder: str) -> dict[str, int]:
        """The files in a folder, and the bytes of each; none when it is not there."""
        sizes: dict[str, int] = {}
        with self._explained(f"listed ({folder})"), suppress(FileNotFoundError):
            for entry in os.scandir(self.folder / folder):
                # Files of other writers appear and go during the listing. Failing here would let one job's
                # prune fail another job's commit.
                with suppress(FileNotFoundError):
                    sizes[f"{folder}/{entry.name}"] = entry.stat().st_size
        return sizes

    def remove_folder(self, name: str, last: str = "") -> None:
        """Removes a folder and all files in it; the file `last` when the others are gone."""
        with self._explained(f"cleared ({name})"):
            # `rmtree` deletes in the order of the directory, so it cannot promise to take `last` at the end.
            # The others go first, one by one.
            for path in self.files(name) if last else ():
                if path != last:
                    (self.folder / path).unlink(missing_ok=True)
            if (self.folder / name).exists():
                shutil.rmtree(self.folder / name)

    @contextmanager
    def _replacing(self, name: str) -> Iterator[int]:
        path = self.folder / name
        _make_folder(path.parent)
        # In the same folder, because a rename is atomic only within a file system. The number and the random
        # part keep two writers of the same name apart; O_EXCL makes a collision an error rather than a
        # mixture of two files.
        work = path.with_name(f".{path.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}")
        fd = os.open(work, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            try:
                yield fd
                # Before the rename. Otherwise a power failure could leave the final name with an empty or
                # partial file: file systems may persist the rename earlier than the data.
                os.fsync(fd)
            finally:
                os.close(fd)
            # Readers see the old file or the complete new one, never a part. The folder is synced afterwards
            # because the rename itself is not durable before that, and the manifest, which is written next,
            # relies on it.
            work.rename(path)
            sync_folder(path.parent)
        except BaseException:
            # Not for a process that is killed: its work file stays, begins with a dot, and goes with its
            # folder.
            work.unlink(missing_ok=True)
            raise

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise StateError(f"{error.filename or self.folder} does not exist") from error
        except OSError as error:
            advice = ADVICE.get(error.errno or 0, error.strerror or str(error))
            raise TierError(f"the disk tier {self.folder} could not be {what}: {advice}") from error


def _make_folder(path: Path) -> None:
    """A new folder is durable when the one around it is."""
    if not path.is_dir():
        # Each new level must be recorded durably in its parent. Otherwise a power failure could lose the
        # folder and with it files that were synced correctly.
        _make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """A rename is durable when its folder is."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
