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
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from bench.progress import Progress
from bench.replace import kube_exact, kubeflow
from bench.replace.figures import Beside, Failed, Replaced
from holdfast.engines import jobs
from holdfast.engines.jobs import Allocation
from holdfast.engines.reach import client_of

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests" / "kubernetes"
CLUSTER = TESTS / "cluster.sh"
SCRIPT = Path(__file__).with_name("train_alone.py")
NODES, SPARES = 2, 1
SYSTEM = "Holdfast"
LIMIT_S = 240.0
"""For each start and each replacement, on a machine that may be busy."""


def begin_cluster() -> None:
    """Runs this benchmark again, beside a Kubernetes. Returns when it does already."""
    if "HOLDFAST_KUBE_DIR" not in os.environ:
        os.environ.setdefault("PYTHON", sys.executable)
        os.execv(CLUSTER, [str(CLUSTER), "with", sys.executable, "-m", "bench.replace", *sys.argv[1:]])
    # The tests know how the operator is installed in that cluster.
    sys.path.insert(0, str(TESTS))


@dataclass
class Measured:
    """started_s: from the object to the first step, of each job. replaced: nodes without power. made_s: from each
    verdict until the API server has the pod that is to be the next spare. succeeded_s: from the power loss of
    a coordinator's machine until another coordinator answers. beside: what else was broken, of this system and of the other one."""

    started_s: list[float] = field(default_factory=list)
    replaced: list[Replaced] = field(default_factory=list)
    made_s: list[float] = field(default_factory=list)
    succeeded_s: list[float] = field(default_factory=list)
    beside: list[Beside] = field(default_factory=list)
    exact: list[kube_exact.Exact] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    """Why not all was measured."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is measured, and how often."""

    starts: int
    """Jobs. The faults are in the last one."""
    faults: int
    """Power losses."""
    coordinators: int
    """Power losses of the coordinator's machine."""
    outage_s: float
    """How long the API server is down in one more job, and every machine is drained in another. 0: neither."""
    peer_faults: int
    """Of each other kind, of both systems, where the other one's programs are."""
    detection_s: float
    """A node that is silent for so long is lost."""


def measure(asked: Asked, progress: Progress) -> Measured:
    """On a cluster that `begin_cluster` began.

    Raises:
        Failed: a job did not start, or a node was not replaced.
    """
    with tempfile.TemporaryDirectory(prefix="bench-kube-") as home:
        os.environ["HOLDFAST_HOME"] = home
        try:
            return asyncio.run(_measure(Path(home), asked, progress))
        except TimeoutError:
            raise Failed(f"not within {LIMIT_S:.0f} s on Kubernetes") from None


async def _measure(home: Path, asked: Asked, progress: Progress) -> Measured:
    import realkube

    found, peer = Measured(), kubeflow.programs()
    async with realkube.reached() as api:
        await realkube.install(api)
        # Ready, and leading: a start waits for no operator.
        await realkube.mend(api)
        for number in range(asked.starts):
            progress(f"Holdfast on Kubernetes: start {number + 1} of {asked.starts}")
            name = f"bench{number}"
            at = await _apply(api, home, name, asked.detection_s)
            try:
                found.started_s.append(await _heard(home, name, _first_step) - at)
                if number == asked.starts - 1:
                    if peer is not None:
                        found.beside += await _small_faults(api, home, name, asked.peer_faults, progress)
                    for fault in range(asked.faults):
                        progress(f"Holdfast on Kubernetes: power loss {fault + 1} of {asked.faults}")
                        replaced, made_s = await _replace(api, home, name)
                        found.replaced.append(replaced)
                        found.made_s.append(made_s)
                        await realkube.until(lambda: _all_ready(api), "every machine is back")
                    for fault in range(asked.coordinators):
                        progress(
                            f"Holdfast on Kubernetes: coordinator's machine, {fault + 1} of {asked.coordinators}"
                        )
                        found.succeeded_s.append(await _succeed(api, home, name))
                        await realkube.until(lambda: _all_ready(api), "every machine is back")
            finally:
                await realkube.mend(api)
        if asked.outage_s:
            try:
                await kube_exact.measure(api, home, asked.outage_s, progress, found.exact)
            except Failed as error:  # what was measured before is not lost to it
                found.failed.append(str(error))
        if peer is not None:
            try:
                await kubeflow.measure(api, peer, asked.peer_faults, progress, found.beside)
            except Failed as error:
                found.failed.append(str(error))
    return found


async def _small_faults(api: Any, home: Path, name: str, faults: int, progress: Progress) -> list[Beside]:
    """In a job that trains: a worker is killed, then a node's pod is deleted, each so many times."""
    import realkube

    killed, deleted = Beside(SYSTEM, "worker killed"), Beside(SYSTEM, "pod deleted")
    for number in range(faults):
        progress(f"Holdfast on Kubernetes: worker killed, {number + 1} of {faults}")
        await _heard(home, name, _full)
        at = time.time()
        async with client_of(home / "jobs" / name) as client:
            await client.post("/fault", "kill-worker:rank=1")
        event, when = await _heard(home, name, _event_after(at, "incident-resumed"))
        killed.stall_s.append(when - at)
        killed.steps_again.append(event["fields"]["lost_steps"] or 0)
    for number in range(faults):
        progress(f"Holdfast on Kubernetes: pod deleted, {number + 1} of {faults}")
        status = await _heard(home, name, _full)
        pods = f"/api/v1/namespaces/{realkube.NAMESPACE}/pods"
        pod = await api.get(f"{pods}/{realkube.node_of(status, 1)}")
        lost, at = await _lost_steps(home, name), time.time()
        await api.delete(f"{pods}/{pod['metadata']['name']}", pod["metadata"]["uid"])
        event, _ = await _heard(home, name, _event_after(at, "changed"))
        deleted.stall_s.append(event["fields"]["stall_s"])
        deleted.steps_again.append(await _lost_steps(home, name) - lost)
    return [killed, deleted]


