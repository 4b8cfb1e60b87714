"""How much memory is there, and is it enough to start?"""

from __future__ import annotations

from pathlib import Path

from holdfast.errors import UsageError
from holdfast.observe.units import plural

NODE_BYTES = 200 << 20
"""An agent with the process that its warm workers are forked from (measured: 150 to 230 MB with torch)."""

WORKER_BYTES = 150 << 20
"""A worker of a small model and the warm process behind it (measured: 130 to 210 MB); the model comes on top."""


def check_memory(nodes: int, nproc: int, available: int | None) -> None:
    """Raises UsageError when the processes alone would not fit; unknown (None) passes."""
    needed = nodes * (NODE_BYTES + nproc * WORKER_BYTES)
    if available is not None and available < needed:
        raise UsageError(
            f"{plural(nodes, 'node')} with {plural(nproc, 'worker')} each take about {needed >> 20} MiB of memory "
            f"before the model, and {available >> 20} MiB are free: use fewer --nnodes, --nproc-per-node or --spares, "
            "or end other programs"
        )


def available_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What new processes can have: of the machine, or of the container if that is less. None: unknown."""
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
    return max(0, int(limit) - used + int(stat.get("inactive_file", 0)))
