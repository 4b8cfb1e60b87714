"""How Slurm's processes begin: the launcher in the batch script, and what runs on every node."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path

import msgspec

from holdfast import logs
from holdfast.engines.jobs import check_own
from holdfast.errors import HoldfastError, UsageError
from holdfast.protocol.job import JobSpec
from holdfast.protocol.wire.stored import decode_file

_log = logging.getLogger(__name__)


_specs = msgspec.json.Decoder(JobSpec)


def enter(module: str, run: Callable[[JobSpec, Path], Coroutine[None, None, int]], log_file: str = "") -> int:
    """Runs a part of the job whose folder is in `--job-dir`; returns the exit code.

    Args:
        module: as `python -m` has it.
        log_file: within the folder's `logs`; empty: the log goes to stderr, which Slurm writes to a file of the node's.
    """
    parser = argparse.ArgumentParser(prog=module)
    parser.add_argument("--job-dir", type=Path, required=True)
    job_dir: Path = parser.parse_args().job_dir
    # Before any file is made: logs and the state of the job are for its user alone.
    os.umask(0o077)
    try:
        check_own(job_dir)
    except UsageError as error:
        sys.exit(f"[holdfast] {error}")
    spec = decode_file(_specs.decode, job_dir / "spec.json")
    close_log = logs.configure(
        spec.log,
        # The launcher's own lines are about any node, so its own is no field of theirs.
        {"job": spec.name, "node": "" if log_file else os.environ.get("SLURMD_NODENAME", "")},
        file=job_dir / "logs" / log_file if log_file else None,
        # What asyncio warns of before a new start puts the old logs away would be put away with them.
        others=not log_file,
    )
    try:
        return asyncio.run(run(spec, job_dir))
    except HoldfastError as error:
        _log.error("%s", error)
        return 1
    finally:
        close_log()
