"""From the options of `holdfast run` to a job's specification; everything is checked before anything starts."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import socket
import sys
from pathlib import Path

import msgspec

from holdfast.cli.health_options import HealthOptions, plan_health
from holdfast.cli.memory import check_memory
from holdfast.cli.save_options import plan_saving
from holdfast.data.cache import absolute_cache
from holdfast.engines import jobs
from holdfast.errors import UsageError
from holdfast.health.capacity import available_bytes
from holdfast.protocol.faults import FaultSpec, check_watched, parse_fault
from holdfast.protocol.job import JobSpec, SlurmOptions, Timing

MIN_FREE_BYTES = 256 << 20
HOST = "127.0.0.1"


class Options(msgspec.Struct, frozen=True):
    """What was given on the command line."""

    script: str
    args: tuple[str, ...] = ()
    nnodes: str = "1"
    nproc_per_node: str = "1"
    spares: int = 0
    wait_for_spare: bool = False
    engine: str = "local"
    job: str | None = None
    module: bool = False
    preload: str = "torch"
    faults: tuple[str, ...] = ()
    report: Path | None = None
    max_restarts: int = 100
    detection_s: float = Timing().detection_s
    stall_factor: float = Timing().stall_factor
    port: int = 0
    snapshot_every: str = "auto"
    copies: int = 1
    snapshot_memory: str = ""
    racks: int = 0
    checkpoints: tuple[str, ...] = ()
    data_cache: str = ""
    health: HealthOptions = HealthOptions()
    slurm: SlurmOptions = SlurmOptions()
    dry_run: bool = False


def plan(given: Options) -> JobSpec:
    """The job that is asked for.

    Raises:
        UsageError: something of it cannot work; nothing was started or written.
    """
    low, high = parse_nnodes(given.nnodes)
    nproc = parse_nproc(given.nproc_per_node, given.slurm.gpus_per_node)
    _check_numbers(given)
    faults = tuple(_fault(text, high, nproc, given.spares) for text in given.faults)
    for fault in faults:
        check_watched(fault, given.health.watch)
    script = _find_script(given.script, given.module)
    name = jobs.check_name(given.job) if given.job else jobs.default_name(given.script)
    spec = JobSpec(
        name=name,
        script=script,
        args=given.args,
        module=given.module,
        min_nodes=low,
        max_nodes=high,
        nproc=nproc,
        spares=given.spares,
        wait_for_spare=given.wait_for_spare,
        engine=given.engine,
        preload=_modules(given.preload),
        faults=faults,
        max_restarts=given.max_restarts,
        cwd=str(Path.cwd()),
        timing=Timing(given.detection_s, given.stall_factor),
        racks=given.racks,
        saving=plan_saving(
            given.snapshot_every,
            given.copies,
            given.snapshot_memory,
            given.checkpoints,
            jobs.job_dir(name) / "checkpoint",
        ),
        data_cache=absolute_cache(given.data_cache) if given.data_cache else "",
        slurm=given.slurm,
        health=plan_health(given.health),
    )
    _check_report(given.report)
    if given.engine == "local":
        check_memory(high + given.spares, nproc, available_bytes())
    _check_port(given.port)
    _check_disk(jobs.home())
    return spec


def parse_nnodes(text: str) -> tuple[int, int]:
    """`4` or `2:4` as (min, max). Raises UsageError."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    if match is None:
        raise UsageError(f"--nnodes {text!r}: write a number or MIN:MAX, for example 4 or 2:4")
    low = int(match[1])
    high = int(match[2]) if match[2] else low
    if low < 1 or high < low:
        raise UsageError(f"--nnodes {text!r}: MIN is at least 1 and MAX at least MIN, for example 2:4")
    return low, high


def parse_nproc(text: str, gpus_per_node: int = 0) -> int:
    """A number, or as with torchrun `cpu` (cores), `gpu` or `auto` (GPUs if there are any, else cores). gpus_per_node:
    of nodes that are not this one."""
    if gpus_per_node and text in ("auto", "gpu"):
        return gpus_per_node
    if text in ("auto", "cpu", "gpu"):
        gpus = sum(1 for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))
        if text == "gpu" and not gpus:
            raise UsageError("--nproc-per-node gpu: this machine has no NVIDIA GPU; give a number")
        return gpus if gpus and text != "cpu" else len(os.sched_getaffinity(0))
    if not re.fullmatch(r"\d+", text) or int(text) < 1:
        raise UsageError(
            f"--nproc-per-node {text!r}: write the number of workers per node, at least 1, or auto, cpu or gpu"
        )
    return int(text)


