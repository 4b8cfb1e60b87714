"""`python -m bench.checkpoint`: what saving and loading cost, compared with memory, sockets and torch's own functions."""

from __future__ import annotations

import argparse
import glob
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from bench import machine
from bench.checkpoint import reshard
from bench.processes import Children, Group, stop_signals
from bench.progress import Progress
from bench.recovery.analyse import Spread, spread
from bench.recovery.environments import ROOT, Environment, InstallError, create, versions
from bench.recovery.systems.base import worker_environment

HERE = Path(__file__).parent
SECTIONS = ("stall", "first", "slowdown", "transfer", "reshard", "files", "heads")
WIDTH = 100
STEPS = {"wait": "accelerator's", "compute": "all cores busy"}
"""Whose host a kind of step stands for."""

PLAIN = ("sockets 1", "sockets 2", "sockets 4")
"""Sockets as the system makes them: what replication is compared with."""

BEFORE_FIRST_S = 8.0
"""Of computing before a job's first snapshot: a few steps of a model whose state is as large."""

FIRST_SNAPSHOTS = 5
"""Taken by each job; from the third on they are the later ones: there are two slots for a shard."""

MEMORY_PASSES = 8
"""Over a shard: read and write in the copy, into the socket and out of it (6); read for each of two checksums."""

PEERS = {
    "warm memcpy": "warm memcpy (the floor)",
    "holdfast": "hf.checkpoint.save",
    "holdfast overlapped": "hf.checkpoint.save(overlap=True)",
}


DLROVER = Environment(
    "dlrover",
    ("dlrover",),
    lambda environment: environment.pip("install", "dlrover[torch]==0.6.1", "grpcio>=1.60", "protobuf>=4.22"),
)


class Failed(Exception):
    """A section failed. The message is for the user."""


def main() -> int:
    chosen = options()
    console = Console(width=WIDTH)
    if chosen.setup:
        try:
            create(DLROVER)
        except InstallError as error:
            console.print(f"{DLROVER.name}: {error}", style="red", markup=False)
    found = versions(Path(sys.executable), ["torch", "holdfast-train"])
    if DLROVER.trouble() is None:
        found |= versions(DLROVER.python, DLROVER.packages)
    machine.introduce(
        console, found, f"{chosen.ranks} ranks of {chosen.mib} MiB; {chosen.repetitions} repetitions"
    )
    raw: dict[str, Any] = {}
    children, progress, cpu = Children(), Progress(), machine.ForeignCpu()
    failed = False
    with stop_signals(), cpu, children, tempfile.TemporaryDirectory(prefix="bench-checkpoint-") as scratch:
        for section in chosen.sections:
            try:
                with children.group() as processes:
                    lines = RUN[section](processes, chosen, Path(scratch), progress)
            except Failed as error:
                console.print(f"{section}: {error}", style="red", markup=False)
                failed = True
                continue
            raw[section] = lines
            for table, note in SHOW[section](lines):
                console.print(table)
                console.print(note, style="dim")
    machine.conclude(console, cpu)
    if chosen.json:
        chosen.json.write_text(json.dumps({"machine": asdict(machine.describe()) | found, "raw": raw}))
    return 1 if failed else 0


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.checkpoint", description=__doc__)
    parser.add_argument(
        "--sections",
        default=",".join(SECTIONS),
        help=f"comma-separated: {', '.join(SECTIONS)} (default: all)",
    )
    parser.add_argument("--mib", type=int, default=1024, help="state of every rank in MiB (default: 1024)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--setup", action="store_true", help="install DLRover into an environment of its own")
    parser.add_argument(
        "--timeout-s", type=float, default=1200.0, help="limit for one section (default: 1200)"
    )
    parser.add_argument("--json", type=Path, help="write every measurement to this file")
    chosen = parser.parse_args(arguments)
    chosen.sections = chosen.sections.split(",")
    unknown = set(chosen.sections) - set(SECTIONS)
    if unknown:
        parser.error(f"there is no section {unknown.pop()!r}; there are: {', '.join(SECTIONS)}")
    return chosen


# ---------------------------------------------------------------- running


