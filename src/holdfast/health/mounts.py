"""File systems: those that the kernel made read-only, their free space, and file servers that do not answer."""

from __future__ import annotations

import os
import re
import select
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from holdfast.health.bounded_call import BoundedCaller, NoAnswerError
from holdfast.health.files import text, unknown
from holdfast.health.samples import Reading
from holdfast.health.sources import MachineRoot

MOUNTS_S = 60.0
CHANGES_APART_S = 5.0
ANSWER_S = 5.0
"""Limit for statfs: a file server that takes longer is not to be relied on; a local disk takes microseconds."""
# Images that nobody can write to: their `ro` says nothing about a disk.
_ALWAYS_READ_ONLY = {"squashfs", "iso9660", "udf", "erofs", "cramfs", "romfs"}
# Kinds of file systems whose answer depends on another machine. Each gets a thread of its own, because one
# server that does not answer must not keep the others from being looked at.
_NETWORK = {
    "9p",
    "afs",
    "beegfs",
    "ceph",
    "cifs",
    "fuse.juicefs",
    "fuse.s3fs",
    "fuse.sshfs",
    "fuse.wekafs",
    "glusterfs",
    "fuse.glusterfs",
    "gpfs",
    "lustre",
    "nfs",
    "nfs4",
    "smb3",
    "virtiofs",
    "wekafs",
}
_ESCAPE = re.compile(r"\\([0-7]{3})")


class Mount(msgspec.Struct, frozen=True, kw_only=True):
    """One line of mountinfo."""

    device: str
    """Major and minor number of the file system."""
    path: str
    """Where it is mounted."""
    kind: str
    """Type of the file system."""
    source: str
    """Device or server."""
    options: tuple[str, ...]
    """Options of this mount."""
    super_options: tuple[str, ...]
    """Options of the file system itself."""

    @property
    def network(self) -> bool:
        return self.kind in _NETWORK

    @property
    def watched(self) -> bool:
        """Whether it is on a disk or a file server, and of a type that can be written to."""
        disk = self.source.startswith("/dev/") and self.kind not in _ALWAYS_READ_ONLY
        return disk or self.network

    @property
    def made_read_only(self) -> bool:
        """Whether the kernel made it read-only, after an error. A person who mounts it read-only sets that option on
        the mount as well. Newer kernels leave out `ro` and give the reason instead (ext4, from 6.15 on)."""
        # Older kernels set `ro` on the file system and leave the mount's own options alone; that difference
        # is the only sign that the kernel did it and not the administrator.
        if {"emergency_ro", "shutdown"} & set(self.super_options):
            return True
        return "ro" in self.super_options and "ro" not in self.options

    @property
    def writable(self) -> bool:
        return "ro" not in self.options and not self.made_read_only


def parse_mounts(mountinfo: str, folders: tuple[Path, ...] = ()) -> list[Mount]:
    """The mounts to be watched: those on disks and file servers, one for each file system (the one with the shortest
    path), and the mounts of `folders`, whatever their type. Raises ValueError."""
    found: dict[str, Mount] = {}
    holding: dict[Path, Mount] = {}
    for line in mountinfo.splitlines():
        # The number of optional fields before ` - ` varies (proc_pid_mountinfo(5)), so the two halves are
        # split apart.
        before, _, after = line.partition(" - ")
        head, tail = before.split(" "), after.split(" ")
        if len(head) < 6 or len(tail) < 3:
            raise ValueError(f"not a line of mountinfo: {line[:200]}")
        mount = Mount(
            device=head[2],
            path=_plain(head[4]),
            kind=tail[0],
            source=_plain(tail[1]),
            options=tuple(head[5].split(",")),
            super_options=tuple(tail[2].split(",")),
        )
        known = found.get(mount.device)
        for folder in folders:
            if folder.is_relative_to(mount.path):
                best = holding.get(folder)
                if best is None or len(mount.path) >= len(best.path):  # a later mount hides an earlier one
                    holding[folder] = mount
        # A read-only bind mount of a file system that is writable elsewhere says nothing about the file
        # system. One mount represents each file system, by its device number: containers bind the same disk
        # to dozens of paths, and its fault is one fault.
        if mount.watched and (known is None or _rank(mount) < _rank(known)):
            found[mount.device] = mount
    for mount in holding.values():
        # The file systems of the job's own folders are watched whatever their type, including tmpfs and
        # overlays: when they are full, the job cannot save.
        found.setdefault(mount.device, mount)
    return list(found.values())


def _rank(mount: Mount) -> tuple[bool, int, str]:
    return "ro" in mount.options, len(mount.path), mount.path


def _plain(path: str) -> str:
    # The kernel writes blanks, tabs, newlines and backslashes in paths as octal numbers.
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), path)


