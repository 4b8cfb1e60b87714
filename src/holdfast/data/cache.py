"""The node's cache of remote data files: fetched once per node, shared by its workers, kept across restarts.

    DIR/content/DIGEST             a file, by the XXH3-128 of its content
    DIR/names/FOLDER/NAME          a hard link to it, under its own name; FOLDER is a hash of the URL's folder
    DIR/entries/KEY                what was fetched from where: URL, version, digest; JSON, written last
    DIR/parts/KEY                  what has arrived of a file that is being fetched
    DIR/locks/KEY                  held by the process that fetches; the others wait for it

KEY is a hash of the URL. Locks are the kernel's (flock), so they end with their process. A process that uses a file
holds a shared
lock on it until it ends, and a file in use is never evicted.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import msgspec
import xxhash

from holdfast.data.version import RemoteFileChanged, Version
from holdfast.errors import Damaged, DataError, UsageError
from holdfast.observe.transfer_progress import ByteCount
from holdfast.protocol.job import CACHE_VARIABLE
from holdfast.protocol.machine.ownership import refuse_open_to_others
from holdfast.protocol.units import parse_size
from holdfast.protocol.wire.stored import decode_file

if TYPE_CHECKING:
    from holdfast.data.fetching import Remote

_log = logging.getLogger(__name__)
SHARE_OF_DISK = 0.9
ATTEMPTS = 3
READ_BYTES = 8 << 20

_held: dict[Path, int] = {}
"""Files that this process uses, and the descriptors that hold their locks, until the process ends."""


class CachedFile(msgspec.Struct, frozen=True, kw_only=True):
    """One fetched file."""

    url: str
    version: Version
    digest: str
    """XXH3-128 of the content, which is also its name."""
    folder: str
    """A hash of the URL's folder, under which `name` is linked."""
    name: str
    changed_ns: int
    """The content's modification time; if it changed, somebody wrote to the file."""


_entries = msgspec.json.Decoder(CachedFile)


@dataclass(frozen=True)
class VerifiedFile:
    """The result of `Cache.verify` for one file."""

    url: str
    nbytes: int
    trouble: str | None
    """A message for people about the damage; None: the file is intact."""


def local(path: str | os.PathLike[str]) -> Path:
    """The file on this machine: a path as it is, a remote file's copy in the node's cache.

    A remote file (`s3://`, `gs://`, `az://`, `https://`, ...) is fetched unless the cache (`holdfast run
    --data-cache DIR`, or HOLDFAST_DATA_CACHE) has its current version. If the server does not answer, the copy is used.

    Raises:
        FileNotFoundError: there is no such remote file.
        UsageError: no cache is configured, or the URL does not name a file.
        DataError: it cannot be fetched, or does not fit into the cache.
    """
    text = os.fspath(path)
    if "://" not in text:
        return Path(text)
    if text.startswith("file://"):
        return Path(unquote(urlsplit(text).path))
    # There is no default folder. Corpora are larger than a home folder, and a cache in the wrong place would
    # fill a file system that others need.
    asked = os.environ.get(CACHE_VARIABLE)
    if not asked:
        raise UsageError(
            f"{text} is a remote file: specify a folder in which to cache it with `holdfast run --data-cache DIR` or "
            f"{CACHE_VARIABLE}=DIR"
        )
    try:
        from holdfast.data.fetching import Remote
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{text} is a remote file, which needs another package: pip install 'holdfast-train[object]' ({error})"
        ) from error
    return Cache(*parse_cache(asked)).get(Remote(text))


def local_tokens(path: str | os.PathLike[str]) -> Path:
    """As `local`, for a token file: both files of a pair are fetched side by side, and a name without its ending is completed.

    Raises:
        See `local`.
    """
    text = os.fspath(path)
    name = text.rpartition("/")[2]
    if "://" not in text or ("." in name and not name.endswith((".bin", ".idx"))):
        return local(text)
    prefix = text[:-4] if name.endswith((".bin", ".idx")) else text
    try:
        local(f"{prefix}.idx")
    except FileNotFoundError:
        if text == prefix:
            return local(f"{prefix}.npy")
    return local(f"{prefix}.bin")


