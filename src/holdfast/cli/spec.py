"""Makes a job's specification of the options of `holdfast run`, and checks everything before anything starts."""

from __future__ import annotations

import ast
import dataclasses
import os
import re
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec

from holdfast import logs
from holdfast.agent.hooks import check_hooks
from holdfast.checkpoint.policy import parse_cadence
from holdfast.checkpoint.tier import open_tier, parse_tier
from holdfast.cli.options import given_flags
from holdfast.cli.script_source import importable, read_script, set_before_import
from holdfast.data.cache import absolute_cache
from holdfast.engines import jobs
from holdfast.engines.base import Engine, KnownNodes, engine_named
from holdfast.engines.run_options import NodeOptions, RunOptions, SaveOptions
from holdfast.engines.topology import read_topology
from holdfast.errors import TierError, UsageError
from holdfast.health.ruleset import load_rules
from holdfast.health.stragglers import SLOWER
from holdfast.protocol.faults import FaultSpec, check_watched, parse_fault
from holdfast.protocol.job import JobSpec, tree_fan_out
from holdfast.protocol.job_options import HealthSpec
from holdfast.protocol.machine.processes import text_of
from holdfast.protocol.place import PLACE_VARIABLE, NodePlace, parse_place
from holdfast.protocol.snapshots import DurableTier, Saving
from holdfast.protocol.units import parse_share, parse_size

MIN_FREE_BYTES = 256 << 20
LEAST_LOG_LIMIT = 16 << 20
HOST = "127.0.0.1"


def plan(given: RunOptions) -> JobSpec:
    """The job that is asked for.

    Raises:
        UsageError: something in it cannot work; nothing was started or written.
    """
    engine = check_engine(given)
    own = given.engines.get(given.engine, engine.options() if engine.options is not None else None)
    known, spares = engine.nodes(own), given.nodes.spares
    low, high = parse_nnodes(given.nodes.nnodes or str(max(1, (known.count or 0) - spares)))
    if known.place and not given.nodes.nproc_per_node.isdecimal():
        raise UsageError(
            f"--nproc-per-node {given.nodes.nproc_per_node} counts the devices of this machine, but the nodes are "
            f"{known.place}; specify a number"
        )
    nproc = parse_nproc(given.nodes.nproc_per_node, known.gpus)
    faults = tuple(_fault(text, high, nproc, spares) for text in given.failures.faults)
    for fault in faults:
        check_watched(fault, given.health.watch)
    check_replay(given.health.replay, low * nproc)
    source = read_script(given.script, given.module)
    name = jobs.check_name(given.job) if given.job else jobs.default_name(given.script)
    spec = JobSpec(
        name=name,
        script=given.script,  # as it was given: the script finds it in sys.argv
        args=tuple(map(text_of, given.args)),
        module=given.module,
        min_nodes=low,
        max_nodes=high,
        nproc=nproc,
        spares=spares,
        wait_for_spare=given.nodes.wait_for_spare,
        engine=given.engine,
        preload=_preload(given, source),
        faults=faults,
        max_restarts=given.failures.max_restarts,
        cwd=str(Path.cwd()),
        timing=given.failures.timing,
        racks=given.nodes.racks,
        places=plan_places(given.nodes, known),
        saving=plan_saving(given.save, jobs.job_dir(name) / "checkpoint"),
        data_cache=absolute_cache(given.save.data_cache) if given.save.data_cache else "",
        health=plan_health(given.health),
        log_limit=parse_log_limit(given.log_limit),
        log=_log(given.log_level),
    )
    spec = engine.plan(spec, own)
    check_text(spec)
    check_report(given.report)
    tree_fan_out(os.environ)
    # Last, because these two look at things that change by themselves. The coordinator reports a port that another
    # program takes between here and its start.
    _check_port(given.port)
    _check_disk(jobs.home())
    return spec


def plan_health(given: HealthSpec) -> HealthSpec:
    """With paths that hold everywhere. Raises UsageError for what cannot work; nothing is written."""
    if not given.watch and (given.rules or given.dry_run):
        raise UsageError(
            "--no-health turns all health rules off, so --health-rules and --health-dry-run would have no effect; "
            "remove either --no-health or these options"
        )
    rules = tuple(str(Path(path).resolve()) for path in given.rules)
    if rules or given.dry_run:
        load_rules(rules, given.dry_run)
    if given.hooks:
        check_hooks(Path(given.hooks))
    if given.replace_slow and given.replace_slow < SLOWER:
        raise UsageError(
            f"--replace-slow must be 0 (only report) or at least {SLOWER:g}, below which a slow rank cannot be told "
            f"from noise (got {given.replace_slow:g}), for example 1.3"
        )
    parse_share("--blast-radius", given.blast_radius)
    hooks = str(Path(given.hooks).resolve()) if given.hooks else ""
    return dataclasses.replace(given, rules=rules, history=_history(given.history), hooks=hooks)