def _under_holdfast(
    processes: Group,
    script: str,
    chosen: argparse.Namespace,
    scratch: Path,
    progress: Progress,
    *extra: str,
    job: str = "",
) -> list[dict[str, Any]]:
    """Runs a script on every rank, each on its own node. Returns the lines that they wrote and the memory used. job: its
    name, by default the script's."""
    output, home = scratch / f"{script}.out", scratch / "home"
    for old in scratch.glob(f"{script}.out-*"):
        old.unlink()
    argv = [
        sys.executable,
        "-m",
        "holdfast.cli",
        "run",
        "--job",
        job or script,
        "--no-ui",
        "--nnodes",
        str(chosen.ranks),
    ]
    argv += [str(HERE / f"{script}.py"), "--mib", str(chosen.mib), "--output", str(output), *extra]
    log = ROOT / "out" / "checkpoint" / f"{script}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    process = processes.spawn(argv, worker_environment(sys.executable) | {"HOLDFAST_HOME": str(home)}, log)
    most = 0
    deadline = time.monotonic() + chosen.timeout_s
    while process.poll() is None:
        if time.monotonic() > deadline:
            raise Failed(f"not done within {chosen.timeout_s:.0f} s; log {log}")
        progress(f"{script}: {_last_line(log)}")
        most = max(most, _slot_bytes(home))
        time.sleep(0.2)
    if process.returncode:
        raise Failed(f"ended with {process.returncode}; log {log}")
    lines = [
        json.loads(line) for path in scratch.glob(f"{script}.out-*") for line in path.read_text().splitlines()
    ]
    return [*lines, {"slot_bytes": most, "state_bytes": chosen.ranks * chosen.mib << 20}]


def _slot_bytes(home: Path) -> int:
    """What the job's slots take just now, on all its nodes."""
    identities = {p.parent.name + "-" + p.read_text() for p in home.glob("jobs/*/identity")}
    total = 0
    # Path.glob raises where a folder goes meanwhile, and other jobs on this machine have theirs beside ours.
    for folder in map(Path, glob.glob("/dev/shm/holdfast-*/*/*")):
        if folder.name in identities:
            for slot in folder.glob("*/*.slot"):
                try:
                    total += slot.stat().st_blocks * 512
                except FileNotFoundError:
                    continue
    return total


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return lines[-1][:60] if lines else "starting"


def run_stall(
    processes: Group, chosen: argparse.Namespace, scratch: Path, progress: Progress
) -> list[dict[str, Any]]:
    folder = scratch / "peers"
    folder.mkdir()
    extra = ("--repetitions", str(chosen.repetitions), "--folder", str(folder))
    lines = _under_holdfast(processes, "stall", chosen, scratch, progress, *extra)
    if DLROVER.trouble() is None:
        lines += _flash(processes, chosen, scratch, progress)
    return lines


def _flash(
    processes: Group, chosen: argparse.Namespace, scratch: Path, progress: Progress
) -> list[dict[str, Any]]:
    """DLRover's own processes, right after ours."""
    output, log = scratch / "flash.out", ROOT / "out" / "checkpoint" / "flash.log"
    argv = [str(DLROVER.python), "-m", "torch.distributed.run", "--rdzv-backend", "c10d"]
    argv += [
        "--rdzv-endpoint",
        "localhost:0",
        "--rdzv-id",
        scratch.name,
        "--nproc-per-node",
        str(chosen.ranks),
        str(HERE / "flash.py"),
        "--mib",
        str(chosen.mib),
    ]
    argv += ["--repetitions", str(chosen.repetitions), "--folder", str(scratch / "flash")]
    environment = worker_environment(DLROVER.python)
    log.unlink(missing_ok=True)
    process = processes.spawn([*argv, "--output", str(output)], environment, log)
    deadline = time.monotonic() + chosen.timeout_s
    while process.poll() is None:
        if time.monotonic() > deadline:
            raise Failed(f"DLRover was not done within {chosen.timeout_s:.0f} s; log {log}")
        progress("stall: DLRover Flash Checkpoint")
        time.sleep(0.2)
    for left in Path("/dev/shm").glob(f"{scratch.name}_ckpt_shm_*"):
        left.unlink()  # it stays for a restarted job
    if process.returncode:
        raise Failed(f"DLRover ended with {process.returncode}; log {log}")
    return [json.loads(x) for path in scratch.glob("flash.out-*") for x in path.read_text().splitlines()]


