"""What every part of the benchmark stands on: machines, the operator as it is, and a watch of the jobs' pods."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.kubernetes.plane import Plane
from holdfast.kubernetes import names
from holdfast.kubernetes.client.api import Api, ApiError, NoApiAnswer
from holdfast.kubernetes.client.informer import Informer
from holdfast.kubernetes.objects.resource import API_VERSION, KIND, job_path

NAMESPACE = "default"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
PATIENCE_S = 900.0
AT_ONCE = 32
TICKS_PER_S = os.sysconf("SC_CLK_TCK")

Object = dict[str, Any]


class Pods:
    """Those of the jobs, as a watch tells them."""

    def __init__(self) -> None:
        self.all: dict[str, Object] = {}
        self._news = asyncio.Event()

    def on_list(self, pods: list[Object], version: str) -> None:
        self.all = {pod["metadata"]["name"]: pod for pod in pods}
        self._news.set()

    def put(self, pod: Object) -> None:
        self.all[pod["metadata"]["name"]] = pod
        self._news.set()

    def gone(self, pod: Object) -> None:
        self.all.pop(pod["metadata"]["name"], None)
        self._news.set()

    def nodes(self, job: str, running: bool = True) -> list[str]:
        return [name for name, pod in self._of(job) if not running or pod["status"].get("phase") == "Running"]

    def bound(self, job: str) -> dict[str, str]:
        """The machine of each node that has one."""
        return {name: pod["spec"]["nodeName"] for name, pod in self._of(job) if "nodeName" in pod["spec"]}

    def places(self, job: str) -> dict[str, str]:
        """The place of each node of which the operator has noted it."""
        notes = ((name, pod["metadata"].get("annotations", {})) for name, pod in self._of(job))
        return {name: some[names.NOTE_PLACE] for name, some in notes if some.get(names.NOTE_PLACE)}

    def _of(self, job: str) -> list[tuple[str, Object]]:
        return [
            (name, pod)
            for name, pod in self.all.items()
            if names.number_of(job, name) is not None and "deletionTimestamp" not in pod["metadata"]
        ]

    async def until(self, true: Callable[[], bool], what: str) -> float:
        """Returns after how many seconds."""
        begin = time.monotonic()
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not true():
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise SystemExit(f"not within {PATIENCE_S:g} s: {what}") from None
        return time.monotonic() - begin


def cpu_s(process: subprocess.Popen[bytes]) -> float:
    """Processor time that it has used."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


