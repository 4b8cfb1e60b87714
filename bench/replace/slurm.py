"""A real Slurm on this machine (tests/slurm/cluster.sh): a node that trains loses its power, or a GPU of it falls off its
bus, and another has its place.

Slurm's own way is measured beside it: the same model under torchrun, `--requeue`, a checkpoint every 5 steps. Slurm's
detection is left out of both: it is told of the death at once, and asked to begin the job again at once.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from bench.processes import Group
from bench.progress import Progress
from bench.recovery.events import Commit, CommitReader
from bench.recovery.gate import GateKeeper
from bench.recovery.settings import Settings
from bench.recovery.systems.base import worker_environment
from bench.replace.figures import Failed, Replaced
from bench.resize import train
from holdfast.engines.client import JobClient

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "tests" / "slurm" / "cluster.sh"
NODES, SPARES = 3, 3
NAMES = [f"n{i}" for i in range(1, NODES + SPARES + 1)]
FAULTS = {"xid": "fatal Xid", "power": "power loss"}
LIMIT_S = 90.0
TORCHRUN = """#!/bin/bash
#SBATCH --nodes={nodes} --ntasks-per-node=1 --exclusive --requeue --job-name=torchrun --output={log} --open-mode=append
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --kill-on-bad-exit=1 bash -c 'exec {python} -m torch.distributed.run --nnodes={nodes} --nproc-per-node=1 \\
  --node-rank=$SLURM_NODEID --master-addr='$head' --master-port=29500 {script}'
"""


def begin_cluster() -> None:
    """Runs this benchmark again, within a Slurm. Returns when it does already."""
    if "HOLDFAST_SLURM_DIR" not in os.environ:
        os.execv(CLUSTER, [str(CLUSTER), "with", sys.executable, "-m", "bench.replace", *sys.argv[1:]])


def measure(group: Group, model: str, faults: int, kind: str, progress: Progress) -> list[Replaced]:
    """Holdfast: something happens to a node, a spare of the allocation takes its place, another node becomes the spare.

    Raises:
        Failed: the job ended badly, or a node was not replaced.
    """
    folder, env = _folder(f"holdfast-{kind}")
    env |= {"HOLDFAST_HOME": str(folder), "BENCH_RESIZE_MODEL": model}
    argv = [sys.executable, "-P", "-m", "holdfast.cli", "run", "--engine", "slurm", "--job", "r", "--no-ui"]
    argv += ["--blast-radius", "1"]  # for this benchmark every node may be acted on
    argv += ["--wait-for-spare", "--nnodes", str(NODES), "--spares", str(SPARES), train.__file__]
    log = folder / "holdfast.log"
    process = group.spawn(argv, env, log)
    job_dir, found = folder / "jobs" / "r", []
    try:
        _until(lambda: (job_dir / "coordinator.json").exists(), "the job begins")
        for number in range(faults):
            progress(f"Holdfast on Slurm, {model}: {FAULTS[kind]} {number + 1} of {faults}")
            found.append(asyncio.run(asyncio.wait_for(_replace(job_dir, kind), LIMIT_S)))
        asyncio.run(_stop(job_dir))
        process.wait(LIMIT_S)
    except (TimeoutError, subprocess.TimeoutExpired):
        raise Failed(f"no replacement within {LIMIT_S:.0f} s:\n{log.read_text()[-2000:]}") from None
    finally:
        _slurm("scancel", f"--user={os.getuid()}")
    return found


async def _replace(job_dir: Path, kind: str) -> Replaced:
    """One fault, from a job at full strength with a spare until it is so again, without the spare."""
    struck, at, verdict, stall_s = "", 0.0, 0.0, 0.0
    async with JobClient(job_dir) as client:
        async for said in client.watch():
            if said.kind == "status" and not struck:
                workers = said.value.workers
                members = [w.node for w in workers if w.rank is not None]
                ready = any(w.state == "ready" for w in workers)
                if said.value.phase == "running" and len(members) == NODES and ready:
                    head = (job_dir / "claims" / "1").read_text()
                    struck, at = next(n for n in members if n != head), time.time()
                    if kind == "xid":
                        await client.post("/fault", f"xid:code=79,node={struck}")
                    else:
                        _cluster("kill", struck)
            elif said.kind == "event" and struck:
                fields, when = said.value["fields"], datetime.fromisoformat(said.value["utc"]).timestamp()
                event = said.value["kind"]
                if event == "node-lost" and fields["node"] == struck and when > at and not verdict:
                    verdict = when
                elif event == "incident-resumed" and verdict:
                    stall_s = when - at
                elif event == "incident-closed" and verdict:
                    await asyncio.to_thread(_mend, struck)
                    return Replaced(verdict - at, when - verdict, stall_s)
    raise Failed("the job has ended")


async def _stop(job_dir: Path) -> None:
    async with JobClient(job_dir) as client:
        await client.post("/stop?reason=done")


def measure_requeue(faults: int, progress: Progress) -> list[Replaced]:
    """Slurm's requeue and torchrun: from the verdict, which Slurm is given, to the first commit of every rank.

    Raises:
        Failed: the job did not train again.
    """
    for node in NAMES:
        if not _powered(node):  # it was booted by us, and ended with what we had started
            _mend(node)
    folder, env = _folder("torchrun")
    script = folder / "job.sh"
    log = folder / "job.log"
    ddp = ROOT / "bench" / "recovery" / "train_ddp.py"
    script.write_text(TORCHRUN.format(nodes=NODES, log=log, python=sys.executable, script=ddp))
    id = _slurm("sbatch", "--parsable", str(script), env=env)
    reader, found = CommitReader(folder / "events"), []
    try:
        for number in range(faults):
            progress(f"Slurm's requeue with torchrun: fault {number + 1} of {faults}")
            _all_ranks(reader, _begun(id), log)
            nodes = _slurm(
                "scontrol", "show", "hostnames", _slurm("squeue", "-h", "-j", id, "-o", "%N")
            ).split()
            at = time.monotonic()
            _cluster("kill", nodes[1])
            verdict = time.monotonic()
            _slurm("scontrol", "update", f"nodename={nodes[1]}", "state=down", "reason=bench")
            _until(lambda: _slurm("squeue", "-h", "-j", id, "-o", "%T") == "PENDING", "it is queued again")
            _slurm("scontrol", "update", f"jobid={id}", "starttime=now")
            full = _all_ranks(reader, _begun(id), log)
            found.append(Replaced(verdict - at, full - verdict, full - at))
            _mend(nodes[1])
    finally:
        _slurm("scancel", id)
    return found


def _begun(id: str) -> float:
    _until(lambda: _slurm("squeue", "-h", "-j", id, "-o", "%T") == "RUNNING", "the job runs")
    return time.monotonic()


def _all_ranks(reader: CommitReader, after: float, log: Path) -> float:
    """When the last rank made its first commit after a time."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        first: dict[int, Commit] = {}
        for commit in reader.read():
            if commit.t > after:
                first.setdefault(commit.rank, commit)
        if len(first) == NODES:
            return max(c.t for c in first.values())
        time.sleep(0.1)
    raise Failed(f"torchrun did not train within {LIMIT_S:.0f} s:\n{log.read_text()[-2000:]}")


