"""How Slurm's processes begin: the launcher in the batch script, and what runs on every node."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path

import msgspec

from holdfast.errors import HoldfastError
from holdfast.protocol.job import JobSpec


def enter(module: str, run: Callable[[JobSpec, Path], Coroutine[None, None, int]]) -> int:
    """Runs a part of the job whose folder is in `--job-dir`; returns the exit code. module: as `python -m` has it."""
    parser = argparse.ArgumentParser(prog=module)
    parser.add_argument("--job-dir", type=Path, required=True)
    job_dir: Path = parser.parse_args().job_dir
    os.umask(0o077)
    spec = msgspec.json.decode((job_dir / "spec.json").read_bytes(), type=JobSpec)
    try:
        return asyncio.run(run(spec, job_dir))
    except HoldfastError as error:
        print(f"holdfast: {error}", file=sys.stderr)
        return 1
