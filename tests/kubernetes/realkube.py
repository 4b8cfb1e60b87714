"""The test cluster's machines, and jobs on it. Started by `tests/kubernetes/cluster.sh with`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from holdfast.coordinator.service.store import Store
from holdfast.engines.client import Announcement, JobClient
from holdfast.engines.jobs import EXIT_LEFT, EXIT_STOPPED
from holdfast.engines.reach import client_of
from holdfast.errors import HoldfastError
from holdfast.kubernetes.client.api import Api, ApiError, NoApiAnswer, connect
from holdfast.kubernetes.names import NOTE_FAULT, TAINT_UNHEALTHY
from holdfast.kubernetes.objects.resource import job_path
from holdfast.kubernetes.objects.schema import crd_text
from holdfast.protocol.job_view import JobView

CLUSTER = os.environ.get("HOLDFAST_KUBE_CLUSTER", "")
IMAGE = os.environ.get("HOLDFAST_KUBE_IMAGE", "")
ROOT = Path(__file__).parents[2]
TRAIN = ROOT / "tests" / "slurm" / "train_paced.py"
MACHINES = [f"n{i}" for i in range(1, 5)]
NAMESPACE = "research"
FOLDER = f"/api/v1/namespaces/{NAMESPACE}"
OPERATOR = "/apis/apps/v1/namespaces/holdfast-system/deployments/holdfast-operator"
LEASE = "/apis/coordination.k8s.io/v1/namespaces/holdfast-system/leases/holdfast-operator"
PATIENCE_S = float(os.environ.get("HOLDFAST_KUBE_PATIENCE", "150"))
"""Of a machine with two processors, on which everything of a cluster runs. More where other programs have them too."""
LOOK_S = 0.2
STEPS = 10_000
"""More than any scene needs; each ends its job by `holdfast stop`."""
PACE_S = 0.25
Scene = Callable[[Api], Awaitable[None]]


def cluster(*argv: str) -> None:
    """cluster.sh: kill, boot, cut, heal, block, unblock, exec, apiserver."""
    subprocess.run([CLUSTER, *argv], check=True, timeout=150)


async def until(true: Callable[[], Awaitable[object]], what: str, within_s: float = PATIENCE_S) -> Any:
    """Waits until the cluster says so. It may not answer at all for a while."""
    end = time.monotonic() + within_s
    while True:
        try:
            if found := await true():
                return found
        except (NoApiAnswer, ApiError):
            pass
        assert time.monotonic() < end, f"not within {within_s:g} s: {what}"
        await asyncio.sleep(LOOK_S)


async def install(api: Api) -> None:
    """The definition and the operator, as docs/kubernetes.md says, with the image of the tests."""
    text = (ROOT / "deploy" / "kubernetes" / "operator.yaml").read_text()
    objects = [yaml.safe_load(crd_text()), *filter(None, yaml.safe_load_all(text))]
    for made in objects:
        if made["kind"] == "Deployment":
            made["spec"]["template"]["spec"]["containers"][0]["image"] = IMAGE
        await api.apply(path_of(made), made, manager="tests")
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": labels}}
    await api.apply(path_of(namespace), namespace, manager="tests")


def path_of(made: dict[str, Any]) -> str:
    """Of an object at the API server."""
    group = made["apiVersion"]
    folder = f"/api/{group}" if "/" not in group else f"/apis/{group}"
    if "namespace" in made["metadata"]:
        folder += f"/namespaces/{made['metadata']['namespace']}"
    kind = made["kind"].lower()
    plural = f"{kind[:-1]}ies" if kind.endswith("y") else f"{kind}s"
    return f"{folder}/{plural}/{made['metadata']['name']}"


async def operators(api: Api) -> list[dict[str, Any]]:
    """Their pods that run or will. One that a kubelet has evicted, from a full disk for example, is kept by Kubernetes as failed."""
    path = "/api/v1/namespaces/holdfast-system/pods"
    pods = (await api.list_all(path, {}))[0]
    return [pod for pod in pods if pod["status"].get("phase") not in ("Failed", "Succeeded")]


@asynccontextmanager
async def no_operator(api: Api) -> AsyncIterator[None]:
    """Nobody operates meanwhile."""
    try:
        before = (await api.get(OPERATOR))["spec"]["replicas"]
    except ApiError as error:
        if error.status != 404:
            raise
        yield  # none was installed
        return

    async def nobody() -> bool:
        return not await operators(api)

    await api.merge(OPERATOR, {"spec": {"replicas": 0}})
    try:
        await until(nobody, "the operators are gone")
        yield
    finally:
        await api.merge(OPERATOR, {"spec": {"replicas": before}})


async def pods_of(api: Api, query: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """Those of all jobs; query: only these."""
    return (await api.list_all(f"{FOLDER}/pods", query or {}))[0]


async def machines_of(api: Api) -> dict[str, str]:
    """Of all nodes' pods that stay: the machine, by the pod's name."""
    pods = await pods_of(api, {"labelSelector": "holdfast.dev/role=node"})
    stay = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
    return {pod["metadata"]["name"]: pod["spec"].get("nodeName", "") for pod in stay}


async def shared_folder(api: Api, name: str) -> str:
    """The claim of a volume that every machine can mount."""
    folder = Path(os.environ["HOLDFAST_KUBE_DIR"]) / name
    folder.mkdir()
    folder.chmod(0o777)
    volume = {"capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteMany"], "storageClassName": ""}
    claim = {key: volume[key] for key in ("accessModes", "storageClassName")}
    claim |= {"resources": {"requests": volume["capacity"]}, "volumeName": name}
    for path, kind, spec in (
        (
            f"/api/v1/persistentvolumes/{name}",
            "PersistentVolume",
            volume | {"hostPath": {"path": str(folder)}},
        ),
        (f"{FOLDER}/persistentvolumeclaims/{name}", "PersistentVolumeClaim", claim),
    ):
        made = {"apiVersion": "v1", "kind": kind, "metadata": {"name": name}, "spec": spec}
        await api.apply(path, made, manager="tests")
    return name


async def cordon(api: Api, machine: str, on: bool = True) -> None:
    """Or uncordon."""
    await api.merge(f"/api/v1/nodes/{machine}", {"spec": {"unschedulable": on or None}})


async def names_are_known(api: Api) -> None:
    """Waits until the name service hears of new services: after an outage of the API server it may take more than a minute, as its
    client, and the client of the controllers beside it, ask again ever more seldom."""
    metadata = {"name": "canary", "namespace": "holdfast-system"}
    spec = {"clusterIP": "None", "selector": {"app.kubernetes.io/name": "holdfast-operator"}}
    service = {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}

    async def resolved() -> bool:
        try:
            await asyncio.to_thread(cluster, "resolve", "canary.holdfast-system.svc.cluster.local")
        except subprocess.CalledProcessError:
            return False
        return True

    made = await api.apply(path_of(service), service, manager="tests")
    await until(resolved, "the name service knows a new service")
    await api.delete(path_of(service), made["metadata"]["uid"])


async def mend(api: Api) -> None:
    """Every machine is up, plugged in and may be used, the operator too, and no job is left."""
    for machine in MACHINES:
        cluster("heal", machine)
        cluster("unblock", machine)
        if not (Path(os.environ["HOLDFAST_KUBE_DIR"]) / "pid" / f"power-{machine}").exists():
            cluster("boot", machine)
    for machine in MACHINES:
        usable = partial(api.merge, f"/api/v1/nodes/{machine}", {"spec": {"unschedulable": None}})
        await until(usable, f"{machine} has a Node")  # somebody may have deleted it
        await until(partial(unmark, api, machine), f"{machine} has no mark")
    folder = f"/apis/holdfast.dev/v1alpha1/namespaces/{NAMESPACE}/holdfastjobs"
    for job in (await api.list_all(folder, {}))[0]:
        metadata = job["metadata"]
        await api.merge(
            f"{folder}/{metadata['name']}", {"metadata": {"annotations": {"holdfast.dev/skip-save": "true"}}}
        )
        await api.delete(f"{folder}/{metadata['name']}", metadata["uid"])

    async def nothing() -> bool:
        jobs = (await api.list_all(folder, {}))[0]
        return not jobs and not await pods_of(api)

    async def all_ready() -> bool:
        nodes = (await api.list_all("/api/v1/nodes", {}))[0]
        return sum(is_true(node, "Ready") for node in nodes) == len(MACHINES)

    async def operated() -> bool:
        return any(is_true(pod, "Ready") for pod in await operators(api))

    await until(all_ready, "all machines are ready")
    await until(operated, "an operator is there")
    await until(nothing, "no job and no pod is left")


async def unmark(api: Api, machine: str) -> bool:
    """A job that is over takes no mark back. False: the Node has changed meanwhile."""
    path = f"/api/v1/nodes/{machine}"
    node = await api.get(path)
    metadata, taints = node["metadata"], node["spec"].get("taints", [])
    kept = [one for one in taints if one["key"] != TAINT_UNHEALTHY]
    if kept == taints and NOTE_FAULT not in metadata.get("annotations", {}):
        return True
    only = {"resourceVersion": metadata["resourceVersion"], "annotations": {NOTE_FAULT: None}}
    try:
        await api.merge(path, {"metadata": only, "spec": {"taints": kept}})
    except ApiError as error:
        if error.status != 409:
            raise
    return False


def word(made: dict[str, Any], condition: str) -> dict[str, Any] | None:
    """A condition of a job, a pod or a machine."""
    found = made.get("status", {}).get("conditions", ())
    return next((one for one in found if one["type"] == condition), None)


def is_said(made: dict[str, Any], words: str) -> bool:
    """Whether a condition of a job says these words."""
    return any(words in one["message"] for one in made.get("status", {}).get("conditions", ()))


def is_true(made: dict[str, Any], condition: str) -> bool:
    """Of a job, a pod or a machine."""
    found = word(made, condition)
    return found is not None and found["status"] == "True"


class Job:
    """`holdfast run --engine kubernetes`, and what became of it."""

    def __init__(
        self,
        api: Api,
        home: Path,
        name: str,
        *options: object,
        steps: int,
        pace_s: float,
        script: Path = TRAIN,
    ) -> None:
        self.api, self.name, self.home = api, name, home
        self.dir = home / "jobs" / name
        self.log = home / f"{name}.log"
        argv = ["run", "--engine", "kubernetes", "--image", IMAGE, "--namespace", NAMESPACE, "--job", name]
        argv += [
            "--node-memory",
            "1500Mi",
            "--no-ui",
            *map(str, options),
            str(script),
            str(steps),
            str(pace_s),
        ]
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "holdfast.cli", *argv, "/tmp/at-once"],
                env=dict(os.environ, HOLDFAST_HOME=str(home)),
                stdout=out,
                stderr=out,
            )

    async def __aenter__(self) -> Job:
        os.environ["HOLDFAST_HOME"] = str(self.home)
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if exc[0] is not None:
            print(f"--- {self.log.name}\n{self.log.read_text()[-4000:]}", file=sys.stderr)
            print(f"--- the object\n{await self._said()}", file=sys.stderr)
            print(f"--- its pods, and the last events\n{await self._pods_and_events()}", file=sys.stderr)
            print(f"--- what the coordinator says\n{await self._status()}", file=sys.stderr)

    async def _said(self) -> str:
        """For a scene that failed: what the operator says, or why there is no object."""
        try:
            return yaml.safe_dump((await self.object()).get("status"))
        except (ApiError, NoApiAnswer) as error:
            return repr(error)

    async def _pods_and_events(self) -> str:
        """For a scene that failed."""
        lines = []
        for pod in await pods_of(self.api):
            status = pod["status"]
            states = [one.get("state") for one in status.get("containerStatuses", ())]
            ready = [c["message"] for c in status.get("conditions", ()) if "message" in c]
            where = pod["spec"].get("nodeName"), status.get("podIP")
            gone = pod["metadata"].get("deletionTimestamp")
            lines.append(f"{pod['metadata']['name']} {status.get('phase')} {where} {gone} {states} {ready}")
        events = (await self.api.list_all(f"{FOLDER}/events", {}))[0]
        events.sort(key=lambda event: event["metadata"]["creationTimestamp"])
        for event in events[-60:]:
            about = event["involvedObject"].get("name")
            when = event["metadata"]["creationTimestamp"]
            lines.append(f"{when} {about} {event.get('reason')}: {event.get('message', '')[:200]}")
        return "\n".join(lines)

    async def _status(self) -> str:
        """For a scene that failed; in words, why there is none."""
        try:
            async with asyncio.timeout(10), client_of(self.dir) as client:
                return json.dumps(await client.get("/status"))
        except (HoldfastError, OSError, TimeoutError) as error:
            return repr(error)

    async def wait(self, within_s: float = PATIENCE_S) -> int:
        """The command's exit code."""
        return await asyncio.to_thread(self.process.wait, within_s)

    async def object(self) -> dict[str, Any]:
        return await self.api.get(job_path(NAMESPACE, self.name))

    async def condition(self, type_: str, within_s: float = PATIENCE_S) -> dict[str, Any]:
        """Waits until it holds; returns the object."""

        async def holds() -> dict[str, Any] | None:
            made = await self.object()
            return made if is_true(made, type_) else None

        found: dict[str, Any] = await until(holds, f"{self.name} is {type_}", within_s)
        return found

    async def says(self, words: str) -> bool:
        """Whether one of its conditions does."""
        assert self.process.poll() is None, self.log.read_text()
        return is_said(await self.object(), words)

    async def pod(self, name: str) -> dict[str, Any]:
        return await self.api.get(f"{FOLDER}/pods/{name}")

    async def machine(self, pod: str) -> str:
        return str((await self.pod(pod))["spec"]["nodeName"])

    async def kill_container(self, name: str) -> None:
        """Of a pod, with all that runs in it. The kubelet starts it again in its place."""
        pod = await self.pod(name)
        container = pod["status"]["containerStatuses"][0]["containerID"].rpartition("/")[2]
        machine = pod["spec"]["nodeName"]
        socket = f"{os.environ['HOLDFAST_KUBE_DIR']}/{machine}/containerd.sock"
        kill = ("ctr", "-a", socket, "-n", "k8s.io", "task", "kill", "-s", "KILL", container)
        await asyncio.to_thread(cluster, "exec", machine, *kill)

    async def coordinator(self) -> str:
        """Its pod. Between two terms there may be none for a moment."""

        async def there() -> str:
            return str((await self.object()).get("status", {}).get("coordinator", {}).get("pod", ""))

        return str(await until(there, f"{self.name} has a coordinator"))

    async def succeeds(self, coordinator: str, within_s: float = PATIENCE_S) -> None:
        """Waits for another one in the place of this pod."""

        async def another() -> bool:
            return await self.coordinator() != coordinator

        await until(another, f"{self.name} has a coordinator of the next term", within_s)

    async def gives_up(self, node: str) -> None:
        """Waits until the operator does so."""

        async def given_up() -> bool:
            return "deletionTimestamp" in (await self.pod(node))["metadata"]

        await until(given_up, f"the operator gives {node} up")

    async def see(self, wanted: Callable[[Announcement], object], within_s: float = PATIENCE_S) -> Any:
        """Waits for something that the coordinator says, across coordinators, by the API server's proxy."""
        await until(self._is_known, "the job is submitted", within_s)
        async with (
            asyncio.timeout(within_s),
            client_of(self.dir) as client,
            aclosing(client.watch()) as heard,
        ):
            async for said in heard:
                if found := wanted(said):
                    return found
        raise AssertionError("the job has ended")

    async def _is_known(self) -> bool:
        assert self.process.poll() in (None, 0, EXIT_LEFT), self.log.read_text()
        return (self.dir / "allocation.json").exists()

    async def training(
        self,
        nodes: int,
        beyond: int = 0,
        spares: int = 0,
        at_least: bool = False,
        within_s: float = PATIENCE_S,
    ) -> JobView:
        """Waits until so many train, or at least so many, beyond a step, with so many spares ready; returns the status."""

        def wanted(said: Announcement) -> Any:
            if said.kind != "status" or said.value.phase != "running":
                return None
            ready = sum(w.state == "ready" for w in said.value.workers)
            ranks = sum(w.rank is not None for w in said.value.workers)
            full = (
                (ranks == nodes or (at_least and ranks > nodes))
                and ready >= spares
                and (said.value.step or 0) > beyond
            )
            return said.value if full else None

        status: JobView = await self.see(wanted, within_s)
        return status

    def client(self) -> AbstractAsyncContextManager[JobClient]:
        """By which commands speak with its coordinator."""
        return client_of(self.dir)

    async def stop(self) -> None:
        """In order, as `holdfast stop` asks for it."""
        async with client_of(self.dir) as client:
            await client.post("/stop?reason=enough", repeat=True)

    async def stops_as(self, undisturbed: Undisturbed, incidents: Sequence[int] = ()) -> None:
        """Ends it; each step has the loss that it has without faults, and none is missing. incidents: how many there may be."""

        def is_past_them(said: Announcement) -> bool:
            if said.kind != "status" or said.value.phase != "running":
                return False
            return all((said.value.step or 0) > (one.at_step or 0) for one in said.value.incidents)

        # A job that fell back to a checkpoint has steps in its ledger until they are done again: the end is to be after them.
        await self.see(is_past_them)
        await self.stop()
        code = await self.wait()
        told = self.log.read_text()
        assert code == EXIT_STOPPED, told
        mine = self.losses()
        assert len(mine) > 5
        assert mine == await asyncio.to_thread(undisturbed.losses, len(mine))
        report = json.loads((self.dir / "report.json").read_text())
        assert report["steps"]["committed"] == len(mine)
        if incidents:
            assert len(report["incidents"]) in incidents, told

    def losses(self) -> list[float]:
        """Of each step, from the copy of the ledger that the command left."""
        return losses(self.dir)

    def detach(self) -> int:
        """Ctrl-C; returns the exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(PATIENCE_S)


@asynccontextmanager
async def pair(
    api: Api, home: Path, name: str, *options: object, script: Path = TRAIN
) -> AsyncIterator[tuple[Job, dict[str, Any]]]:
    """A job of two nodes and a spare, with its status once it trains and the spare is ready."""
    options = ("--nnodes", 2, "--spares", 1, *options)
    async with Job(api, home, name, *options, steps=STEPS, pace_s=PACE_S, script=script) as job:
        yield job, await job.training(2, beyond=3, spares=1)


def losses(folder: Path) -> list[float]:
    store = Store(folder / "job.sqlite", read_only=True)
    try:
        return [step.loss for step in store.steps()]
    finally:
        store.close()


class Undisturbed:
    """The same training on one worker of this machine, that nothing happens to."""

    def __init__(self, home: Path) -> None:
        self._home, self._known = home, list[float]()

    def losses(self, steps: int) -> list[float]:
        """Of so many steps. Blocks while they are made."""
        if steps > len(self._known):
            # Some more than asked for: the next scene's job may be a little longer.
            steps_more = steps + 100
            job = f"alone{steps_more}"
            env = dict(os.environ, HOLDFAST_HOME=str(self._home), OMP_NUM_THREADS="1")
            argv = ["run", "--no-ui", "--job", job, str(TRAIN), str(steps_more)]
            subprocess.run(
                [sys.executable, "-m", "holdfast.cli", *argv],
                env=env,
                check=True,
                timeout=4 * PATIENCE_S,
                capture_output=True,
            )
            self._known = losses(self._home / "jobs" / job)
        return self._known[:steps]


def holdfast(home: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """A command of the person's."""
    env = dict(os.environ, HOLDFAST_HOME=str(home))
    return subprocess.run(
        [sys.executable, "-m", "holdfast.cli", *argv],
        env=env,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


async def evict(api: Api, pod: str) -> bool:
    """Asks once, as `kubectl drain`: it is refused while the budget does not allow it. Returns whether the pod is gone."""
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}"
    metadata = {"name": pod, "namespace": NAMESPACE}
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata}
    try:
        await api.get(path)
        await api.request("POST", f"{path}/eviction", None, eviction)
    except ApiError as error:
        if error.status not in (404, 429):
            raise AssertionError(str(error)) from error
        return error.status == 404
    return False


def node_of(status: JobView, rank: int) -> str:
    """The pod of a rank."""
    return str(next(w.node for w in status.workers if w.rank == rank))


@asynccontextmanager
async def reached():
    """The API server."""
    async with connect() as api:
        yield api


async def trained_apart(job: Job, status: JobView) -> tuple[str, str]:
    """A node that trains on another machine than the coordinator's, with that machine."""
    seat = await job.machine(await job.coordinator())
    for rank in (0, 1):
        machine = await job.machine(node := node_of(status, rank))
        if machine != seat:
            return node, machine
    raise AssertionError("two nodes on one machine")


async def gone(api: Api, path: str) -> bool:
    """Whether there is no such object."""
    try:
        await api.get(path)
    except ApiError as error:
        return error.status == 404
    return False