def run_first(
    processes: Group, chosen: argparse.Namespace, scratch: Path, progress: Progress
) -> list[dict[str, Any]]:
    """Several jobs, because each has only one first snapshot; in turn with and without a size that is known ahead."""
    common = ("--only", "holdfast", "--warm-up", "0", "--repetitions", str(FIRST_SNAPSHOTS))
    common += ("--before-s", str(BEFORE_FIRST_S), "--folder", str(scratch))
    results = []
    for repetition in range(chosen.repetitions):
        for known in (True, False):
            job = f"first-{repetition}-{'known' if known else 'unknown'}"
            extra = (*common, "--load") if known else common
            lines = _under_holdfast(processes, "stall", chosen, scratch, progress, *extra, job=job)
            results += [x | {"known": known, "job": job} for x in lines if "method" in x]
    return results


def run_slowdown(
    processes: Group, chosen: argparse.Namespace, scratch: Path, progress: Progress
) -> list[dict[str, Any]]:
    return _under_holdfast(
        processes, "slowdown", chosen, scratch, progress, "--blocks", str(chosen.repetitions)
    )


def run_transfer(
    processes: Group, chosen: argparse.Namespace, scratch: Path, progress: Progress
) -> list[dict[str, Any]]:
    progress("transfer: plain sockets, replication, recovery")
    return _lines_of("bench.checkpoint.streams", chosen, "--mib", str(chosen.mib))


def _lines_of(module: str, chosen: argparse.Namespace, *options: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", module, "--repetitions", str(chosen.repetitions), *options]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=chosen.timeout_s
    )
    if done.returncode:
        raise Failed(done.stderr.strip().splitlines()[-1] if done.stderr else "it failed")
    return [json.loads(line) for line in done.stdout.splitlines()]


def run_reshard(
    processes: Group, chosen: argparse.Namespace, scratch: Path, progress: Progress
) -> list[dict[str, Any]]:
    results = []
    for savers, readers in ((4, 3), (2, 8)):
        progress(f"reshard: {savers} to {readers} ranks")
        results.append(asdict(reshard.measure(chosen.mib, savers, readers)))
    return results


def run_files(
    processes: Group, chosen: argparse.Namespace, scratch: Path, progress: Progress
) -> list[dict[str, Any]]:
    """With one rank, and with several."""
    results = []
    for ranks in (1, chosen.ranks):
        output, log = scratch / f"files-{ranks}.out", ROOT / "out" / "checkpoint" / "files.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        argv += ["-m", "bench.checkpoint.files", "--mib", str(chosen.mib), "--output", str(output)]
        argv += ["--repetitions", str(chosen.repetitions), "--folder", str(scratch / "files")]
        process = processes.spawn(argv, worker_environment(sys.executable), log)
        deadline = time.monotonic() + chosen.timeout_s
        while process.poll() is None:
            if time.monotonic() > deadline:
                raise Failed(f"not done within {chosen.timeout_s:.0f} s; log {log}")
            progress(f"files: {ranks} ranks")
            time.sleep(0.2)
        if process.returncode:
            raise Failed(f"ended with {process.returncode}; log {log}")
        results += [json.loads(x) for x in Path(f"{output}-0").read_text().splitlines()]
    return results


def run_heads(
    processes: Group, chosen: argparse.Namespace, scratch: Path, progress: Progress
) -> list[dict[str, Any]]:
    progress("heads: of 10,000 tensors")
    return _lines_of("bench.checkpoint.heads", chosen)


RUN = {
    "stall": run_stall,
    "first": run_first,
    "slowdown": run_slowdown,
    "transfer": run_transfer,
    "reshard": run_reshard,
    "files": run_files,
    "heads": run_heads,
}


# ---------------------------------------------------------------- showing

Shown = Iterable[tuple[Table, str]]


