"""What this machine's kernel says about processes of other people's keeping."""

from __future__ import annotations

from pathlib import Path


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


def waits_s(pid: int) -> dict[int, float]:
    """For how long each thread of a process has waited for a processor so far; nothing where the kernel does not tell.

    That is the second number of /proc/PID/task/TID/schedstat, in nanoseconds (Documentation/scheduler/sched-stats.rst).
    """
    found = {}
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return {}
    # Threads come and go while this runs. One that has ended just now is left out, and not an error.
    for thread in threads:
        try:
            text = (thread / "schedstat").read_text()
            found[int(thread.name)] = int(text.split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            continue
    return found
