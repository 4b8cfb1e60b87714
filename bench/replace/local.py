"""The local engine: a fatal Xid in the kernel log of a node that trains, and a spare in its place."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

from bench.processes import Group
from bench.progress import Progress
from bench.recovery.gate import GateKeeper
from bench.recovery.settings import Settings
from bench.recovery.systems.base import worker_environment
from bench.replace.figures import Failed, Replaced, replaced
from bench.resize import train
from holdfast.engines.client import Announcement, JobClient

NODES = 3
SPARES = 2
"""Of no more nodes than the job has may be acted on within ten minutes, so there are five."""
FAULT = "xid"
LIMIT_S = 90.0


def measure(folder: Path, group: Group, model: str, faults: int, progress: Progress) -> list[Replaced]:
    """Writes so many fatal Xids into the kernel logs of nodes, each when all is well again and the next spare is ready.

    Raises:
        Failed: the job ended badly, or a node was not replaced.
    """
    GateKeeper(folder / "gate")
    settings = Settings(
        events=str(folder / "events"),
        gate=str(folder / "gate"),
        checkpoint=str(folder / "checkpoint"),
        checkpoint_every=5,
        state_mb=0.0,
        replicas=1,
    )
    env = worker_environment(sys.executable) | settings.environment()
    env |= {"HOLDFAST_HOME": str(folder), "BENCH_RESIZE_MODEL": model}
    report, log = folder / "report.json", folder / "holdfast.log"
    argv = [Path(sys.executable).with_name("holdfast"), "run", "--job", "r", "--no-ui", "--wait-for-spare"]
    argv += ["--blast-radius", 1]  # for this benchmark every node may be acted on
    argv += ["--nnodes", NODES, "--spares", SPARES, "--report", report, train.__file__]
    process = group.spawn([*map(str, argv)], env, log)
    job_dir = folder / "jobs" / "r"
    while not (job_dir / "spec.json").exists() and process.poll() is None:
        time.sleep(0.1)
    try:
        for number in range(faults):
            progress(f"Holdfast, local, {model}: fault {number + 1} of {faults}")
            asyncio.run(asyncio.wait_for(_replace(job_dir, number), LIMIT_S))
    except TimeoutError:
        raise Failed(f"no replacement within {LIMIT_S:.0f} s:\n{log.read_text()[-4000:]}") from None
    asyncio.run(_stop(job_dir))
    process.wait(LIMIT_S)
    found = replaced(json.loads(report.read_text()), FAULT)
    if len(found) < faults:
        raise Failed(f"only {len(found)} of {faults} nodes were replaced:\n{log.read_text()[-2000:]}")
    return found


async def _replace(job_dir: Path, number: int) -> None:
    """One fault, from a job at full strength with a spare until it is so again, without the spare."""
    struck = False
    async with JobClient(job_dir) as client:
        async for said in client.watch():
            if said.kind == "status" and not struck:
                workers = said.value.workers
                members = [w.node for w in workers if w.rank is not None]
                if len(members) == NODES and any(w.state == "ready" for w in workers):
                    node = members[number % NODES].removeprefix("node")
                    await client.post("/fault", f"{FAULT}:code=79,node={node}")
                    struck = True
            elif struck and _closed(said):
                return
    raise Failed("the job has ended")


async def _stop(job_dir: Path) -> None:
    async with JobClient(job_dir) as client:
        await client.post("/stop?reason=done")


def _closed(said: Announcement) -> bool:
    """An incident of an injected Xid is over."""
    closed = said.kind == "event" and said.value["kind"] == "incident-closed"
    return closed and str(said.value["fields"]["fault"]).startswith(FAULT)
