"""What people use on Kubernetes today, on the same cluster: Kubeflow Trainer with JobSet and torchrun.

The folder KUBEFLOW_BIN has the controllers of both, `trainer` and `jobset`, and their manifests, `trainer.yaml` and `jobset.yaml`:
`kubectl kustomize` of the projects' releases. They run as the projects run them, in pods, on a machine that loses no power.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bench.progress import Progress
from bench.replace.figures import Beside, Failed

SCRIPT = Path(__file__).with_name("train_torchrun.py")
CONTROLLERS = ("jobset", "trainer")
TRAINER = "trainer.kubeflow.org/v1alpha1"
NAMESPACE = "peer"
SAFE = "n4"
"""The machine of the controllers, which is not one of those that train."""
NODES = 2
CALM_STEPS = 30
"""More than between two checkpoints."""
LIMIT_S = 120.0
"""Then it is not back."""
START_S = 240.0


def programs() -> Path | None:
    """The folder with the controllers, if there is one."""
    folder = Path(os.environ.get("KUBEFLOW_BIN", "/nowhere"))
    files = [folder / f"{name}{kind}" for name in CONTROLLERS for kind in ("", ".yaml")]
    return folder if all(file.exists() for file in files) else None


async def measure(api: Any, folder: Path, faults: int, progress: Progress, found: list[Beside]) -> None:
    """So many faults of each kind. found: what was measured so far is in it, also when something failed.

    Raises:
        Failed: the cluster did not do what it should.
    """
    try:
        await _measure(api, folder, faults, progress, found)
    except (AssertionError, subprocess.CalledProcessError) as error:  # as the tests' helpers say it
        raise Failed(f"Kubeflow Trainer: {error}") from None


async def _measure(api: Any, folder: Path, faults: int, progress: Progress, found: list[Beside]) -> None:
    import realkube

    progress("Kubeflow Trainer: its controllers")
    for name in CONTROLLERS:
        await asyncio.to_thread(_load, folder / name, name)
        await _install(api, folder / f"{name}.yaml", name)
    made = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    await api.apply(realkube.path_of(made), made, manager="bench")
    for kind, break_it, times in (
        ("worker killed", _kill_worker, faults),
        ("pod deleted", _delete_pod, faults),
        ("power loss", _power_loss, 1),
    ):
        found.append(beside := Beside("Kubeflow, torchrun", kind))
        for number in range(times):
            progress(f"Kubeflow Trainer: {kind}, {number + 1} of {times}")
            # A name of its own each: its controller may not see that the one before is gone.
            await _one(api, f"peer-{kind.replace(' ', '-')}-{number}", beside, break_it)


@dataclass
class _Training:
    """One TrainJob, and the folder that its workers share."""

    api: Any
    folder: Path
    lost: list[str] = field(default_factory=list)
    """Machines without power."""

    def steps(self) -> list[tuple[float, int, float]]:
        """When each was done, its number, and when the process of rank 0 had begun."""
        text = (self.folder / "steps").read_text() if (self.folder / "steps").exists() else ""
        lines = [line.split() for line in text[: text.rfind("\n") + 1].splitlines()]
        return [(float(at), int(step), float(began)) for at, step, began in lines]

    async def pods(self) -> list[dict[str, Any]]:
        """Those of its nodes that run."""
        listed = (await self.api.list_all(f"/api/v1/namespaces/{NAMESPACE}/pods", {}))[0]
        return [pod for pod in listed if pod["status"].get("phase") == "Running"]


Break = Callable[[_Training], Awaitable[None]]


async def _one(api: Any, name: str, beside: Beside, break_it: Break) -> None:
    import realkube

    with tempfile.TemporaryDirectory(prefix="bench-kubeflow-") as scratch:
        folder = Path(scratch)
        _share(folder)
        training = _Training(api, folder)
        objects = _objects(name, folder, realkube.IMAGE)
        try:
            for made in objects:
                applied = partial(api.apply, realkube.path_of(made), made, manager="bench")
                await realkube.until(applied, f"{made['kind']} is there", START_S)

            async def calm() -> bool:
                return len(training.steps()) >= CALM_STEPS

            await realkube.until(calm, "Kubeflow's job trains", START_S)
            before, at = training.steps()[-1], time.time()
            await break_it(training)

            async def again() -> Any:
                later = [line for line in training.steps() if line[0] > at and line[2] != before[2]]
                return later[:1]

            try:
                [first] = await realkube.until(again, "it trains again", LIMIT_S)
            except AssertionError:
                beside.not_back += 1
            else:
                last = max(line for line in training.steps() if line[2] == before[2])
                beside.stall_s.append(first[0] - at)
                beside.steps_again.append(last[1] + 1 - first[1])
        finally:
            for machine in training.lost:
                await asyncio.to_thread(realkube.cluster, "boot", machine)
            await _delete(api, realkube.path_of(objects[-1]))

            async def nothing() -> bool:
                return not (await api.list_all(f"/api/v1/namespaces/{NAMESPACE}/pods", {}))[0]

            await realkube.until(nothing, "Kubeflow's pods are gone", START_S)


def _share(folder: Path) -> None:
    """The script is in it, and the pods' user writes there."""
    folder.chmod(0o777)
    shutil.copy(SCRIPT, folder)