def _history(text: str) -> str:
    """A PostgreSQL URL as it is; a file as an absolute path, in a folder that can be written."""
    if not text:
        return ""
    # A URL may hold a password, so a message shows its scheme and nothing else of it.
    scheme, separator, _ = text.partition("://")
    if separator:
        if scheme not in ("postgresql", "postgres"):
            raise UsageError(
                f"--node-history {scheme}://...: must be a file, or a URL like postgresql://USER@HOST/DATABASE"
            )
        return text
    path = Path(text).resolve()
    if path.is_dir():
        raise UsageError(
            f"--node-history {text}: this is a folder; specify a file in it, for example health.sqlite"
        )
    if not path.parent.is_dir():
        raise UsageError(f"--node-history {text}: the folder {path.parent} does not exist")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"--node-history {text}: the file cannot be written")
    return str(path)


def plan_saving(given: SaveOptions, default: Path) -> Saving:
    """What is to be saved, how often and where.

    Args:
        default: the durable tier when none is named.

    Raises:
        UsageError: an option that cannot work; a tier that cannot be written.
    """
    _cadence("--snapshot-every", given.snapshots.every)
    # There is always a durable tier: what is only in memory is lost with the machines, and nobody should
    # learn of that afterwards.
    tiers = tuple(_tier(text) for text in given.checkpoints) or (DurableTier(str(default)),)
    # Two tiers of one URL would prune each other's checkpoints, each by its own retention.
    if len({t.url for t in tiers}) < len(tiers):
        raise UsageError(f"--checkpoint: the same place is given twice: {', '.join(t.url for t in tiers)}")
    # The default tier is not tried: its folder is the job's own, which does not exist before the job starts.
    for tier in tiers if given.checkpoints else ():
        try:
            open_tier(tier.url).check()
        except TierError as error:
            raise UsageError(f"--checkpoint {tier.url}: {error}") from error
    memory = parse_size("--snapshot-memory", given.snapshot_memory) if given.snapshot_memory else 0
    return Saving(given.snapshots, memory, tiers)


def _tier(text: str) -> DurableTier:
    try:
        return parse_tier(text)
    except UsageError as error:
        raise UsageError(f"--checkpoint {error}") from error


def _cadence(option: str, text: str) -> None:
    try:
        parse_cadence(text)
    except UsageError as error:
        raise UsageError(f"{option}: {error}") from error


def plan_places(given: NodeOptions, known: KnownNodes) -> dict[str, NodePlace]:
    """Node to its place, of the topology file.

    Raises:
        UsageError: the file or the variable cannot be read, or says nothing about this job's nodes.
    """
    try:
        parse_place(os.environ.get(PLACE_VARIABLE, ""))
    except ValueError as error:
        raise UsageError(f"{PLACE_VARIABLE}: {error}") from None
    if given.topology is None:
        return {}
    if given.racks:
        raise UsageError("--racks and --topology both give the locations of nodes; pass only one of them")
    found = read_topology(given.topology)
    # A file of the whole site may have thousands of hosts: the job's specification gets those that may be its own.
    ours = {name: place for name, place in found.items() if re.fullmatch(known.names, name)}
    if not ours:
        raise UsageError(
            f"--topology {given.topology}: the file does not name any of this job's nodes{f', which are {known.examples}' if known.examples else ''}"
        )
    return ours


def check_text(spec: object) -> None:
    """Refuses what no file of the job could hold. Raises UsageError."""
    try:
        msgspec.json.encode(spec)
    except UnicodeEncodeError as error:
        name = os.fsencode(error.object)
        raise UsageError(
            f"{name!r} is not valid UTF-8; options and the names of folders and scripts must be: rename it"
        ) from error


def _log(given: str) -> str:
    """The option's value, else that of the variable in this command's environment: a node may have another one."""
    text = given or os.environ.get(logs.VARIABLE, "")
    logs.parse_settings(text, "--log-level" if given else logs.VARIABLE)
    return text


def parse_log_limit(text: str) -> int:
    """`1G` in bytes. Raises UsageError."""
    limit = parse_size("--log-limit", text)
    if limit < LEAST_LOG_LIMIT:
        raise UsageError(
            f"--log-limit must be at least {LEAST_LOG_LIMIT >> 20}M (got {text!r}), because old output is deleted in "
            "pieces of megabytes"
        )
    return limit


