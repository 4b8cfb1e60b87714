"""The batch scripts that are submitted to Slurm. Pure."""

from __future__ import annotations

import shlex
from pathlib import Path

from holdfast.protocol.job import JobSpec
from holdfast.protocol.machine.processes import python_module

MODULE = "holdfast.engines.slurm"


def job_script(spec: JobSpec, job_dir: Path, home: Path) -> str:
    """The script of a job with all its nodes, spares included. It starts the launcher on the first node."""
    options = spec.slurm
    lines = [
        f"--job-name={spec.name}",
        f"--nodes={spec.max_nodes + spec.spares}",
        "--ntasks-per-node=1",
        "--exclusive",
        "--mem=0",
        # The job survives the loss of a node. By default Slurm would end it.
        "--no-kill",
        "--requeue" if options.requeue else "--no-requeue",
        # B: only to the batch script, because USR1 would end the workers, which have no handler for it.
        f"--signal=B:USR1@{options.warn_s}",
        f"--chdir={shlex.quote(spec.cwd)}",
        f"--output={shlex.quote(str(job_dir))}/slurm-%j.out",
        "--open-mode=append",
        *_wishes(spec),
    ]
    return _script(lines, home, python_module(MODULE, f"--job-dir={job_dir}"))


def follow_up_name(spec: JobSpec) -> str:
    """Name of the Slurm jobs that provide further nodes."""
    return f"{spec.name}+1"


def follow_up_script(
    spec: JobSpec, job_dir: Path, home: Path, without: list[str], minutes: int | None
) -> str:
    """The script that provides one more node for a running job.

    Args:
        without: nodes to exclude.
        minutes: time limit, which is the rest of the job's; None: it has none.
    """
    lines = [
        f"--job-name={follow_up_name(spec)}",
        "--nodes=1",
        "--ntasks-per-node=1",
        "--exclusive",
        "--mem=0",
        "--no-requeue",
        f"--chdir={shlex.quote(spec.cwd)}",
        f"--output={shlex.quote(str(job_dir))}/slurm-%j.out",
        *_wishes(spec),
        *([f"--exclude={','.join(without)}"] if without else []),
        *([f"--time={minutes}"] if minutes is not None else []),
    ]
    return _script(lines, home, python_module(f"{MODULE}.node", f"--job-dir={job_dir}"))


def _wishes(spec: JobSpec) -> list[str]:
    options = spec.slurm
    return [
        *([f"--partition={options.partition}"] if options.partition else []),
        *([f"--time={options.time_limit}"] if options.time_limit else []),
        *([f"--account={options.account}"] if options.account else []),
        *([f"--gpus-per-node={options.gpus_per_node}"] if options.gpus_per_node else []),
        *options.sbatch_args,
    ]


def _script(options: list[str], home: Path, command: list[str]) -> str:
    begin = "".join(f"#SBATCH {option}\n" for option in options)
    run = f"export HOLDFAST_HOME={shlex.quote(str(home))}\nexec {shlex.join(command)}\n"
    return f"#!/bin/bash\n{begin}{run}"
