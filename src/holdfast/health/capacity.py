"""Properties of this machine."""

from __future__ import annotations

from pathlib import Path


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name; empty: unknown."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return ""
    # x86, Arm (a part number only) and MIPS.
    keys = ("model name", "CPU part", "cpu model")
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(keys)), "")
