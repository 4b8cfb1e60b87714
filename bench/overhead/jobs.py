"""One job of these benchmarks, under `holdfast run`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from bench.processes import Group
from bench.progress import Progress
from bench.recovery.environments import ROOT
from bench.recovery.systems.base import worker_environment
from holdfast.protocol.machine.processes import python_module

LOOK_S = 0.5
"""Between two looks at the progress."""


class Failed(Exception):
    """A run did not end well. The message is for the user."""


def run_job(
    processes: Group,
    script: Path,
    arguments: Mapping[str, object],
    workers: int,
    timeout_s: float,
    progress: Progress,
    what: str,
    name: str,
    options: Sequence[str] = (),
    environment: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
    """Runs a script on nodes with one worker each. Returns the lines that its workers wrote to their `--output`.

    Args:
        arguments: of the script.
        what: for the progress.
        name: of the log's file.
        options: more of `holdfast run`.
        environment: more of the job's.

    Raises:
        Failed: it ended with an error, or not in time.
    """
    log = ROOT / "out" / "overhead" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-overhead-") as scratch:
        output = Path(scratch) / "lines.jsonl"
        argv = python_module("holdfast.cli", "run", "--nnodes", str(workers), "--nproc-per-node", "1")
        argv += ["--job", "bench", "--no-ui", *options, str(script)]
        argv += [str(word) for pair in {**arguments, "--output": output}.items() for word in pair]
        env = worker_environment(sys.executable) | {"HOLDFAST_HOME": scratch, **environment}
        process = processes.spawn(argv, env, log)
        deadline = time.monotonic() + timeout_s
        code: int | None = None
        while code is None:
            progress(what)
            try:
                code = process.wait(LOOK_S)
            except subprocess.TimeoutExpired as error:
                if time.monotonic() > deadline:
                    raise Failed(f"not done within {timeout_s:.0f} s; log {log}") from error
        if code:
            raise Failed(f"ended with {code}; log {log}")
        return output.read_text(encoding="utf-8").splitlines()