class Mounts:
    """Reads mountinfo when it changed, and asks every file system for its free space. `fileno` is readable after a
    change."""

    name = "disk"
    every_s = MOUNTS_S

    def __init__(
        self,
        machine: MachineRoot,
        statvfs: Callable[[str], os.statvfs_result] = os.statvfs,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._root, self._statvfs, self._clock = machine.root, statvfs, clock
        self._due_s = self._free_s = clock()
        self._mountinfo = machine.root / "proc/self/mountinfo"
        self._stand_in = machine.stand_in
        self._folders = tuple(folder.absolute() for folder in machine.job_dirs)
        self._callers: dict[str, BoundedCaller] = {}
        self._written: set[str] = set()
        self._changes: select.epoll | None = None
        if not machine.stand_in:
            # The kernel wakes poll() on mountinfo with POLLPRI and POLLERR after a change. epoll is what the
            # agent's loop can wait for: a descriptor that becomes readable.
            self._fd = os.open(self._mountinfo, os.O_RDONLY | os.O_CLOEXEC)
            self._changes = select.epoll()
            self._changes.register(self._fd, select.EPOLLPRI | select.EPOLLERR)

    def fileno(self) -> int:
        """Readable after a change of the mounts; -1 if the input is recorded."""
        return self._changes.fileno() if self._changes else -1

    def read(self) -> Iterator[Reading]:
        """`mount.read_only` (0 or 1), `disk.free_share`, `disk.free_bytes`, `disk.inodes_free_share`, and for file
        servers `mount.silent_s`: for how long one has not answered. After a change only the first is read, and not more
        often than a limit allows: where containers come and go, mounts change all the time."""
        if self._changes is not None:
            # Reading the event re-arms it; if it stayed pending, the loop would spin.
            self._changes.poll(0)
        now = self._clock()
        due = now >= self._due_s
        # A change within 5 s of the last one waits for the period. Its report is only a little late, and a
        # node that starts containers all the time does not spend its processor here.
        if not due and now < self._free_s:
            return
        self._free_s = now + CHANGES_APART_S
        if due:
            # A second early: the poller wakes at whole seconds, and a round that came a moment too soon would
            # skip a whole period.
            self._due_s = now + self.every_s - 1.0
        try:
            mounts = parse_mounts(text(self._mountinfo) or "", self._folders)
        except (OSError, ValueError) as error:
            yield unknown("disk", "mount.read_only", error)
            return
        for mount in mounts:
            # A file system that was writable while the agent ran and is not any more also counts as made
            # read-only: an administrator who remounts it read-only on a running node stops the job in the
            # same way.
            lost = mount.made_read_only or (mount.device in self._written and not mount.writable)
            if mount.writable:
                self._written.add(mount.device)
            yield Reading(source="disk", name="mount.read_only", value=float(lost), subject=mount.path)
            if due:
                yield from self._space(mount)
        # The thread of an unmounted server is released; otherwise an agent that runs for months would collect
        # them.
        for gone in set(self._callers) - {_caller_name(mount) for mount in mounts}:
            self._callers.pop(gone).close()

    def _space(self, mount: Mount) -> Iterator[Reading]:
        path = str(self._root) + mount.path if self._stand_in else mount.path
        caller = self._callers.get(_caller_name(mount))
        if caller is None:
            caller = self._callers[_caller_name(mount)] = BoundedCaller(_caller_name(mount), ANSWER_S)
        try:
            space = caller.call(lambda: self._statvfs(path))
        except NoAnswerError as error:
            yield Reading(source="disk", name="mount.silent_s", value=error.waited_s, subject=mount.path)
            yield unknown("disk", "disk.free_share", str(error), mount.path)
            return
        except OSError as error:
            # mountinfo also lists mounts that another one hides, or that are gone by now. Their path leads
            # elsewhere or nowhere, which is no fault.
            if not isinstance(error, FileNotFoundError):
                yield unknown("disk", "disk.free_share", error, mount.path)
            return
        # Written explicitly as 0, because a finding ends with a reading, and not with the lack of one.
        if mount.network:
            yield Reading(source="disk", name="mount.silent_s", value=0.0, subject=mount.path)
        # A read-only file system is full by design, and some pseudo file systems report a size of zero.
        if not mount.writable or not space.f_blocks:
            return
        # As df counts: the share of the space that is not reserved for root.
        usable = space.f_blocks - space.f_bfree + space.f_bavail
        yield Reading(
            source="disk",
            name="disk.free_share",
            value=space.f_bavail / usable if usable else 0.0,
            subject=mount.path,
        )
        yield Reading(
            source="disk",
            name="disk.free_bytes",
            value=float(space.f_bavail * space.f_frsize),
            subject=mount.path,
        )
        if space.f_files:
            yield Reading(
                source="disk",
                name="disk.inodes_free_share",
                value=space.f_ffree / space.f_files,
                subject=mount.path,
            )

    def close(self) -> None:
        """Releases its threads and closes its files."""
        for caller in self._callers.values():
            caller.close()
        self._callers.clear()
        if self._changes is not None:
            self._changes.close()
            os.close(self._fd)
            self._changes = None


def _caller_name(mount: Mount) -> str:
    """Local disks share a thread: if it hangs, the watcher notices. Every file server has its own."""
    return f"file server of {mount.path}" if mount.network else "local file systems"


def mount_sources(machine: MachineRoot) -> list[Mounts]:
    """The source for mounts, if the machine shows them."""
    return [Mounts(machine)] if (machine.root / "proc/self/mountinfo").exists() else []