def show_stall(lines: list[dict[str, Any]]) -> Shown:
    measured = [x for x in lines if "method" in x and x["repetition"] >= 0]
    slowest: dict[str, list[float]] = {}
    complete: dict[str, list[float]] = {}
    for method in dict.fromkeys(x["method"] for x in measured):
        ranks: dict[int, list[dict[str, Any]]] = {}
        for x in measured:
            if x["method"] == method:
                ranks.setdefault(x["rank"], []).append(x)
        slowest[method] = [max(x["stall_s"] for x in same) for same in zip(*ranks.values(), strict=True)]
        ends = [[x["complete_s"] for x in same] for same in zip(*ranks.values(), strict=True)]
        complete[method] = [max(e) for e in ends if None not in e]
    floor = spread(slowest["warm memcpy"])
    table = _table("Stall of the training loop", ("way to save", "stall", "of memcpy", "complete after"))
    for method, values in slowest.items():
        taken = spread(v for v in values if v == v)  # a snapshot that was skipped has no figure
        share = f"{taken.median / floor.median:.2f}" if taken and floor else "–"
        table.add_row(PEERS.get(method, method), _cell(taken), share, _cell(spread(complete[method])))
    memory = next(x for x in lines if "slot_bytes" in x)
    first: dict[int, float] = {}
    for x in lines:
        if x.get("method") == "holdfast" and x["repetition"] < 0:
            first[x["repetition"]] = max(first.get(x["repetition"], 0.0), x["stall_s"])
    beginnings = ", ".join(f"{first[r]:.2f}" for r in sorted(first))
    yield (
        table,
        "Stall: until the state may be changed again, of the slowest rank; median (min–max). Complete: in two nodes' "
        "memory for Holdfast, in the page cache for the others. The overlapped one copies beside a computation of "
        f"0.5 s; its stall is the call and the wait afterwards. Slots took {memory['slot_bytes'] / memory['state_bytes']:.2f} "
        "times the state at most, on all nodes: two copies of every shard, of two snapshots, are 4. "
        f"The first snapshots of all, whose memory was brought in, stood still for {beginnings} s.",
    )


def show_first(lines: list[dict[str, Any]]) -> Shown:
    table = _table("The first snapshots of a job", ("snapshot", "size known ahead", "not known"))
    slowest: dict[tuple[bool, str, int], float] = {}
    for x in lines:
        key = x["known"], x["job"], x["repetition"]
        slowest[key] = max(slowest.get(key, 0.0), x["stall_s"])
    for name, numbers in (("first", (0,)), ("second", (1,)), ("later", range(2, FIRST_SNAPSHOTS))):
        cells = [
            _cell(spread(s for (k, _, number), s in slowest.items() if k is known and number in numbers))
            for known in (True, False)
        ]
        table.add_row(name, *cells)
    yield (
        table,
        "Stall of the slowest rank; median (min–max) over jobs, with and without in turn. Known: the script gave its state "
        f"to hf.checkpoint.load at its start, as scripts do, {BEFORE_FIRST_S:g} s of computing before its first save.",
    )


def show_slowdown(lines: list[dict[str, Any]]) -> Shown:
    blocks = [x for x in lines if "saves" in x]
    copies = [x for x in lines if "memcpy_s" in x]
    cores = len(os.sched_getaffinity(0))
    moved_s = MEMORY_PASSES / 2 * sum(x["memcpy_s"] for x in copies) / copies[0]["every"]
    columns = ("host", "a step without, s", "with, s", "of without", "memory's floor", "processor's")
    table = _table("Training beside snapshots, one every 10 steps", columns)
    used = []
    for kind in dict.fromkeys(x["kind"] for x in blocks):
        same = [x for x in blocks if x["kind"] == kind]
        by_saves = {
            saves: spread(x["step_s"] for x in same if x["rank"] == 0 and x["saves"] is saves)
            for saves in (True, False)
        }
        on, off = by_saves[True], by_saves[False]
        if on is None or off is None:
            continue
        extra_s = _extra_cpu_s(same)
        used.append(extra_s * copies[0]["every"] / len(copies))
        busy = kind == "compute"
        floors = [f"{1 + x / cores / off.median:.3f}" if busy else "1" for x in (moved_s, extra_s)]
        table.add_row(STEPS[kind], _cell(off), _cell(on), f"{on.median / off.median:.3f}", *floors)
    saved = sum(x["saved"] for x in blocks if x["rank"] == 0)
    yield (
        table,
        f"Blocks of 20 steps, in turn, in the same processes; {saved} snapshots were taken by rank 0. Where the host "
        "only waits for an accelerator (a timer stands in), the goal is 1.05. On a host that computes on all cores "
        "all that is done beside is taken from training, and no goal below the floor can be met: "
        "the memory's floor is a copy of every shard, its way through two sockets and two checksums "
        f"({MEMORY_PASSES} times its bytes read or written) at the speed of a memcpy; the processor's is "
        f"what workers and agents really used: {', '.join(f'{x:.2f}' for x in used)} s for every shard and snapshot.",
    )