def _check_numbers(given: Options) -> None:
    if given.spares < 0:
        raise UsageError(f"--spares {given.spares}: 0 or more")
    if given.racks < 0:
        raise UsageError(f"--racks {given.racks}: 0 or more, for example 2")
    if given.engine not in ("local", "slurm"):
        raise UsageError(f"--engine {given.engine!r}: there are local and slurm")
    if given.engine != "slurm" and (given.slurm != SlurmOptions() or given.dry_run):
        raise UsageError(
            "--partition, --time, --account, --gpus-per-node, --sbatch-arg, --requeue, --stop-before, "
            "--replace-command and --dry-run are for Slurm: give --engine slurm too"
        )
    if given.slurm.gpus_per_node < 0:
        raise UsageError(f"--gpus-per-node {given.slurm.gpus_per_node}: 0 or more, for example 8")
    if given.slurm.warn_s < 10:
        raise UsageError(f"--stop-before {given.slurm.warn_s}: 10 seconds or more")
    if given.max_restarts < 0:
        raise UsageError(f"--max-restarts {given.max_restarts}: 0 or more")
    if not 0.2 <= given.detection_s <= 600:
        raise UsageError(f"--detection {given.detection_s:g}: between 0.2 and 600 seconds, for example 2")
    if not 2 <= given.stall_factor <= 1000:
        raise UsageError(
            f"--stall-factor {given.stall_factor:g}: between 2 and 1000 median steps, for example 5"
        )


def _fault(text: str, nodes: int, nproc: int, spares: int) -> FaultSpec:
    spec = parse_fault(text)
    if spec.rank is not None and spec.rank >= nodes * nproc:
        raise UsageError(
            f"--fault {text!r}: there is no rank {spec.rank}; ranks are 0 to {nodes * nproc - 1}"
        )
    if isinstance(spec.node, int) and spec.node >= nodes + spares:
        raise UsageError(
            f"--fault {text!r}: there is no node {spec.node}; nodes are 0 to {nodes + spares - 1}"
        )
    return spec


def _find_script(script: str, module: bool) -> str:
    if module:
        if not _importable(script):
            raise UsageError(f"there is no module {script!r}; is it on PYTHONPATH?")
        return script
    path = Path(script)
    if path.is_dir():
        raise UsageError(
            f"{script!r} is a folder; name the training script in it, for example {script}/train.py"
        )
    if not path.is_file():
        hint = "; for a module use -m" if "/" not in script and not script.endswith(".py") else ""
        raise UsageError(f"there is no script {script!r} in {Path.cwd()}{hint}")
    return str(path.resolve())


def _modules(text: str) -> tuple[str, ...]:
    names = tuple(filter(None, (part.strip() for part in text.split(","))))
    for name in names:
        if not _importable(name):
            raise UsageError(f"--preload {text!r}: there is no module {name!r} in this environment")
    return names


def _importable(module: str) -> bool:
    """Where workers find it: in the environment, or in this folder; which this process looks into last, and only now."""
    here = str(Path.cwd())
    sys.path.append(here)
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
    finally:
        sys.path.remove(here)


def _check_report(report: Path | None) -> None:
    if report is None:
        return
    folder = report.resolve().parent
    if not folder.is_dir():
        raise UsageError(f"--report {report}: there is no folder {folder}")
    if report.is_dir():
        raise UsageError(f"--report {report}: that is a folder; name a file in it, for example report.json")
    if not os.access(report if report.exists() else folder, os.W_OK):
        raise UsageError(f"--report {report}: it cannot be written there")


def _check_port(port: int) -> None:
    if not 0 <= port <= 65535:
        raise UsageError(f"--port {port}: between 0 and 65535; 0 takes any free one")
    try:
        socket.create_server((HOST, port)).close()
    except PermissionError:
        raise UsageError(f"--port {port}: ports below 1024 belong to the system; take a higher one") from None
    except OSError:
        raise UsageError(f"--port {port} is in use; choose another, or leave --port out") from None


def _check_disk(base: Path) -> None:
    there = next(folder for folder in (base, *base.resolve().parents) if folder.is_dir())
    if not os.access(there, os.W_OK):
        raise UsageError(f"{base} cannot be written; set HOLDFAST_HOME to a folder that can")
    free = shutil.disk_usage(there).free
    if free < MIN_FREE_BYTES:
        raise UsageError(
            f"{base} has {free >> 20} MiB left, too little for checkpoints and logs; set HOLDFAST_HOME elsewhere"
        )