def parse_nnodes(text: str) -> tuple[int, int]:
    """`4` or `2:4` as (min, max). Raises UsageError."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    if match is None:
        raise UsageError(f"--nnodes must be a number or MIN:MAX (got {text!r}), for example 4 or 2:4")
    low = int(match[1])
    high = int(match[2]) if match[2] else low
    if low < 1 or high < low:
        raise UsageError(
            f"--nnodes {text!r}: MIN must be at least 1, and MAX must not be less than MIN, for example 2:4"
        )
    return low, high


def check_replay(text: str, workers: int) -> None:
    """Takes `1/1000`, and nothing. workers: that the job has at least. Raises UsageError."""
    if not text:
        return
    match = re.fullmatch(r"1/(\d{1,7})", text)
    if match is None or not int(match[1]):
        raise UsageError(
            f"--replay must be 1/N, one step in N, with N from 1 to 9999999 (got {text!r}), for example 1/1000"
        )
    if workers < 2:
        raise UsageError(
            f"--replay {text} needs at least two workers, because another worker computes the micro-batch again; use "
            "more workers, or remove --replay"
        )


def parse_nproc(text: str, gpus_per_node: int = 0) -> int:
    """A number, or as with torchrun `cpu` (cores), `gpu` or `auto` (GPUs if there are any, else cores). gpus_per_node:
    of nodes that are not this one."""
    if gpus_per_node and text in ("auto", "gpu"):
        return gpus_per_node
    if text in ("auto", "cpu", "gpu"):
        # Counted in /dev and not asked of torch, whose import takes longer than everything else that this
        # command does before the job starts.
        gpus = sum(1 for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))
        if text == "gpu" and not gpus:
            raise UsageError("--nproc-per-node gpu: this machine has no NVIDIA GPU; specify a number")
        return gpus if gpus and text != "cpu" else len(os.sched_getaffinity(0))
    if not re.fullmatch(r"\d+", text) or int(text) < 1:
        raise UsageError(
            f"--nproc-per-node must be the number of workers per node, at least 1, or auto, cpu or gpu (got {text!r})"
        )
    return int(text)


def check_engine(given: RunOptions) -> Engine:
    """The engine that is asked for. An option that it would ignore is refused: whoever gives it expects something of it.

    Raises:
        UsageError: there is no such engine, or an option belongs to another one.
    """
    engine = engine_named(given.engine)
    # Compared with the defaults, so an option that is added to a dataclass is checked here without a line of its own.
    owners: dict[type[Any], str] = {}
    for name, options in given.engines.items():
        kind = type(options)
        if owners.setdefault(kind, name) != name:
            continue
        flags = given_flags(options, kind())
        if kind is engine.options:
            flags = tuple(flag for flag in flags if engine.heeds and flag not in engine.heeds)
        _refuse(flags, f"--engine {name}")
    return engine


def _refuse(options: tuple[str, ...], engine: str) -> None:
    if options:
        raise UsageError(f"{', '.join(options)} {'needs' if len(options) == 1 else 'need'} {engine}")


def _fault(text: str, nodes: int, nproc: int, spares: int) -> FaultSpec:
    spec = parse_fault(text)
    if spec.rank is not None and spec.rank >= nodes * nproc:
        raise UsageError(
            f"--fault {text!r}: there is no rank {spec.rank}; the ranks are 0 to {nodes * nproc - 1}"
        )
    if isinstance(spec.node, int) and spec.node >= nodes + spares:
        raise UsageError(
            f"--fault {text!r}: there is no node {spec.node}; the nodes are 0 to {nodes + spares - 1}"
        )
    return spec


def _preload(given: RunOptions, source: ast.Module | None) -> tuple[str, ...]:
    names = _modules(given.preload)
    if not names or source is None or not (early := set_before_import(source)):
        return names
    name, line = early
    sys.stderr.write(
        f"[holdfast] {given.script}, line {line}: {name} is read when torch is imported, so torch is not imported in "
        "advance, and workers start some seconds later; to avoid that, set the variable in the environment of "
        "`holdfast run` instead of in the script\n"
    )
    return ()


def _modules(text: str) -> tuple[str, ...]:
    names = tuple(filter(None, (part.strip() for part in text.split(","))))
    for name in names:
        if not importable(name):
            raise UsageError(f"--preload {text!r}: the module {name!r} was not found in this environment")
    return names


def check_report(report: Path | None) -> None:
    """Raises UsageError where it cannot be written."""
    if report is None:
        return
    folder = report.resolve().parent
    if not folder.is_dir():
        raise UsageError(f"--report {report}: the folder {folder} does not exist")
    if report.is_dir():
        raise UsageError(
            f"--report {report}: this is a folder; specify a file in it, for example report.json"
        )
    if not os.access(report if report.exists() else folder, os.W_OK):
        raise UsageError(f"--report {report}: the file cannot be written")


def _check_port(port: int) -> None:
    if not 0 <= port <= 65535:
        raise UsageError(f"--port must be between 0 and 65535 (got {port}); 0 takes any free port")
    try:
        socket.create_server((HOST, port)).close()
    except PermissionError:
        raise UsageError(
            f"--port {port}: ports below 1024 are reserved for the system; choose a higher one"
        ) from None
    except OSError:
        raise UsageError(f"--port {port} is in use; choose another port, or remove --port") from None


def _check_disk(base: Path) -> None:
    there = next(folder for folder in (base, *base.resolve().parents) if folder.is_dir())
    if not os.access(there, os.W_OK):
        raise UsageError(f"{base} cannot be written; set HOLDFAST_HOME to a folder that can be written")
    free = shutil.disk_usage(there).free
    if free < MIN_FREE_BYTES:
        raise UsageError(
            f"{base} has only {free >> 20} MiB left, too little for checkpoints and logs; set HOLDFAST_HOME to a "
            "folder on another disk"
        )
