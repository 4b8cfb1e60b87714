"""The machine that a benchmark ran on, and how busy others kept it meanwhile."""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a reader needs to judge a number."""

    cpu: str
    cores: int
    memory_gb: float
    kernel: str
    python: str

    def line(self) -> str:
        return (
            f"{self.cpu}, {self.cores} cores, {self.memory_gb:.0f} GB memory, "
            f"{self.kernel}, Python {self.python}"
        )


def describe() -> Machine:
    """This machine, read from /proc."""
    cpu = _field(Path("/proc/cpuinfo"), "model name") or platform.machine()
    memory_kb = float((_field(Path("/proc/meminfo"), "MemTotal") or "0 kB").split()[0])
    return Machine(
        cpu=cpu,
        cores=len(os.sched_getaffinity(0)),
        memory_gb=memory_kb / 1e6,
        kernel=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
    )


def _field(path: Path, name: str) -> str | None:
    for line in path.read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None


def introduce(console: Console, versions: Mapping[str, str], what: str) -> None:
    """The lines above every benchmark: the machine, what was measured, and how busy it was before."""
    console.print(describe().line(), highlight=False)
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    console.print(f"{named}; {what}; load average at the start {load():.1f}", highlight=False)


def conclude(console: Console, cpu: ForeignCpu) -> None:
    """The line below a benchmark: how busy others kept the machine meanwhile."""
    console.print(
        f"Load average at the end: {load():.1f}; {cpu.share:.0%} of the CPU went to other processes",
        highlight=False,
    )


def load() -> float:
    """The load average over the last minute."""
    return os.getloadavg()[0]


class ForeignCpu:
    """The share of the machine's CPU time that went to processes outside this benchmark.

    Use it as a context manager around work whose children have all ended when it is left. Only then has
    the kernel added their time to ours.
    """

    share = 0.0

    def __enter__(self) -> ForeignCpu:
        self._ours = _own_s()
        self._busy, self._total = _machine_s()
        return self

    def __exit__(self, *exception: object) -> None:
        busy, total = _machine_s()
        foreign = (busy - self._busy) - (_own_s() - self._ours)
        self.share = max(0.0, foreign / max(total - self._total, 1e-9))


def _own_s() -> float:
    """CPU seconds of this process and of its ended children."""
    usage = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(u.ru_utime + u.ru_stime for u in usage)


def _machine_s() -> tuple[float, float]:
    """Busy and total CPU seconds of the whole machine since boot."""
    with open("/proc/stat", encoding="ascii") as stat:
        ticks = [int(word) for word in stat.readline().split()[1:9]]
    hertz = os.sysconf("SC_CLK_TCK")
    idle = ticks[3] + ticks[4]
    return (sum(ticks) - idle) / hertz, sum(ticks) / hertz
