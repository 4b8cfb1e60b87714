"""What this machine is and has free."""

from __future__ import annotations

from pathlib import Path


def available_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What new processes can have: of the machine, or of the container if that is less. None: unknown."""
    # In a container /proc/meminfo still shows the machine. Trusting it alone, workers would be started that
    # the container's limit then kills.
    known = [x for x in (_machine(proc / "meminfo"), _container(cgroup)) if x is not None]
    return min(known, default=None)


def _machine(meminfo: Path) -> int | None:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)


def _container(cgroup: Path) -> int | None:
    """Version 2: the limit less what is used and cannot be reclaimed."""
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    # memory.current counts the page cache too. Its inactive part is given up before anything is killed; the
    # active part and anonymous memory are not.
    return max(0, int(limit) - used + int(stat.get("inactive_file", 0)))


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name; empty: unknown."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return ""
    # x86, Arm (a part number only) and MIPS.
    keys = ("model name", "CPU part", "cpu model")
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(keys)), "")