def _extra_cpu_s(blocks: list[dict[str, Any]]) -> float:
    """Processor seconds for every step that workers and agents used more with snapshots, over all ranks."""
    by_saves = [
        sum(
            statistics.median(
                x["cpu_s"] / x["steps"] for x in blocks if x["rank"] == rank and x["saves"] is saves
            )
            for rank in {x["rank"] for x in blocks}
        )
        for saves in (True, False)
    ]
    return by_saves[0] - by_saves[1]


def show_transfer(lines: list[dict[str, Any]]) -> Shown:
    ways: dict[str, list[float]] = {}
    for x in lines:
        ways.setdefault(x["way"], []).append(x["took_s"])
    nbytes = lines[0]["nbytes"]
    medians = {way: spread(values) for way, values in ways.items()}
    best = min(s.median for way, s in medians.items() if way in PLAIN and s)
    table = _table("One shard from a peer's memory", ("way", "time", "GB/s", "of the fastest sockets"))
    for way, taken in medians.items():
        assert taken is not None
        speed = f"{nbytes / taken.median / 1e9:.2f}"
        table.add_row(way, _cell(taken), speed, f"{best / taken.median:.0%}")
    yield (
        table,
        "sockets N: the same bytes over N plain connections, nothing checked; not paced: set as Holdfast sets its own. "
        "replicate: into a slot, every checksum verified. recover: into live tensors, from the loss on. dcp.load: of "
        "the same state from the page cache.",
    )


def show_reshard(lines: list[dict[str, Any]]) -> Shown:
    table = _table(
        "Loading into another world size", ("ranks", "bytes needed", "bytes fetched", "more than needed")
    )
    for x in lines:
        more = x["fetched"] / x["needed"] - 1
        table.add_row(
            f"{x['savers']} to {x['readers']}", f"{x['needed']:,}", f"{x['fetched']:,}", f"{more:.1%}"
        )
    yield table, "Tensors cut along their first dimension, as FSDP2 cuts them; over all readers."


def show_files(lines: list[dict[str, Any]]) -> Shown:
    columns = ("ranks", "files", "write, s", "of bare", "its CPU", "read, s", "of bare", "its CPU")
    table = _table("A state as files", columns)
    by_way: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for x in lines:
        by_way.setdefault((x["world"], x["way"]), []).append(x)
    for (world, way), same in by_way.items():
        cells = []
        for what in ("write_s", "read_s"):
            # Of the same repetition, because a disk is faster at one time than at another.
            bare = by_way[world, "bare"]
            pairs = list(zip(same, bare, strict=True))
            ratios = [
                statistics.median(x[key] / y[key] for x, y in pairs) for key in (what, f"{what[:-2]}_cpu_s")
            ]
            cells += [_cell(spread(x[what] for x in same), 2), *(f"{ratio:.2f}" for ratio in ratios)]
        table.add_row(str(world), way, *cells)
    yield (
        table,
        "Of all ranks together; median (min–max), ratios of the same repetition. Written with fsync, read from the page "
        "cache into tensors. The first two have checksums, which are verified as they are read; bare files are the "
        "tensors' bytes without a header. Its CPU: the processor time of rank 0, of that of bare files.",
    )


def show_heads(lines: list[dict[str, Any]]) -> Shown:
    table = _table("A head", ("format", "MB", "of checksums", "write, ms", "read, ms"))
    for x in lines:
        sizes = (f"{x[key] / 1e6:.1f}" for key in ("nbytes", "sums_bytes"))
        table.add_row(x["format"], *sizes, f"{x['write_ms']:.0f}", f"{x['read_ms']:.0f}")
    yield (
        table,
        "Of 10 GiB in 10,000 tensors, half of them small; medians of one core's time, in a process without torch.",
    )


SHOW = {
    "stall": show_stall,
    "first": show_first,
    "slowdown": show_slowdown,
    "transfer": show_transfer,
    "reshard": show_reshard,
    "files": show_files,
    "heads": show_heads,
}


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    return table


def _cell(taken: Spread | None, digits: int = 3) -> str:
    if taken is None:
        return "–"
    return f"{taken.median:.{digits}f} ({taken.low:.{digits}f}–{taken.high:.{digits}f})"


if __name__ == "__main__":
    sys.exit(main())
