"""What this machine's kernel says about other processes and about memory, and how a process of Holdfast's own is started.

In a container /proc/meminfo still shows the machine. A program that trusts it alone takes memory that the container may not
have, and the kernel kills one of its processes for that. What lies in a memory file system counts against the limit, too.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


def kernel_id() -> str:
    """An identifier that is the same for two processes that see each other's process ids: one boot of one machine, and one
    process namespace. Empty where it cannot be determined."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # Both parts are needed: two containers on one machine share a boot and not their process numbers, and
        # a number of the other one would name a stranger's process.
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def set_title(title: str, name: str = "") -> None:
    """What `ps` and `pkill -f` show of this process. name: its short name, if that is not to begin as the title does."""
    from setproctitle import setproctitle, setthreadtitle

    # Read when it is first called: a title may be as long as the command line, and leaves the environment readable.
    given = os.environ.get("SPT_NOENV")
    os.environ["SPT_NOENV"] = "1"
    setproctitle(os.fsencode(title).decode(errors="replace"))
    if given is None:
        del os.environ["SPT_NOENV"]
    if name:
        setthreadtitle(name)


def text_of(word: str) -> str:
    """A word of a command line, as Python has it, in characters that every encoder takes. Nothing changes in a word that is
    UTF-8. The bytes of another stand behind a NUL, which no word of a command line has."""
    try:
        word.encode()
    except UnicodeEncodeError:
        return "\0" + os.fsencode(word).decode("latin-1")
    return word


def word_of(text: str) -> str:
    """The word that was given to `text_of`."""
    return os.fsdecode(text[1:].encode("latin-1")) if text.startswith("\0") else text


class ProcessStat(NamedTuple):
    """From /proc/PID/stat (proc_pid_stat(5))."""

    state: str
    """A letter: R runs, S and D wait, T and t are stopped, Z has ended and is not reaped."""
    session: int


def stat_of(pid: int) -> ProcessStat | None:
    """The `ProcessStat` of a process; None: there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name of the program comes before it, in brackets, and may itself contain brackets and blanks.
    fields = text[text.rindex(")") + 2 :].split()
    return ProcessStat(fields[0], int(fields[3]))


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for the signal, which would else end it."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(caught >> (number - 1) & 1)


class ThreadTimes(NamedTuple):
    """What the kernel has counted for one thread."""

    ran_s: float
    """For how long it had a processor."""
    waited_s: float
    """For how long it waited for one. The kernel adds a wait when it ends, so the one that goes on now is not in it."""
    runnable: bool
    """It runs, or waits for a processor."""


def thread_times(pid: int) -> dict[int, ThreadTimes]:
    """What the kernel has counted for each thread of a process; nothing where it does not tell.

    From /proc/PID/task/TID/schedstat (Documentation/scheduler/sched-stats.rst) and the state in /proc/PID/task/TID/stat
    (proc_pid_stat(5)).
    """
    found = {}
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return {}
    # Threads come and go while this runs. One that has ended just now is left out, and not an error.
    for thread in threads:
        try:
            ran_ns, waited_ns = (thread / "schedstat").read_text().split()[:2]
            # The name before the state stands in parentheses, and may contain some itself.
            state = (thread / "stat").read_text().rpartition(")")[2].split()[0]
            found[int(thread.name)] = ThreadTimes(int(ran_ns) / 1e9, int(waited_ns) / 1e9, state == "R")
        except (OSError, ValueError, IndexError):
            continue
    return found


def memory_stall_s(path: Path = Path("/proc/pressure/memory")) -> float:
    """For how long, since this machine was started, all that wanted to run waited for memory; 0 where the kernel does not
    count it.

    The line `full` of pressure stall information (Documentation/accounting/psi.rst).
    """
    try:
        lines = path.read_text().splitlines()
        return next(int(line.rpartition("total=")[2]) / 1e6 for line in lines if line.startswith("full"))
    except (OSError, ValueError, StopIteration):
        return 0.0


PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60
"""Version 1 has no word for no limit, but the largest multiple of a page."""


class Room(NamedTuple):
    """The memory of the machine, or of one control group, in bytes."""

    total: int
    free: int
    """What new allocations can have: memory that is given up first when it is needed counts."""


def available_bytes(proc: Path | None = None, cgroup: Path | None = None) -> int | None:
    """Bytes that new processes can have: of the machine, or of the container if that is less. None: unknown."""
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


def python_module(name: str, *arguments: str) -> list[str]:
    """The command line of `python -m NAME ARGUMENTS...`, by this interpreter.

    -P: without it the current folder comes first on sys.path, and whoever can write there would have his `asyncio.py` run
    by the coordinator. Not the variable PYTHONSAFEPATH, which the user's script would pass on to what it starts.
    """
    # -P for ours only. Exported as a variable it would change how the user's script finds its own modules.
    return [sys.executable, "-P", "-m", name, *arguments]


def python_for_scripts(name: str, *arguments: str) -> list[str]:
    """The same for a process whose forks become users' scripts, which see the flags of this command line.

    They are those of `python -u script.py`, as torchrun starts it: -P would show in `sys.flags`, and would be passed on to
    Python's child processes. So the current folder is taken off sys.path by the first line, and NAME's `main()` called.
    """
    first = "import sys; sys.path[:1] == [''] and sys.path.pop(0)"
    return [sys.executable, "-u", "-c", f"{first}; from {name} import main; sys.exit(main())", *arguments]


def stand_back(nice: int) -> None:
    """Lowers the priority of this thread. A thread whose priority is lower already keeps it, because only root may
    raise it again."""
    me = threading.get_native_id()
    try:
        if os.getpriority(os.PRIO_PROCESS, me) < nice:
            os.setpriority(os.PRIO_PROCESS, me, nice)
    except OSError:
        return  # a sandbox may forbid it; what the thread does matters more than when
