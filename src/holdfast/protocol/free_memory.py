"""How much memory the machine has left, and every control group around this process.

In a container /proc/meminfo still shows the machine. Whoever trusts it alone takes memory that the container may not have,
and the kernel kills one of its processes for that. What lies in a memory file system counts against the limit, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60
"""Version 1 has no word for no limit, but the largest multiple of a page."""


class Room(NamedTuple):
    """What the machine, or one control group, has. Bytes."""

    total: int
    free: int
    """What new allocations can have: memory that is given up first when it is needed counts."""


def available_bytes(proc: Path | None = None, cgroup: Path | None = None) -> int | None:
    """What new processes can have: of the machine, or of the container if that is less. None: unknown."""
    return min((room.free for room in rooms(proc, cgroup)), default=None)


def rooms(proc: Path | None = None, cgroup: Path | None = None) -> list[Room]:
    """Of the machine, and of each control group around this process that has a limit; those that are not known are left out.

    proc, cgroup: where the kernel's file systems are mounted; None: in their usual places.
    """
    machine = _machine((proc or PROC) / "meminfo")
    return [*([machine] if machine is not None else []), *_groups(proc, cgroup)]


def limit_bytes(proc: Path | None = None, cgroup: Path | None = None) -> int | None:
    """The smallest limit of a control group around this process. None: there is none."""
    return min((room.total for room in _groups(proc, cgroup)), default=None)


def kills(proc: Path | None = None, cgroup: Path | None = None) -> int | None:
    """Processes of this one's control group that the kernel has killed for want of memory. None: it does not say."""
    proc, cgroup = proc or PROC, cgroup or CGROUP
    v1, v2 = _paths(proc / "self" / "cgroup")
    # Of the innermost group that can be seen: what happens beside it has killed nobody here.
    for folder, name in (
        *((folder, "memory.events") for folder in _upward(cgroup, v2)),
        *((folder, "memory.oom_control") for folder in _upward(cgroup / "memory", v1)),
    ):
        try:
            counts = dict(line.split() for line in (folder / name).read_text().splitlines())
            return int(counts["oom_kill"])
        except (OSError, KeyError, ValueError):
            continue
    return None


def _groups(proc: Path | None, cgroup: Path | None) -> list[Room]:
    proc, cgroup = proc or PROC, cgroup or CGROUP
    v1, v2 = _paths(proc / "self" / "cgroup")
    # Each group on the way up: the limit of a parent (a pod, a user's slice, a batch job) holds for all below it.
    asked = [_group_v2(folder) for folder in _upward(cgroup, v2)]
    asked += [_group_v1(folder) for folder in _upward(cgroup / "memory", v1)]
    return [room for room in asked if room is not None]


def _machine(meminfo: Path) -> Room | None:
    try:
        lines = [line.split() for line in meminfo.read_text().splitlines()]
        kibibytes = {line[0]: int(line[1]) for line in lines if len(line) > 1}
        return Room(kibibytes["MemTotal:"] << 10, kibibytes["MemAvailable:"] << 10)
    except (OSError, KeyError, ValueError):
        return None


def _paths(of_process: Path) -> tuple[str, str]:
    """Where this process is in the hierarchies of the memory controller of version 1, and of version 2."""
    v1 = v2 = "/"
    try:
        lines = of_process.read_text().splitlines()
    except OSError:
        return v1, v2
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            v2 = path
        elif "memory" in controllers.split(","):
            v1 = path
    return v1, v2


def _upward(root: Path, path: str) -> Iterator[Path]:
    """The folder of a group and those of its parents, as far as they can be seen from here."""
    # In a container the path may be the host's, while what is mounted begins with the container's own group: the root
    # of the mount is then the only one of these folders that exists. A path with ".." is outside of what is mounted.
    parts = [part for part in path.split("/") if part]
    if ".." not in parts:
        for count in range(len(parts), 0, -1):
            yield root.joinpath(*parts[:count])
    yield root


def _group_v2(folder: Path) -> Room | None:
    return _room(folder / "memory.max", folder / "memory.current", folder / "memory.stat", "inactive_file")


def _group_v1(folder: Path) -> Room | None:
    return _room(
        folder / "memory.limit_in_bytes",
        folder / "memory.usage_in_bytes",
        folder / "memory.stat",
        "total_inactive_file",
    )


def _room(limit_file: Path, used_file: Path, stat_file: Path, reclaimed: str) -> Room | None:
    """The limit less what is used and cannot be reclaimed. None: there is no limit, or it cannot be read."""
    try:
        limit = limit_file.read_text().strip()
        if limit == "max" or int(limit) >= _UNLIMITED:
            return None
        used = int(used_file.read_text())
        stat = dict(line.split() for line in stat_file.read_text().splitlines())
        # What is used counts the page cache too. Its inactive part is given up before anything is killed; the
        # active part, anonymous memory and memory file systems are not.
        return Room(int(limit), max(0, int(limit) - used + int(stat.get(reclaimed, 0))))
    except (OSError, ValueError):
        return None
