"""`holdfast run`: launches a training script and keeps it running."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from holdfast.engines import jobs
from holdfast.errors import UsageError
from holdfast.observe.plain import PlainView
from holdfast.protocol.faults import FaultSpec, parse_fault
from holdfast.protocol.job import JobSpec, Timing

CONTEXT = {"allow_interspersed_args": False, "ignore_unknown_options": False}
EXIT_FAILED = 1
MIN_FREE_BYTES = 256 << 20


def run(
    script: Annotated[str, typer.Argument(help="Training script, or a module's name with -m.")],
    args: Annotated[list[str] | None, typer.Argument(help="Arguments of the script.")] = None,
    nnodes: Annotated[
        str, typer.Option("--nnodes", help="Nodes: N, or MIN:MAX to go on smaller when some are lost.")
    ] = "1",
    nproc_per_node: Annotated[
        int, typer.Option("--nproc-per-node", "--nproc_per_node", help="Workers on each node.")
    ] = 1,
    spares: Annotated[int, typer.Option("--spares", help="Nodes that wait, checked and warm.")] = 0,
    wait_for_spare: Annotated[
        bool, typer.Option("--wait-for-spare", help="Never go on smaller than the target.")
    ] = False,
    engine: Annotated[str, typer.Option("--engine", help="Where nodes come from: local.")] = "local",
    job: Annotated[str | None, typer.Option("--job", help="Name; the same name goes on from there.")] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module.")] = False,
    preload: Annotated[
        str, typer.Option("--preload", help="Modules that warm processes import ahead of need.")
    ] = "torch",
    fault: Annotated[
        list[str] | None, typer.Option("--fault", help="Inject a fault: KIND[:key=value,...].")
    ] = None,
    report: Annotated[Path | None, typer.Option("--report", help="Write the report as JSON.")] = None,
    no_ui: Annotated[bool, typer.Option("--no-ui", help="Plain lines instead of the live view.")] = False,
    max_restarts: Annotated[
        int,
        typer.Option("--max-restarts", "--max_restarts", help="Restarts after faults before giving up."),
    ] = 100,
    detection: Annotated[
        float, typer.Option("--detection", help="A node silent for so many seconds is lost.")
    ] = Timing().detection_s,
    stall_factor: Annotated[
        float, typer.Option("--stall-factor", help="A stall is this many median steps (3 s at least).")
    ] = Timing().stall_factor,
    port: Annotated[int, typer.Option("--port", help="The coordinator's port; 0: any free one.")] = 0,
) -> None:
    """Runs a training script on several nodes and keeps it running through failures."""
    spec = _spec(
        script=script,
        args=tuple(args or ()),
        nnodes=nnodes,
        nproc=nproc_per_node,
        spares=spares,
        wait_for_spare=wait_for_spare,
        engine=engine,
        job=job,
        module=module,
        preload=preload,
        faults=tuple(fault or ()),
        max_restarts=max_restarts,
        timing=_timing(detection, stall_factor),
    )
    _check_place(report, port)
    folder = jobs.JobFolder(spec.name)
    view = _view(spec, folder.path, no_ui)
    try:
        with view:
            outcome = asyncio.run(_launch(spec, folder, view, port))
    finally:
        folder.close()
    view.ended(outcome)
    if report is not None:
        shown = {k: v for k, v in outcome.items() if k != "blame"}
        report.write_bytes(msgspec.json.format(msgspec.json.encode(shown), indent=1) + b"\n")
    if outcome.get("outcome") not in ("finished", "stopped"):
        sys.exit(EXIT_FAILED)


async def _launch(spec: JobSpec, folder: jobs.JobFolder, view: Any, port: int) -> dict[str, Any]:
    from holdfast.engines.local.launcher import Launcher

    return await Launcher(spec, folder, view, port).run()


def _view(spec: JobSpec, job_dir: Path, no_ui: bool) -> Any:
    return PlainView(spec, job_dir)


def _spec(**given: Any) -> JobSpec:
    low, high = parse_nnodes(given["nnodes"])
    if given["nproc"] < 1:
        raise UsageError(f"--nproc-per-node {given['nproc']}: at least 1 worker per node, for example 1")
    if given["spares"] < 0:
        raise UsageError(f"--spares {given['spares']}: 0 or more")
    if given["engine"] != "local":
        raise UsageError(f"--engine {given['engine']!r}: there is only `local` so far")
    if given["max_restarts"] < 0:
        raise UsageError(f"--max-restarts {given['max_restarts']}: 0 or more")
    faults = tuple(parse_fault(text) for text in given["faults"])
    for text, parsed in zip(given["faults"], faults, strict=True):
        _check_fault(text, parsed, high, given["nproc"], given["spares"])
    script = _find_script(given["script"], given["module"])
    return JobSpec(
        name=jobs.check_name(given["job"]) if given["job"] else jobs.default_name(given["script"]),
        script=script,
        args=given["args"],
        module=given["module"],
        min_nodes=low,
        max_nodes=high,
        nproc=given["nproc"],
        spares=given["spares"],
        wait_for_spare=given["wait_for_spare"],
        engine=given["engine"],
        preload=_modules(given["preload"]),
        faults=faults,
        max_restarts=given["max_restarts"],
        cwd=str(Path.cwd()),
        timing=given["timing"],
    )


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


def _check_fault(text: str, spec: FaultSpec, nodes: int, nproc: int, spares: int) -> None:
    if spec.rank is not None and spec.rank >= nodes * nproc:
        raise UsageError(
            f"--fault {text!r}: there is no rank {spec.rank}; ranks are 0 to {nodes * nproc - 1}"
        )
    if spec.node is not None and spec.node >= nodes + spares:
        raise UsageError(
            f"--fault {text!r}: there is no node {spec.node}; nodes are 0 to {nodes + spares - 1}"
        )


def _find_script(script: str, module: bool) -> str:
    if module:
        sys.path.insert(0, str(Path.cwd()))
        try:
            found = importlib.util.find_spec(script)
        except (ImportError, ValueError):
            found = None
        if found is None:
            raise UsageError(f"there is no module {script!r}; is it on PYTHONPATH?")
        return script
    path = Path(script)
    if not path.is_file():
        hint = "; for a module use -m" if "/" not in script and not script.endswith(".py") else ""
        raise UsageError(f"there is no script {script!r} in {Path.cwd()}{hint}")
    return str(path.resolve())


def _modules(text: str) -> tuple[str, ...]:
    names = tuple(filter(None, (part.strip() for part in text.split(","))))
    for name in names:
        try:
            found = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            found = None
        if found is None:
            raise UsageError(f"--preload {text!r}: there is no module {name!r} in this environment")
    return names


def _timing(detection_s: float, stall_factor: float) -> Timing:
    if not 0.2 <= detection_s <= 600:
        raise UsageError(f"--detection {detection_s:g}: between 0.2 and 600 seconds, for example 2")
    if not 2 <= stall_factor <= 1000:
        raise UsageError(f"--stall-factor {stall_factor:g}: between 2 and 1000 median steps, for example 5")
    return Timing(detection_s, stall_factor)


def _check_place(report: Path | None, port: int) -> None:
    if report is not None and not report.resolve().parent.is_dir():
        raise UsageError(f"--report {report}: there is no folder {report.resolve().parent}")
    if not 0 <= port <= 65535:
        raise UsageError(f"--port {port}: between 0 and 65535")
    base = jobs.home()
    base.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(base).free
    if free < MIN_FREE_BYTES:
        raise UsageError(
            f"{base} has {free >> 20} MiB left, too little for snapshots and logs; set HOLDFAST_HOME elsewhere"
        )
