"""`holdfast run`: launches a training script and keeps it running."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from holdfast.engines.jobs import JobFolder
    from holdfast.observe.live import LiveView
    from holdfast.observe.plain_view import PlainView
    from holdfast.protocol.job import JobSpec

CONTEXT = {"allow_interspersed_args": False, "ignore_unknown_options": False}
EXIT_FAILED = 1
TICK_S = 0.25


def run(
    script: Annotated[str, typer.Argument(help="Training script, or a module's name with -m.")],
    args: Annotated[list[str] | None, typer.Argument(help="Arguments of the script.")] = None,
    nnodes: Annotated[
        str, typer.Option("--nnodes", help="Nodes: N, or MIN:MAX to go on smaller when some are lost.")
    ] = "1",
    nproc_per_node: Annotated[
        str,
        typer.Option(
            "--nproc-per-node", "--nproc_per_node", help="Workers on each node: K, auto, cpu or gpu."
        ),
    ] = "1",
    spares: Annotated[int, typer.Option("--spares", help="Nodes that wait, checked and warm.")] = 0,
    wait_for_spare: Annotated[
        bool, typer.Option("--wait-for-spare", help="Never go on smaller than the target.")
    ] = False,
    engine: Annotated[str, typer.Option("--engine", help="Where nodes come from: local or slurm.")] = "local",
    job: Annotated[str | None, typer.Option("--job", help="Name; the same name goes on from there.")] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module.")] = False,
    preload: Annotated[
        str, typer.Option("--preload", help="Modules that warm processes import ahead of need.")
    ] = "torch",
    fault: Annotated[
        list[str] | None, typer.Option("--fault", help="Inject a fault: KIND[:key=value,...].")
    ] = None,
    checkpoint: Annotated[
        list[str] | None,
        typer.Option(
            "--checkpoint",
            help="Folder or URL for checkpoints: URL[,every=auto|STEPS|10m][,keep=2][,keep-every=STEPS].",
        ),
    ] = None,
    snapshot_every: Annotated[
        str,
        typer.Option("--snapshot-every", help="Copy the state to memory: auto, STEPS, 30s, or 0 for never."),
    ] = "auto",
    copies: Annotated[
        int, typer.Option("--copies", help="Other nodes that keep a copy of each snapshot in memory.")
    ] = 1,
    snapshot_memory: Annotated[
        str,
        typer.Option(
            "--snapshot-memory", help="Of each node, for example 8G; by default half of what is free."
        ),
    ] = "",
    racks: Annotated[
        int,
        typer.Option(
            "--racks",
            help="Local engine: so many racks; no two copies of a snapshot are kept in one of them.",
        ),
    ] = 0,
    data_cache: Annotated[
        str,
        typer.Option("--data-cache", help="Folder of each node for remote data files: DIR[,size=50G]."),
    ] = "",
    health: Annotated[
        bool, typer.Option("--health/--no-health", help="Watch the nodes' hardware and kernel.")
    ] = True,
    health_rules: Annotated[
        list[Path] | None,
        typer.Option("--health-rules", help="Rules (TOML) over the catalogue; can be repeated."),
    ] = None,
    health_dry_run: Annotated[
        list[str] | None,
        typer.Option(
            "--health-dry-run",
            help="RULE on trial, written down and never acted on; * for all; can be repeated.",
        ),
    ] = None,
    node_history: Annotated[
        str,
        typer.Option(
            "--node-history",
            help="Histories of nodes across jobs: a SQLite file or a PostgreSQL URL.",
        ),
    ] = "",
    blast_radius: Annotated[
        str,
        typer.Option("--blast-radius", help="Act on at most this share of the nodes within ten minutes."),
    ] = "25%",
    deep_checks: Annotated[
        bool, typer.Option("--deep-checks", help="Nodes pass the deep checks before they join.")
    ] = False,
    hooks: Annotated[
        Path | None,
        typer.Option(
            "--hooks", help="Folder of scripts on-create, before-join, on-drain, after-job, run on each node."
        ),
    ] = None,
    replace_slow: Annotated[
        float,
        typer.Option(
            "--replace-slow",
            help="Replace a node that computes so many times as long as its peers, when that has cost more "
            "time than a replacement does: for example 1.3. 0: only say so.",
        ),
    ] = 0.0,
    replace_suspect: Annotated[
        bool,
        typer.Option(
            "--replace-suspect/--ask-suspect",
            help="Replace a node whose own part of loss or gradient alone is wrong again and again.",
        ),
    ] = False,
    report: Annotated[Path | None, typer.Option("--report", help="Write the report as JSON.")] = None,
    no_ui: Annotated[bool, typer.Option("--no-ui", help="Plain lines instead of the live view.")] = False,
    max_restarts: Annotated[
        int,
        typer.Option("--max-restarts", "--max_restarts", help="Restarts after faults before giving up."),
    ] = 100,
    detection: Annotated[
        float, typer.Option("--detection", help="A node silent for so many seconds is lost.")
    ] = 2.0,
    stall_factor: Annotated[
        float, typer.Option("--stall-factor", help="A stall is this many median steps (3 s at least).")
    ] = 5.0,
    port: Annotated[int, typer.Option("--port", help="The coordinator's port; 0: any free one.")] = 0,
    partition: Annotated[str, typer.Option("--partition", help="Slurm: the partition.")] = "",
    time: Annotated[str, typer.Option("--time", help="Slurm: the time limit, as Slurm writes it.")] = "",
    account: Annotated[str, typer.Option("--account", help="Slurm: the account.")] = "",
    gpus_per_node: Annotated[int, typer.Option("--gpus-per-node", help="Slurm: GPUs of each node.")] = 0,
    sbatch_arg: Annotated[
        list[str] | None,
        typer.Option("--sbatch-arg", help="Slurm: another option of sbatch's; can be repeated."),
    ] = None,
    requeue: Annotated[
        bool,
        typer.Option("--requeue", help="Slurm: queue again when preempted, out of time or nodes, and go on."),
    ] = False,
    stop_before: Annotated[
        int, typer.Option("--stop-before", help="Slurm: stop in order so many seconds before the time limit.")
    ] = 120,
    replace_command: Annotated[
        str, typer.Option("--replace-command", help="Slurm: run for a bad node, its name appended.")
    ] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Slurm: show the batch script and end.")] = False,
) -> None:
    """Runs a training script on several nodes and keeps it running through failures."""
    from holdfast.cli.health_options import HealthOptions
    from holdfast.cli.spec import Options, plan
    from holdfast.protocol.job import SlurmOptions

    spec = plan(
        Options(
            script=script,
            args=tuple(args or ()),
            nnodes=nnodes,
            nproc_per_node=nproc_per_node,
            spares=spares,
            wait_for_spare=wait_for_spare,
            engine=engine,
            job=job,
            module=module,
            preload=preload,
            faults=tuple(fault or ()),
            report=report,
            max_restarts=max_restarts,
            detection_s=detection,
            stall_factor=stall_factor,
            port=port,
            snapshot_every=snapshot_every,
            copies=copies,
            snapshot_memory=snapshot_memory,
            racks=racks,
            checkpoints=tuple(checkpoint or ()),
            data_cache=data_cache,
            health=HealthOptions(
                watch=health,
                rules=tuple(health_rules or ()),
                dry_run=tuple(health_dry_run or ()),
                history=node_history,
                blast_radius=blast_radius,
                deep=deep_checks,
                hooks=hooks,
                replace_slow=replace_slow,
                replace_suspect=replace_suspect,
            ),
            slurm=SlurmOptions(
                partition,
                time,
                account,
                gpus_per_node,
                tuple(sbatch_arg or ()),
                requeue,
                stop_before,
                replace_command,
            ),
            dry_run=dry_run,
        )
    )
    if dry_run:
        from holdfast.cli.slurm import print_script

        print_script(spec)
        return
    outcome = _run(spec, no_ui, port, report)
    if outcome not in ("finished", "stopped"):
        sys.exit(EXIT_FAILED)


def _run(spec: JobSpec, no_ui: bool, port: int, report: Path | None) -> str | None:
    """Runs the job to its end, shows it and writes its report; returns its outcome."""
    import asyncio

    from holdfast.engines.jobs import JobFolder
    from holdfast.errors import UsageError

    folder = JobFolder(spec.name)
    view = _view(spec, folder.path, no_ui)
    try:
        with view:
            ended = asyncio.run(_launch(spec, folder, view, port))
    except UsageError:
        folder.discard()
        raise
    finally:
        folder.close()
    view.ended(ended)
    if report is not None:
        _write_report(ended, report)
    return ended.get("outcome")


async def _launch(spec: JobSpec, folder: JobFolder, view: LiveView | PlainView, port: int) -> dict[str, Any]:
    import asyncio

    from holdfast.engines.local.launcher import LocalLauncher

    async def tick() -> None:
        while True:
            await asyncio.sleep(TICK_S)
            view.tick()

    ticking = asyncio.create_task(tick())
    try:
        if spec.engine == "slurm":
            from holdfast.cli.slurm import submit_and_follow

            return await submit_and_follow(spec, folder, view)
        return await LocalLauncher(spec, folder, view, port).run()
    finally:
        ticking.cancel()


def _view(spec: JobSpec, job_dir: Path, no_ui: bool) -> LiveView | PlainView:
    """The live view on a terminal; Holdfast's own words go to stderr, the script's to stdout."""
    if not no_ui and sys.stderr.isatty():
        from holdfast.observe.live import LiveView, terminal

        if (console := terminal(sys.stderr)) is not None:
            return LiveView(spec, job_dir, console)
    from holdfast.observe.plain_view import PlainView

    return PlainView(spec, job_dir)


def _write_report(ended: dict[str, Any], path: Path) -> None:
    import msgspec

    shown = {k: v for k, v in ended.items() if k != "blame"}
    path.write_bytes(msgspec.json.format(msgspec.json.encode(shown), indent=1) + b"\n")
