"""`python -m bench.kubernetes`: what the operator costs with one job of many nodes and many jobs of few.

A real etcd, API server, controllers and scheduler on this machine, machines without kubelets (kwok), the operator as it is, and
the real coordinator of each job, without agents: nothing trains. A pod is deleted for a node that is lost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from bench import machine
from bench.kubernetes import plane
from bench.processes import Children, Group, stop_signals
from holdfast.engines.kubernetes import names
from holdfast.engines.kubernetes.api import Api, NoAnswer
from holdfast.engines.kubernetes.cluster import connect
from holdfast.engines.kubernetes.informer import Informer
from holdfast.engines.kubernetes.reach import job_path
from holdfast.engines.kubernetes.resource import API_VERSION, KIND
from holdfast.engines.kubernetes.schema import crd_text

NAMESPACE = "default"
LARGE = "large"
IDLE_S = 60.0
PATIENCE_S = 900.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Pods:
    """Those of the jobs, as a watch tells them."""

    def __init__(self) -> None:
        self.all: dict[str, dict[str, Any]] = {}
        self._news = asyncio.Event()

    def on_list(self, pods: list[dict[str, Any]], version: str) -> None:
        self.all = {pod["metadata"]["name"]: pod for pod in pods}
        self._news.set()

    def put(self, pod: dict[str, Any]) -> None:
        self.all[pod["metadata"]["name"]] = pod
        self._news.set()

    def gone(self, pod: dict[str, Any]) -> None:
        self.all.pop(pod["metadata"]["name"], None)
        self._news.set()

    def nodes(self, job: str, running: bool = True) -> list[str]:
        return [
            name
            for name, pod in self.all.items()
            if names.number_of(job, name) is not None
            and "deletionTimestamp" not in pod["metadata"]
            and (not running or pod["status"].get("phase") == "Running")
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


class Measured:
    """The operator's process, from one moment to another."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self._process, self._told = process, folder / "requests.json"
        self._before: Counter[str] = Counter()
        self._since, self._spent = time.monotonic(), self._cpu_s()

    def _cpu_s(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S

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
        now, spent = time.monotonic(), self._cpu_s()
        share, fresh = (spent - self._spent) / (now - self._since), counts - self._before
        self._before, self._since, self._spent = counts, now, spent
        return share, fresh


def job(name: str, nodes: int) -> dict[str, Any]:
    container = {"name": "worker", "image": "none", "resources": {"limits": {"cpu": "1", "memory": "1Gi"}}}
    # The times in which nothing trains must not end a job.
    spec = {
        "nodes": nodes,
        "run": {"script": "train.py"},
        "runPolicy": {"startupDeadlineSeconds": 86_400},
        "template": {"spec": {"containers": [container]}},
    }
    metadata = {"name": name, "namespace": NAMESPACE, "annotations": {names.NOTE_SKIP_SAVE: "true"}}
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec}