def _folder(name: str) -> tuple[Path, dict[str, str]]:
    """A folder that all nodes see, and the environment of workers that write their commits there."""
    folder = Path(os.environ["HOLDFAST_SLURM_DIR"]) / "shared" / name
    folder.mkdir()
    GateKeeper(folder / "gate")
    settings = Settings(
        events=str(folder / "events"),
        gate=str(folder / "gate"),
        checkpoint=str(folder / "checkpoint"),
        checkpoint_every=5,
        state_mb=0.0,
        replicas=NODES,
    )
    return folder, dict(worker_environment(sys.executable)) | settings.environment() | _slurm_environment()


def _slurm_environment() -> dict[str, str]:
    return {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "GLOO_SOCKET_IFNAME": "eth0"}


def _cluster(*argv: str) -> None:
    subprocess.run([str(CLUSTER), *argv], check=True, timeout=20)


def _slurm(*argv: str, env: dict[str, str] | None = None) -> str:
    return subprocess.run(
        argv, capture_output=True, text=True, timeout=20, check=False, env=env
    ).stdout.strip()


def _powered(node: str) -> bool:
    switch = Path(os.environ["HOLDFAST_SLURM_DIR"]) / "pid" / f"power-{node}"
    return switch.exists() and Path("/proc", switch.read_text().strip()).exists()


def _mend(node: str) -> None:
    """Another machine has the node's place, and the site lets it in."""

    def started() -> str:
        return _slurm("scontrol", "show", "node", node).partition("SlurmdStartTime=")[2].split()[0]

    before = started()
    _cluster("exchange", node)
    _until(lambda: started() != before, f"Slurm hears of the new {node}")

    def up() -> bool:
        state = _slurm("sinfo", "-h", "-n", node, "-p", "train", "-o", "%T")
        if "down" in state or "drain" in state:
            _slurm("scontrol", "update", f"nodename={node}", "state=resume")
        return state in ("idle", "allocated", "mixed")

    _until(up, f"{node} is up again")


def _until(true: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + LIMIT_S
    while not true():
        if time.monotonic() > end:
            raise Failed(f"not within {LIMIT_S:.0f} s: {what}")
        time.sleep(0.1)