class Measured:
    """The operator's process, from one moment to another."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self._process, self._told = process, folder / "requests.json"
        self._before: Counter[str] = Counter()
        self._since, self._spent = time.monotonic(), cpu_s(process)

    def memory_mb(self, field: str) -> float:
        text = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(text.partition(f"{field}:")[2].split()[0]) / 1024

    async def answers(self) -> None:
        """It has written its counts down."""
        async with asyncio.timeout(PATIENCE_S):
            for _ in iter(self._told.exists, True):
                await asyncio.sleep(0.05)

    async def since(self) -> tuple[float, Counter[str]]:
        """Share of one core, and requests, since the last call."""
        self._told.unlink()
        self._process.send_signal(signal.SIGUSR1)
        await self.answers()
        counts: Counter[str] = Counter(json.loads(self._told.read_text()))
        now, spent = time.monotonic(), cpu_s(self._process)
        share, fresh = (spent - self._spent) / (now - self._since), counts - self._before
        self._before, self._since, self._spent = counts, now, spent
        return share, fresh


def job(name: str, nodes: int, room: Mapping[str, str] | None = None, **spec: Any) -> Object:
    """room: of each node. spec: more fields."""
    limits = room or {"cpu": "1", "memory": "1Gi"}
    container = {"name": "worker", "image": "none", "resources": {"limits": limits}}
    # The times in which nothing trains must not end a job.
    spec |= {
        "nodes": nodes,
        "run": {"script": "train.py"},
        "runPolicy": {"startupDeadlineSeconds": 86_400},
        "template": {"spec": {"containers": [container]}},
    }
    metadata = {"name": name, "namespace": NAMESPACE, "annotations": {names.NOTE_SKIP_SAVE: "true"}}
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec}


class Stage:
    """Does things to a cluster, and adds a row to a table for each."""

    def __init__(self, api: Api, plane: Plane, folder: Path, table: Table) -> None:
        self.api, self.plane, self.pods = api, plane, Pods()
        self._folder, self._table = folder, table
        self._at_once = asyncio.Semaphore(AT_ONCE)

    async def machines(self, made: Sequence[Object]) -> None:
        """Until all are ready."""
        begin = time.monotonic()
        await asyncio.gather(*(self.make("/api/v1/nodes", one) for one in made))
        async with asyncio.timeout(PATIENCE_S):
            while True:
                if await self._ready() == len(made):
                    break
                await asyncio.sleep(1)
        self.row(f"{len(made)} machines ready", time.monotonic() - begin)

    async def _ready(self) -> int:
        nodes, _ = await self.api.list_all("/api/v1/nodes", {})
        return sum(
            not node["spec"].get("taints")
            and any(
                one["type"] == "Ready" and one["status"] == "True"
                for one in node["status"].get("conditions", ())
            )
            for node in nodes
        )

    @asynccontextmanager
    async def operated(self) -> AsyncIterator[Measured]:
        """With an operator and the jobs' coordinators, and a watch of the pods. What fails in the watch ends all of it."""
        informer = Informer(
            api=self.api,
            path="/api/v1/pods",
            query={"labelSelector": "app.kubernetes.io/managed-by=holdfast-operator"},
            on_list=self.pods.on_list,
            on_change=self.pods.put,
            on_gone=self.pods.gone,
        )
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(informer.run())
            await informer.listed.wait()
            self._spawn("coordinators")
            operator = Measured(self._spawn("operate"), self._folder)
            await operator.answers()
            await operator.since()
            yield operator
            watching.cancel()

    def _spawn(self, module: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "KUBECONFIG": str(self.plane.kubeconfig)}
        argv = [sys.executable, "-m", f"bench.kubernetes.{module}", str(self._folder)]
        return self.plane.group.spawn(argv, environment, self._folder / f"{module}.log")

    async def lose(self, pod: str, grace_s: int = 1) -> None:
        """A node's pod, as the operator deletes that of a node which is lost."""
        await self.api.delete(f"{PODS}/{pod}", self.pods.all[pod]["metadata"]["uid"], grace_s)

    async def end(self, jobs: Sequence[str]) -> float:
        """Deletes them. Returns after how many seconds no pod is left."""
        for name in jobs:
            there = await self.asked(self.api.get, job_path(NAMESPACE, name))
            await self.asked(self.api.delete, job_path(NAMESPACE, name), there["metadata"]["uid"])

        def is_over() -> bool:
            return not any(
                pod["metadata"]["labels"][names.LABEL_JOB] in jobs for pod in self.pods.all.values()
            )

        return await self.pods.until(is_over, "no pod is left")

    async def put(self, path: str, made: Object) -> None:
        await self.asked(self.api.apply, path, made, "bench")

    async def make(self, folder: str, made: Object) -> None:
        """An object of a name that nobody else uses: one that is there was made by a request whose answer was lost."""
        try:
            await self.asked(self.api.create, folder, made)
        except ApiError as error:
            if error.status != 409:
                raise

    async def asked(self, request: Callable[..., Any], *given: Any) -> Any:
        """Until it is answered: on a busy machine an API server may take longer than a client waits."""
        async with self._at_once, asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    return await request(*given)
                except NoApiAnswer:
                    continue

    def row(
        self, what: str, seconds: float, share: float | None = None, requests: Counter[str] | None = None
    ) -> None:
        counts = Counter[str]() if requests is None else requests
        shown = ", ".join(f"{kind} {number}" for kind, number in counts.most_common(5))
        cpu = "" if share is None else f"{share:.1%}"
        self._table.add_row(what, f"{seconds:.2f}", cpu, str(counts.total()), shown)
        print(what, f"{seconds:.2f} s", cpu, counts.total(), shown, file=sys.stderr, flush=True)

    def memory(self, operator: Measured) -> None:
        now, most = operator.memory_mb("VmRSS"), operator.memory_mb("VmHWM")
        self._table.add_row(f"memory: {now:.0f} MB, at most {most:.0f} MB", "", "", "", "")
        print(f"memory {now:.0f} MB, at most {most:.0f} MB", file=sys.stderr, flush=True)