async def _kill_worker(training: _Training) -> None:
    """SIGKILL to rank 1; torchrun beside it lives."""
    os.kill(_worker(training.folder), signal.SIGKILL)


def _worker(folder: Path) -> int:
    mark = str(folder / SCRIPT.name).encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().split(b"\0")
                environment = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if mark in command and b"torch.distributed.run" not in command and b"RANK=1" in environment:
                return int(entry.name)
    raise Failed("Kubeflow Trainer: its worker of rank 1 was not found")


async def _delete_pod(training: _Training) -> None:
    """As `kubectl delete pod` does."""
    pod = (await training.pods())[-1]
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/{pod['metadata']['name']}"
    await training.api.delete(path, pod["metadata"]["uid"])


async def _power_loss(training: _Training) -> None:
    import realkube

    machine = (await training.pods())[-1]["spec"]["nodeName"]
    training.lost.append(machine)
    await asyncio.to_thread(realkube.cluster, "kill", machine)


async def _delete(api: Any, path: str) -> None:
    import realkube

    async def deleted() -> bool:
        await api.request("DELETE", path, {"propagationPolicy": "Foreground"})
        return True

    await realkube.until(deleted, "Kubeflow's job is deleted", START_S)


# ---------------------------------------------------------------------------- what is installed


def _load(program: Path, name: str) -> None:
    """An image of the program alone, on every machine."""
    import image
    import realkube

    cluster = Path(os.environ["HOLDFAST_KUBE_DIR"])
    archive = cluster / "image" / f"{name}.tar"
    image.write_program(_image(name), program, archive)
    for machine in realkube.MACHINES:
        address = cluster / machine / "containerd.sock"
        load = f"ctr -a {address} -n k8s.io images import {archive} >/dev/null"
        realkube.cluster("exec", machine, "sh", "-c", load)


def _image(name: str) -> str:
    return f"holdfast.test/{name}:1"


async def _install(api: Any, manifest: Path, name: str) -> None:
    import realkube
    import yaml

    text = await asyncio.to_thread(manifest.read_text)
    objects = [made for made in yaml.safe_load_all(text) if made]
    first = ("Namespace", "CustomResourceDefinition")
    for made in sorted(objects, key=lambda made: made["kind"] not in first):
        if made["kind"] == "Deployment":
            spec = made["spec"]["template"]["spec"]
            spec["nodeSelector"] = {"kubernetes.io/hostname": SAFE}
            for container in spec["containers"]:
                container |= {"image": _image(name), "imagePullPolicy": "Never"}
        applied = partial(api.apply, realkube.path_of(made), made, manager="bench")
        await realkube.until(applied, f"{made['kind']} {made['metadata']['name']}", START_S)
    for made in objects:
        if made["kind"] == "Deployment":
            path = realkube.path_of(made)

            async def available(path: str = path) -> bool:
                return realkube.is_true(await api.get(path), "Available")

            await realkube.until(available, f"{name} is ready", START_S)


def _objects(name: str, folder: Path, image: str) -> list[dict[str, Any]]:
    """The runtime, and the job, last."""
    command = ["python", "-m", "torch.distributed.run", "--max-restarts=3"]
    container = {
        "name": "node",
        "image": image,
        "imagePullPolicy": "Never",
        "command": [*command, str(folder / SCRIPT.name), str(folder)],
        "env": [
            {"name": "GLOO_SOCKET_IFNAME", "value": "eth0"},
            {"name": "OMP_NUM_THREADS", "value": "1"},
            {"name": "TMPDIR", "value": "/scratch"},
        ],
        # One node for each machine, as elsewhere: a machine has two cores.
        "resources": {"requests": {"cpu": "1200m"}},
        "volumeMounts": [
            {"name": "shared", "mountPath": str(folder)},
            {"name": "scratch", "mountPath": "/scratch"},
        ],
    }
    elsewhere = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": [SAFE]}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [elsewhere]}]}
    pod = {
        "containers": [container],
        "volumes": [
            {"name": "shared", "hostPath": {"path": str(folder)}},
            {"name": "scratch", "emptyDir": {}},
        ],
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}},
    }
    step = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    template = {"metadata": {"labels": step}, "spec": {"backoffLimit": 0, "template": {"spec": pod}}}
    runtime = {
        "apiVersion": TRAINER,
        "kind": "ClusterTrainingRuntime",
        "metadata": {"name": "host"},
        "spec": {
            "mlPolicy": {"numNodes": 1, "torch": {"numProcPerNode": 1}},
            "template": {
                "spec": {
                    "failurePolicy": {"maxRestarts": 10},
                    "replicatedJobs": [{"name": "node", "template": template}],
                }
            },
        },
    }
    job = {
        "apiVersion": TRAINER,
        "kind": "TrainJob",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"runtimeRef": {"name": "host"}, "trainer": {"numNodes": NODES}},
    }
    return [runtime, job]