def absolute_cache(text: str) -> str:
    """The option with an absolute folder, which means the same in every process; creates the folder. Raises UsageError
    if it cannot be a cache."""
    folder, size_bytes = parse_cache(text)
    Cache(folder, size_bytes)
    return ",".join([str(folder.absolute()), *text.split(",")[1:]])


def parse_cache(text: str) -> tuple[Path, int | None]:
    """`DIR[,size=50G]`: the folder, and the limit on its size. Raises UsageError."""
    folder, *rest = text.split(",")
    size: int | None = None
    for part in rest:
        key, _, value = part.partition("=")
        if key != "size":
            raise UsageError(f"--data-cache {text!r}: unknown {key!r}; write DIR[,size=50G]")
        size = parse_size("--data-cache: size", value)
    if not folder:
        raise UsageError(
            f"--data-cache must begin with a folder (got {text!r}), for example /scratch/cache,size=50G"
        )
    return Path(folder), size


class Cache:
    """The cache in a folder. Any number of processes may use it at once."""

    def __init__(self, folder: Path, size_bytes: int | None = None) -> None:
        """size_bytes: the limit on its size; by default 90% of the space that the disk has for it.

        Raises:
            UsageError: the folder cannot be written, or everybody can write to it.
        """
        self.folder = folder.absolute()
        self._size_bytes = size_bytes
        self._content, self._names = self.folder / "content", self.folder / "names"
        self._entries, self._parts = self.folder / "entries", self.folder / "parts"
        self._locks = self.folder / "locks"
        try:
            for each in (self._content, self._names, self._entries, self._parts, self._locks):
                each.mkdir(parents=True, exist_ok=True)
            for each in (self.folder, self._content, self._names, self._entries, self._parts):
                # A team may share a cache. Files that strangers put into it would be trained on.
                refuse_open_to_others(each, "--data-cache", group=True, owner=False)
        except OSError as error:
            raise UsageError(
                f"--data-cache {folder}: {error.strerror}; specify a folder that can be written"
            ) from error

    def get(self, remote: Remote) -> Path:
        """The local copy of the remote file as it is now; it is kept until this process ends.

        Raises:
            FileNotFoundError, DataError: see `local`.
        """
        key = xxhash.xxh3_64_hexdigest(remote.url.encode())
        with self._locked(key, f"waiting for another process that fetches {remote.url}"):
            # All under the lock of this URL: from the look at the entry until this process holds the file,
            # nobody may evict or replace it.
            entry = self._sound(self._entry(key), key)
            # The server is asked each time. A changed corpus under the same name would otherwise train on
            # different data on different nodes.
            version = self._asked(remote, entry)
            if entry is None or (version is not None and version != entry.version):
                assert version is not None
                entry = self._fetched(remote, version, key)
            # The time of last use is the entry's modification time: eviction needs it, and a separate record
            # would have to be kept consistent with it.
            os.utime(self._entries / key)
            return self._held(entry)

    def verify(self) -> Iterator[VerifiedFile]:
        """Reads every file. One that has changed since it was fetched is removed, and fetched again when it is needed."""
        for path in sorted(self._entries.iterdir()):
            with self._locked(path.name):
                entry = self._entry(path.name)
                if entry is None:
                    continue
                content = self._content / entry.digest
                trouble = None
                if not content.exists():
                    trouble = "the cached file is missing"
                elif _digest(content) != entry.digest:
                    trouble = "the cached file differs from what was fetched"
                if trouble is not None:
                    self._remove(path.name, entry)
                yield VerifiedFile(entry.url, entry.version.size, trouble)

    # ------------------------------------------------------------ one file

    def _entry(self, key: str) -> CachedFile | None:
        try:
            return decode_file(_entries.decode, self._entries / key)
        except (FileNotFoundError, Damaged):
            return None

    def _sound(self, entry: CachedFile | None, key: str) -> CachedFile | None:
        """The entry, if its file still has the content that was fetched. Reads the file only if it was modified."""
        if entry is None:
            return None
        content = self._content / entry.digest
        try:
            status = content.stat()
            # The name must be a link to this very content. A process that was killed may have replaced only
            # one of the two.
            linked = self._link_of(entry).stat().st_ino == status.st_ino
        except FileNotFoundError:
            return None
        # Size and time tell whether somebody wrote to the file. Only then is it read again: hashing a
        # terabyte at every start would cost more than the cache saves.
        if linked and (status.st_size, status.st_mtime_ns) == (entry.version.size, entry.changed_ns):
            return entry
        if linked and _digest(content) == entry.digest:
            entry = msgspec.structs.replace(entry, changed_ns=status.st_mtime_ns)
            self._write_entry(entry, key)
            return entry
        _log.warning("%s differs from what was fetched from %s; fetching it again", content, entry.url)
        # The damaged copy goes before the fetch, so that it takes no room in the cache, and nobody uses it if
        # the fetch fails.
        self._remove(key, entry)
        return None

    def _asked(self, remote: Remote, entry: CachedFile | None) -> Version | None:
        """The server's current version; None if the server does not answer and there is a copy."""
        try:
            return remote.version()
        except (DataError, FileNotFoundError) as error:
            if entry is None:
                raise
            _log.warning("using the cached copy of %s: %s", remote.url, error)
            return None

    def _fetched(self, remote: Remote, version: Version, key: str) -> CachedFile:
        for _ in range(ATTEMPTS):
            # The name of a part says which version it is of, so that no two are ever mixed, and what room it will take.
            stamp = xxhash.xxh3_64_hexdigest(msgspec.json.encode(version))
            part = self._parts / f"{key}-{stamp}-{version.size}"
            for old in self._parts.glob(f"{key}-*"):
                # Parts of other versions are removed. Continuing one with bytes of a newer version would give
                # a file that never existed, with a digest computed over the mixture.
                if old != part:
                    old.unlink()
            self._make_room(remote.url, version.size, part)
            try:
                digest = remote.fetch(version, part)
            # The file changed on the server during the fetch. Every request carries the version, so no byte
            # of another one is in the part; the fetch begins again with the new version.
            except RemoteFileChanged:
                part.unlink(missing_ok=True)
                version = remote.version()
                continue
            return self._kept(remote, version, key, part, digest)
        raise DataError(
            f"{remote.url} keeps changing while it is fetched; wait until its writer has finished"
        )

    def _kept(self, remote: Remote, version: Version, key: str, part: Path, digest: str) -> CachedFile:
        folder = xxhash.xxh3_64_hexdigest(remote.folder.encode())
        old = self._entry(key)
        # Content is shared between URLs. The lock of the cache keeps an eviction that looks for unreferenced
        # content from running between the file's arrival and the entry that refers to it.
        with self._locked(""):
            content = self._content / digest
            # Read before it is trusted: the name stands for the content, but an earlier copy may have been
            # damaged since.
            if content.exists() and _digest(content) == digest:  # another URL has the same
                part.unlink()
            else:
                part.chmod(0o444)
                part.replace(content)
            changed_ns = content.stat().st_mtime_ns
            entry = CachedFile(
                url=remote.url,
                version=version,
                digest=digest,
                folder=folder,
                name=remote.name,
                changed_ns=changed_ns,
            )
            link = self._link_of(entry)
            link.parent.mkdir(exist_ok=True)
            beside = link.with_name(f"{link.name}.{os.getpid()}.new")
            beside.unlink(missing_ok=True)
            beside.hardlink_to(content)
            # Renamed over the old link, because readers may open the name at any time and must find the old
            # file or the new one.
            beside.replace(link)
            # The entry is written last. A process that dies before leaves content without an entry, which is
            # found and used by the next fetch of the same bytes, and no entry without content.
            self._write_entry(entry, key)
            if old is not None and old.digest != digest:
                self._drop_content(old.digest)
        return entry

    def _write_entry(self, entry: CachedFile, key: str) -> None:
        beside = self._entries / f"{key}.{os.getpid()}.new"
        beside.write_bytes(msgspec.json.encode(entry))
        beside.replace(self._entries / key)

    def _link_of(self, entry: CachedFile) -> Path:
        return self._names / entry.folder / entry.name

    def _held(self, entry: CachedFile) -> Path:
        """Takes the shared lock that keeps the file from being evicted. The caller holds the key's lock, so the file
        exists."""
        link = self._link_of(entry)
        fd = os.open(link, os.O_RDONLY | os.O_CLOEXEC)
        # Held until the process ends, because the file is mapped for as long. An unlinked file would stay
        # readable, but its space would be missing from the bound of the cache.
        fcntl.flock(fd, fcntl.LOCK_SH)
        # The new lock is taken before the old one is closed, so there is no moment at which the file counts
        # as unused.
        before = _held.get(link)
        _held[link] = fd
        if before is not None:
            os.close(before)
        return link

    # ------------------------------------------------------------ room

    def _make_room(self, url: str, nbytes: int, part: Path) -> None:
        """Evicts the least recently used files until `nbytes` fit. Raises DataError if they do not fit."""
        with self._locked(""):
            there = sum(p.stat().st_size for p in self._content.iterdir())
            # A file that another process is fetching counts with its final size, which is part of its name.
            # Otherwise two processes that each see enough space would fill the disk together.
            fetching = {p: int(p.name.rsplit("-", 1)[1]) for p in self._parts.iterdir() if p != part}
            bound = self._size_bytes or int(SHARE_OF_DISK * (shutil.disk_usage(self.folder).free + there))
            excess = there + sum(fetching.values()) + nbytes - bound
            for other, size in fetching.items():
                excess -= size if excess > 0 and self._abandoned(other) else 0
            # A lock is tried without waiting. This process holds the lock of the cache and of its own URL;
            # waiting for another URL's lock could deadlock with a process that waits for the cache's.
            for key in self._oldest_first():
                excess -= self._evicted(key) if excess > 0 else 0
            if excess > 0:
                raise DataError(
                    f"{url} has {nbytes} bytes, which is {excess} more than fits into the data cache {self.folder} "
                    f"(its limit is {bound}, and files in use are kept): increase the limit with --data-cache "
                    f"{self.folder},size=..."
                )
            # Reserves the space: from now on the other processes count it.
            part.touch()

    def _abandoned(self, part: Path) -> bool:
        """Removes a part of a file that no process fetches any more."""
        try:
            with self._locked(part.name.split("-", 1)[0], wait=False):
                part.unlink(missing_ok=True)
                return True
        except BlockingIOError:
            return False

    def _oldest_first(self) -> list[str]:
        used = {p.name: p.stat().st_mtime_ns for p in self._entries.iterdir() if not p.name.endswith(".new")}
        return sorted(used, key=lambda key: used[key])

    def _evicted(self, key: str) -> int:
        """Evicts a file; returns the bytes that this freed: 0 if the file is in use, or another process is checking it."""
        try:
            with self._locked(key, wait=False):
                entry = self._entry(key)
                if entry is None or self._in_use(entry):
                    return 0
                return self._removed(key, entry)
        except BlockingIOError:
            return 0

    def _in_use(self, entry: CachedFile) -> bool:
        try:
            fd = os.open(self._content / entry.digest, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    def _remove(self, key: str, entry: CachedFile) -> None:
        with self._locked(""):
            self._removed(key, entry)

    def _removed(self, key: str, entry: CachedFile) -> int:
        (self._entries / key).unlink(missing_ok=True)
        link = self._link_of(entry)
        link.unlink(missing_ok=True)
        return self._drop_content(entry.digest)

    def _drop_content(self, digest: str) -> int:
        """Removes content that no entry refers to any more. A process that has it open keeps it."""
        # Two URLs may have the same content. It is removed with the last entry that refers to it.
        others = (self._entry(p.name) for p in self._entries.iterdir())
        # Called with the cache's lock held, so no entry can begin to refer to this content between the check
        # and the removal.
        if any(entry is not None and entry.digest == digest for entry in others):
            return 0
        content = self._content / digest
        nbytes = content.stat().st_size if content.exists() else 0
        content.unlink(missing_ok=True)
        return nbytes

    @contextmanager
    def _locked(self, key: str, waiting: str = "", wait: bool = True) -> Iterator[None]:
        """Holds the lock of one URL or, with an empty key, of the cache. Raises BlockingIOError if it may not wait."""
        fd = os.open(self._locks / (key or "cache"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                # Tried without waiting first, only to tell the user when there is something to wait for. The
                # lock files are never removed: a process could hold the lock of a file that has no name any
                # more, beside another one with a new file.
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not wait:
                    raise
                if waiting:
                    _log.warning("%s", waiting)
                fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file, ByteCount(sys.stderr, f"reading {path}") as count:
        while block := file.read(READ_BYTES):
            digest.update(block)
            count.add(len(block))
    return digest.hexdigest()
