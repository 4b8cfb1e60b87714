"""A real Kubernetes on this machine (tests/kubernetes/cluster.sh): from a job's object to its first step, and from the power
loss of a node that trains to full strength on a spare.

The object is applied as `kubectl apply` does. The operator is there, and the image is on every node: nothing is pulled.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from bench.progress import Progress
from bench.replace.figures import Failed, Replaced
from holdfast.engines import jobs
from holdfast.engines.jobs import Allocation
from holdfast.engines.reach import client_of

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests" / "kubernetes"
CLUSTER = TESTS / "cluster.sh"
SCRIPT = Path(__file__).with_name("train_alone.py")
NODES, SPARES = 2, 1
LIMIT_S = 240.0
"""For each start and each replacement, on a machine that may be busy."""


def begin_cluster() -> None:
    """Runs this benchmark again, beside a Kubernetes. Returns when it does already."""
    if "HOLDFAST_KUBE_DIR" not in os.environ:
        os.environ.setdefault("PYTHON", sys.executable)
        os.execv(CLUSTER, [str(CLUSTER), "with", sys.executable, "-m", "bench.replace", *sys.argv[1:]])
    # The tests know how the operator is installed in that cluster.
    sys.path.insert(0, str(TESTS))


def measure(starts: int, faults: int, progress: Progress) -> tuple[list[float], list[Replaced]]:
    """Seconds from the object to the first step, of so many jobs, and the replacements within the last one.

    Raises:
        Failed: a job did not start, or a node was not replaced.
    """
    with tempfile.TemporaryDirectory(prefix="bench-kube-") as home:
        os.environ["HOLDFAST_HOME"] = home
        try:
            return asyncio.run(_measure(Path(home), starts, faults, progress))
        except TimeoutError:
            raise Failed(f"not within {LIMIT_S:.0f} s on Kubernetes") from None


async def _measure(
    home: Path, starts: int, faults: int, progress: Progress
) -> tuple[list[float], list[Replaced]]:
    import realkube

    started, found = [], []
    async with realkube.reached() as api:
        await realkube.install(api)
        # Ready, and leading: a start waits for no operator.
        await realkube.mend(api)
        for number in range(starts):
            progress(f"Holdfast on Kubernetes: start {number + 1} of {starts}")
            name = f"bench{number}"
            at = await _apply(api, home, name)
            try:
                started.append(await _heard(home, name, _first_step) - at)
                if number == starts - 1:
                    for fault in range(faults):
                        progress(f"Holdfast on Kubernetes: power loss {fault + 1} of {faults}")
                        found.append(await _replace(api, home, name))
                        await realkube.until(lambda: _all_ready(api), "every machine is back")
            finally:
                await realkube.mend(api)
    return started, found


async def _apply(api: Any, home: Path, name: str) -> float:
    """Makes the objects that the command line prints. Returns when it began to."""
    import realkube
    import yaml

    argv = ["run", "--engine", "kubernetes", "--dry-run", "--image", realkube.IMAGE, "--job", name]
    argv += ["--namespace", realkube.NAMESPACE, "--nnodes", str(NODES), "--spares", str(SPARES)]
    argv += ["--node-memory", "1500Mi", str(SCRIPT)]
    command = [sys.executable, "-m", "holdfast.cli", *argv]
    printed = (
        await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True)
    ).stdout
    at = time.time()
    for made in yaml.safe_load_all(printed):
        done = await api.apply(realkube.path_of(made), made, manager="kubectl")
    folder = home / "jobs" / name
    folder.mkdir(parents=True)
    where = Allocation(engine="kubernetes", id=done["metadata"]["uid"], namespace=realkube.NAMESPACE)
    jobs.write_allocation(folder, where)
    return at


async def _heard(home: Path, name: str, wanted: Callable[[Any], Any]) -> Any:
    """The first of the coordinator's words that is wanted."""
    async with asyncio.timeout(LIMIT_S), client_of(home / "jobs" / name) as client:
        async for said in client.watch():
            if (found := wanted(said)) is not None:
                return found
    raise Failed(f"the job {name} has ended")


def _first_step(said: Any) -> float | None:
    """The status comes five times a second, so this is up to 0.2 s late."""
    return time.time() if said.kind == "status" and said.value["step"] else None


async def _replace(api: Any, home: Path, name: str) -> Replaced:
    """One power loss, from a job at full strength with a spare until it is so again, without the spare."""
    import realkube

    status = await _heard(home, name, _full)
    made = await api.get(realkube.job_path(realkube.NAMESPACE, name))
    pods = f"/api/v1/namespaces/{realkube.NAMESPACE}/pods"
    seat = (await api.get(f"{pods}/{made['status']['coordinator']['pod']}"))["spec"]["nodeName"]
    for worker in status["workers"]:
        machine = (await api.get(f"{pods}/{worker['node']}"))["spec"]["nodeName"]
        if worker["rank"] is not None and machine != seat:
            break
    at, seen = time.time(), dict[str, float]()
    await asyncio.to_thread(realkube.cluster, "kill", machine)

    def closed(said: Any) -> bool | None:
        if said.kind == "event":
            when = datetime.fromisoformat(said.value["utc"]).timestamp()
            if when > at and said.value["kind"] in ("node-lost", "incident-resumed", "incident-closed"):
                seen.setdefault(said.value["kind"], when)
        return True if "incident-closed" in seen else None

    await _heard(home, name, closed)
    await asyncio.to_thread(realkube.cluster, "boot", machine)
    verdict, resumed, whole = seen["node-lost"], seen["incident-resumed"], seen["incident-closed"]
    return Replaced(verdict - at, whole - verdict, resumed - at)


def _full(said: Any) -> Any:
    """The status of a job that trains on all nodes, with its spare ready."""
    if said.kind != "status" or said.value["phase"] != "running":
        return None
    workers = said.value["workers"]
    members = [one for one in workers if one["rank"] is not None]
    ready = any(one["state"] == "ready" for one in workers)
    return said.value if len(members) == NODES and ready else None


async def _all_ready(api: Any) -> bool:
    import realkube

    nodes = (await api.list_all("/api/v1/nodes", {}))[0]
    return all(realkube.is_true(node, "Ready") for node in nodes)
