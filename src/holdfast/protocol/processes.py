"""What this machine's kernel says about processes of other people's keeping."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


def kernel_id() -> str:
    """The same for two processes that see each other's numbers: one boot of one machine, and one namespace of processes.
    Empty where that cannot be told."""
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
    """None: there is no such process."""
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