async def _lost_steps(home: Path, name: str) -> int:
    """That were committed, and had to be done again."""
    async with client_of(home / "jobs" / name) as client:
        return int((await client.get("/report"))["steps"]["lost"])


def _event_after(at: float, kind: str) -> Callable[[Any], tuple[dict[str, Any], float] | None]:
    """The first event of a kind from then on, and when it was."""

    def wanted(said: Any) -> tuple[dict[str, Any], float] | None:
        if said.kind != "event" or said.value["kind"] != kind:
            return None
        when = datetime.fromisoformat(said.value["utc"]).timestamp()
        return (said.value, when) if when > at else None

    return wanted


async def _apply(api: Any, home: Path, name: str, detection_s: float) -> float:
    """Makes the objects that the command line prints. Returns when it began to."""
    import realkube
    import yaml

    argv = ["run", "--engine", "kubernetes", "--dry-run", "--image", realkube.IMAGE, "--job", name]
    argv += ["--namespace", realkube.NAMESPACE, "--nnodes", str(NODES), "--spares", str(SPARES)]
    argv += ["--node-memory", "1500Mi", "--detection", str(detection_s), str(SCRIPT)]
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
    return time.time() if said.kind == "status" and said.value.step else None


async def _replace(api: Any, home: Path, name: str) -> tuple[Replaced, float]:
    """One power loss, from a job at full strength with a spare until it is so again, without the spare. And the seconds from the
    verdict until there is a pod for another spare."""
    import realkube

    status = await _heard(home, name, _full)
    made = await api.get(realkube.job_path(realkube.NAMESPACE, name))
    pods = f"/api/v1/namespaces/{realkube.NAMESPACE}/pods"
    seat = (await api.get(f"{pods}/{made['status']['coordinator']['pod']}"))["spec"]["nodeName"]
    for worker in status.workers:
        machine = (await api.get(f"{pods}/{worker.node}"))["spec"]["nodeName"]
        if worker.rank is not None and machine != seat:
            break
    at, seen = time.time(), dict[str, float]()

    def closed(said: Any) -> bool | None:
        if said.kind == "event":
            when = datetime.fromisoformat(said.value["utc"]).timestamp()
            if when > at and said.value["kind"] in ("node-lost", "incident-resumed", "incident-closed"):
                seen.setdefault(said.value["kind"], when)
        return True if "incident-closed" in seen else None

    making = asyncio.create_task(_made(api, f"{pods}/{name}-n{made['status']['nextNumber']}"))
    try:
        await asyncio.to_thread(realkube.cluster, "kill", machine)
        await _heard(home, name, closed)
        made_at = await making
    finally:
        making.cancel()
    await asyncio.to_thread(realkube.cluster, "boot", machine)
    verdict, resumed, whole = seen["node-lost"], seen["incident-resumed"], seen["incident-closed"]
    return Replaced(verdict - at, whole - verdict, resumed - at), made_at - verdict


async def _made(api: Any, path: str) -> float:
    """When there is such an object: up to 0.02 s late."""
    from holdfast.kubernetes.client.api import ApiError, NoApiAnswer

    async with asyncio.timeout(LIMIT_S):
        while True:
            with suppress(ApiError, NoApiAnswer):
                await api.get(path)
                return time.time()
            await asyncio.sleep(0.02)


async def _succeed(api: Any, home: Path, name: str) -> float:
    """From one power loss of the coordinator's machine until the object says that another coordinator answers."""
    import realkube

    await _heard(home, name, _full)
    path = realkube.job_path(realkube.NAMESPACE, name)

    async def coordinator() -> str:
        made = await api.get(path)
        answers = realkube.is_true(made, "CoordinatorReady")
        return str(made["status"]["coordinator"]["pod"]) if answers else ""

    first = await coordinator()
    pod = await api.get(f"/api/v1/namespaces/{realkube.NAMESPACE}/pods/{first}")
    at = time.time()
    await asyncio.to_thread(realkube.cluster, "kill", pod["spec"]["nodeName"])

    async def another() -> bool:
        return await coordinator() not in ("", first)

    await realkube.until(another, "another coordinator answers", LIMIT_S)
    took_s = time.time() - at
    await asyncio.to_thread(realkube.cluster, "boot", pod["spec"]["nodeName"])
    return took_s


def _full(said: Any) -> Any:
    """The status of a job that trains on all nodes, with its spare ready."""
    if said.kind != "status" or said.value.phase != "running":
        return None
    workers = said.value.workers
    members = [one for one in workers if one.rank is not None]
    ready = any(one.state == "ready" for one in workers)
    return said.value if len(members) == NODES and ready else None


async def _all_ready(api: Any) -> bool:
    import realkube

    nodes = (await api.list_all("/api/v1/nodes", {}))[0]
    return all(realkube.is_true(node, "Ready") for node in nodes)