class Bench:
    def __init__(self, api: Api, given: argparse.Namespace, group: Group, folder: Path, table: Table) -> None:
        self._api, self._given, self._group, self._folder = api, given, group, folder
        self._table, self._pods = table, Pods()
        self._small = [f"small{number}" for number in range(given.jobs)]

    async def run(self) -> None:
        given, pods = self._given, self._pods
        begin = time.monotonic()
        await asyncio.gather(
            *(self._put(f"/api/v1/nodes/m{k}", plane.machine(k)) for k in range(given.nodes))
        )
        await self._machines_ready()
        self._row(f"{given.nodes} machines ready", time.monotonic() - begin, None, Counter())
        informer = Informer(
            api=self._api,
            path="/api/v1/pods",
            query={"labelSelector": "app.kubernetes.io/managed-by=holdfast-operator"},
            on_list=pods.on_list,
            on_change=pods.put,
            on_gone=pods.gone,
        )
        async with asyncio.TaskGroup() as tasks:  # what fails in the watch ends all of it
            watching = tasks.create_task(informer.run())
            await informer.listed.wait()
            await self._operated()
            watching.cancel()

    async def _operated(self) -> None:
        environment = {**os.environ, "KUBECONFIG": str(self._folder / "kubeconfig")}

        def spawn(module: str) -> subprocess.Popen[bytes]:
            argv = [sys.executable, "-m", f"bench.kubernetes.{module}", str(self._folder)]
            return self._group.spawn(argv, environment, self._folder / f"{module}.log")

        spawn("coordinators")
        operator = Measured(spawn("operate"), self._folder)
        await operator.answers()
        await operator.since()
        await self._scenes(operator)

    async def _scenes(self, operator: Measured) -> None:
        given, pods, api = self._given, self._pods, self._api
        await self._put(job_path(NAMESPACE, LARGE), job(LARGE, given.size))
        took = await pods.until(lambda: len(pods.nodes(LARGE, running=False)) == given.size, "pods are made")
        self._row(f"one job of {given.size}: pods made", took, *await operator.since())
        took = await pods.until(lambda: len(pods.nodes(LARGE)) == given.size, "pods run")
        self._row("... and run", took, *await operator.since())
        await asyncio.gather(*(self._put(job_path(NAMESPACE, one), job(one, 4)) for one in self._small))
        took = await pods.until(lambda: all(len(pods.nodes(one)) == 4 for one in self._small), "pods run")
        self._row(f"{given.jobs} jobs of 4: pods run", took, *await operator.since())
        await asyncio.sleep(10)  # statuses are written at most every 5 s
        await operator.since()
        await asyncio.sleep(IDLE_S)
        self._row(f"idle for {IDLE_S:g} s", IDLE_S, *await operator.since())
        lost = pods.all[max(pods.nodes(LARGE), key=lambda name: names.number_of(LARGE, name) or 0)]
        next_ = names.node_name(LARGE, given.size)
        await api.delete(
            f"/api/v1/namespaces/{NAMESPACE}/pods/{lost['metadata']['name']}", lost["metadata"]["uid"], 1
        )
        took = await pods.until(lambda: next_ in pods.all, "a pod in its place")
        self._row("one pod deleted: another made", took, *await operator.since())
        await asyncio.sleep(10)
        self._row("... and 10 s later", 10.0, *await operator.since())
        await self._asked(api.merge, job_path(NAMESPACE, LARGE), {"spec": {"nodes": given.size - 10}})
        await asyncio.sleep(10)
        self._row("10 nodes fewer asked for", 10.0, *await operator.since())
        self._memory(operator)
        for name in (LARGE, *self._small):
            there = await self._asked(api.get, job_path(NAMESPACE, name))
            await self._asked(api.delete, job_path(NAMESPACE, name), there["metadata"]["uid"])
        took = await pods.until(lambda: not pods.all, "no pod is left")
        self._row("all jobs deleted: no pod left", took, *await operator.since())
        self._memory(operator)

    async def _machines_ready(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                nodes, _ = await self._api.list_all("/api/v1/nodes", {})
                ready = sum(
                    one["type"] == "Ready" and one["status"] == "True"
                    for node in nodes
                    for one in node["status"].get("conditions", ())
                )
                if ready == self._given.nodes:
                    return
                await asyncio.sleep(0.5)

    async def _put(self, path: str, made: dict[str, Any]) -> None:
        await self._asked(self._api.apply, path, made, "bench")

    async def _asked(self, request: Callable[..., Any], *given: Any) -> Any:
        """Until it is answered: on a busy machine an API server may take longer than a client waits."""
        async with _AT_ONCE, asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    return await request(*given)
                except NoAnswer:
                    continue

    def _row(self, what: str, seconds: float, share: float | None, requests: Counter[str]) -> None:
        shown = ", ".join(f"{kind} {number}" for kind, number in requests.most_common(5))
        cpu = "" if share is None else f"{share:.1%}"
        self._table.add_row(what, f"{seconds:.2f}", cpu, str(requests.total()), shown)
        print(what, f"{seconds:.2f} s", cpu, requests.total(), shown, file=sys.stderr, flush=True)

    def _memory(self, operator: Measured) -> None:
        now, most = operator.memory_mb("VmRSS"), operator.memory_mb("VmHWM")
        self._table.add_row(f"memory: {now:.0f} MB, at most {most:.0f} MB", "", "", "", "")
        print(f"memory {now:.0f} MB, at most {most:.0f} MB", file=sys.stderr, flush=True)


_AT_ONCE = asyncio.Semaphore(32)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.kubernetes", description=__doc__)
    parser.add_argument("--nodes", type=int, default=1010, help="machines (default: 1010)")
    parser.add_argument("--size", type=int, default=1000, help="nodes of the large job (default: 1000)")
    parser.add_argument("--jobs", type=int, default=200, help="jobs of 4 nodes (default: 200)")
    given = parser.parse_args()
    if lacks := plane.missing():
        parser.error(f"KUBE_BIN is to have {', '.join(lacks)}: tests/kubernetes/programs/build.sh makes them")
    console = Console(width=150)
    machine.introduce(console, {}, "no training")
    table = Table("what", "s", "operator, of a core", "requests", "the most frequent")
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-bench-") as work,
        stop_signals(),
        machine.ForeignCpu() as cpu,
        Children() as children,
        children.group() as group,
    ):
        asyncio.run(_measure(Path(work), group, given, table))
    console.print(table)
    machine.conclude(console, cpu)
    return 0


async def _measure(folder: Path, group: Group, given: argparse.Namespace, table: Table) -> None:
    made = plane.Plane(folder, group)
    made.start()
    os.environ["KUBECONFIG"] = str(made.kubeconfig)
    async with connect() as api:
        await made.ready(api)
        made.start_rest()

        definition = yaml.safe_load(crd_text())
        await api.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition)
        await asyncio.sleep(3)
        await Bench(api, given, group, folder, table).run()


if __name__ == "__main__":
    sys.exit(main())
