"""A real Kueue beside the test cluster: its definitions, its webhooks by address, its controller as a process."""

from __future__ import annotations

import asyncio
import base64
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from realkube import NAMESPACE, until

from holdfast.kubernetes.client.api import Api
from holdfast.kubernetes.objects.kueue import API_VERSION

SLOT = int(os.environ.get("HOLDFAST_KUBE_SLOT", "0"))
HOST, PORT, READY_PORT = f"10.79.{SLOT}.1", 19543, 18181 + SLOT
OWN_CERTIFICATE = Path("/etc/kueue/metrics/certs")
"""Kueue 0.15 wants the certificate of its metrics there, whatever its options say."""
READY_S = 60.0
RACK = "topology.holdfast.dev/rack"
"""A label of machines."""
NAME = "kubernetes.io/metadata.name"
"""Of a namespace, as a label."""


def programs() -> Path:
    """The folder with `kueue` and `kueue.yaml`; the recipe in tests/kubernetes/programs makes both."""
    return Path(os.environ.get("KUBE_BIN", "/nowhere"))


def is_there() -> bool:
    return (programs() / "kueue").exists() and (programs() / "kueue.yaml").exists()


@asynccontextmanager
async def kueue(api: Api, pods_ready_s: int, *, knows_us: bool = True) -> AsyncIterator[None]:
    """Runs it, with its integration of pods.

    Args:
        pods_ready_s: a Workload whose pods are not ready for so long is evicted.
        knows_us: its configuration has the line that docs/kubernetes.md asks for. Else it manages all pods of `research`.
    """
    folder = Path(os.environ["HOLDFAST_KUBE_DIR"]) / "kueue"
    folder.mkdir(exist_ok=True)
    _certificate(folder)
    objects = [*_objects(folder), _pods_hook(folder)]
    hooks = [one for one in objects if "Webhook" in one["kind"]]
    for made in objects:
        if made not in hooks:
            await apply(api, _path(made), made)
    for made in objects:
        if made["kind"] == "CustomResourceDefinition":
            await until(partial(_served, api, _path(made)), f"{made['metadata']['name']} is served")
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "kueue-system"}}
    await apply(api, "/api/v1/namespaces/kueue-system", namespace)
    process = _start(folder, _configuration(folder, pods_ready_s, knows_us))
    try:
        await _ready(process, folder)
        for made in hooks:
            await apply(api, _path(made), made)
        yield
    finally:
        if process.poll() is None:
            for plural in ("localqueues", "clusterqueues"):
                await until(partial(_none_left, api, plural), f"no {plural} are left")
        # A hook whose program is gone would refuse what others make.
        for made in await _there(api, hooks):
            await api.request("DELETE", _path(made))
        process.terminate()
        process.wait(30)


async def apply(api: Api, path: str, made: dict[str, Any]) -> None:
    """A server that has a dozen definitions to take in may not answer in time."""
    await until(partial(api.apply, path, made, manager="tests"), f"{path} is there")


def _start(folder: Path, configuration: dict[str, Any]) -> subprocess.Popen[bytes]:
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(configuration))
    command = [str(programs() / "kueue"), f"--config={config}", f"--kubeconfig={os.environ['KUBECONFIG']}"]
    with (folder / "kueue.log").open("wb") as log:
        return subprocess.Popen(
            [*command, "--feature-gates=VisibilityOnDemand=false"], stdout=log, stderr=log
        )


async def _none_left(api: Api, plural: str) -> bool:
    """Removes them. Without Kueue the API server could not convert one, and then lists none of its kind: no namespace of the cluster
    could be deleted any more."""
    there = (await api.list_all(f"/apis/{API_VERSION}/{plural}", {}))[0]
    for one in there:
        metadata = one["metadata"]
        where = f"namespaces/{metadata['namespace']}/" if "namespace" in metadata else ""
        if "deletionTimestamp" not in metadata:
            await api.request("DELETE", f"/apis/{API_VERSION}/{where}{plural}/{metadata['name']}")
    return not there


async def _there(api: Api, objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    folders = {_path(one).rpartition("/")[0] for one in objects}
    found = [one for folder in folders for one in (await api.list_all(folder, {}))[0]]
    names = {one["metadata"]["name"] for one in found}
    return [one for one in objects if one["metadata"]["name"] in names]


async def _served(api: Api, path: str) -> bool:
    conditions = (await api.get(path)).get("status", {}).get("conditions") or ()
    return any(one["type"] == "Established" and one["status"] == "True" for one in conditions)


def _certificate(folder: Path) -> None:
    pki = folder.parent / "pki"
    names = folder / "names"
    names.write_text(f"subjectAltName=IP:{HOST}\n")
    key, asked, made = folder / "tls.key", folder / "tls.csr", folder / "tls.crt"
    request = ["openssl", "req", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=kueue"]
    _run(*request, "-keyout", key, "-out", asked)
    sign = ["openssl", "x509", "-req", "-in", asked, "-CA", pki / "ca.crt", "-CAkey", pki / "ca.key"]
    _run(*sign, "-CAcreateserial", "-days", "30", "-out", made, "-extfile", names)
    OWN_CERTIFICATE.mkdir(parents=True, exist_ok=True)
    for one in (key, made):
        (OWN_CERTIFICATE / one.name).write_bytes(one.read_bytes())


def _run(*command: object) -> None:
    subprocess.run([str(part) for part in command], check=True, capture_output=True, timeout=60)


def _objects(folder: Path) -> list[dict[str, Any]]:
    text = (programs() / "kueue.yaml").read_text()
    text = text.replace("URL_", f"https://{HOST}:{PORT}").replace("CA_", _authority(folder))
    return [one for one in yaml.safe_load_all(text) if one]


def _authority(folder: Path) -> str:
    return base64.b64encode((folder.parent / "pki" / "ca.crt").read_bytes()).decode()


def _pods_hook(folder: Path) -> dict[str, Any]:
    """As in Kueue's release: it sees each pod that is made, and holds back those that it manages."""
    hook = {
        "name": "mpod.kb.io",
        "clientConfig": {"url": f"https://{HOST}:{PORT}/mutate--v1-pod", "caBundle": _authority(folder)},
        "rules": [
            {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
        ],
        "namespaceSelector": {"matchExpressions": [{"key": NAME, "operator": "In", "values": [NAMESPACE]}]},
        "failurePolicy": "Fail",
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
    }
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": "kueue-pods"},
        "webhooks": [hook],
    }


def _path(made: dict[str, Any]) -> str:
    plural = f"{made['kind'].lower()}s"
    return f"/apis/{made['apiVersion']}/{plural}/{made['metadata']['name']}"


def _configuration(folder: Path, pods_ready_s: int, knows_us: bool) -> dict[str, Any]:
    integrations: dict[str, Any] = {"frameworks": ["batch/job", "pod"]}
    if knows_us:
        integrations["externalFrameworks"] = ["HoldfastJob.v1alpha1.holdfast.dev"]
    return {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "health": {"healthProbeBindAddress": f"127.0.0.1:{READY_PORT}"},
        "metrics": {"bindAddress": "0"},
        "webhook": {"host": HOST, "port": PORT, "certDir": str(folder)},
        "internalCertManagement": {"enable": False},
        "leaderElection": {"leaderElect": False},
        "waitForPodsReady": {"timeout": f"{pods_ready_s}s"},
        "integrations": integrations,
        "manageJobsWithoutQueueName": not knows_us,
        "managedJobsNamespaceSelector": {
            "matchExpressions": [
                {
                    "key": NAME,
                    "operator": "NotIn",
                    "values": ["kube-system", "kueue-system", "holdfast-system"],
                }
            ]
        },
    }


async def _ready(process: subprocess.Popen[bytes], folder: Path) -> None:
    async with asyncio.timeout(READY_S), aiohttp.ClientSession() as session:
        while True:
            assert process.poll() is None, (folder / "kueue.log").read_text()[-3000:]
            try:
                async with session.get(f"http://127.0.0.1:{READY_PORT}/readyz") as answer:
                    if await answer.text() == "ok":
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.2)


def queue_objects(memory: str) -> dict[str, dict[str, Any]]:
    """By path: a flavor whose machines have an even number, a queue of this much memory, and priorities."""
    cluster = f"/apis/{API_VERSION}"
    quota = [{"name": "cpu", "nominalQuota": "20"}, {"name": "memory", "nominalQuota": memory}]
    group = {"coveredResources": ["cpu", "memory"], "flavors": [{"name": "even", "resources": quota}]}
    made = {
        f"{cluster}/resourceflavors/even": {
            "kind": "ResourceFlavor",
            "spec": {"nodeLabels": {"topology.kubernetes.io/zone": "z0"}},
        },
        f"{cluster}/clusterqueues/all": {
            "kind": "ClusterQueue",
            "spec": {
                "namespaceSelector": {},
                "resourceGroups": [group],
                "preemption": {"withinClusterQueue": "LowerPriority"},
            },
        },
    }
    made |= {
        f"{cluster}/workloadpriorityclasses/{name}": {"kind": "WorkloadPriorityClass", "value": value}
        for name, value in (("urgent", 1000), ("base", 10), ("further", 1))
    }
    return {
        path: {"apiVersion": API_VERSION, "metadata": {"name": path.rpartition("/")[2]}, **one}
        for path, one in made.items()
    }


def rack_objects() -> dict[str, dict[str, Any]]:
    """By path: racks of machines, a flavor of machines that have one, and a queue where Kueue chooses among them."""
    cluster = f"/apis/{API_VERSION}"
    quota = [{"name": "cpu", "nominalQuota": "20"}, {"name": "memory", "nominalQuota": "20Gi"}]
    group = {"coveredResources": ["cpu", "memory"], "flavors": [{"name": "racked", "resources": quota}]}
    made = {
        f"{cluster}/topologies/racks": {
            "kind": "Topology",
            "spec": {"levels": [{"nodeLabel": RACK}, {"nodeLabel": "kubernetes.io/hostname"}]},
        },
        f"{cluster}/resourceflavors/racked": {
            "kind": "ResourceFlavor",
            "spec": {"nodeLabels": {"kubernetes.io/os": "linux"}, "topologyName": "racks"},
        },
        f"{cluster}/clusterqueues/racks": {
            "kind": "ClusterQueue",
            "spec": {"namespaceSelector": {}, "resourceGroups": [group]},
        },
    }
    return {
        path: {"apiVersion": API_VERSION, "metadata": {"name": path.rpartition("/")[2]}, **one}
        for path, one in made.items()
    }


def local_queue(namespace: str, name: str = "team-a", of: str = "all") -> tuple[str, dict[str, Any]]:
    """Its path and itself."""
    path = f"/apis/{API_VERSION}/namespaces/{namespace}/localqueues/{name}"
    metadata = {"name": name, "namespace": namespace}
    spec = {"clusterQueue": of}
    return path, {"apiVersion": API_VERSION, "kind": "LocalQueue", "metadata": metadata, "spec": spec}


def urgent_job(name: str, image: str, memory: str) -> dict[str, Any]:
    """Of somebody else, who comes first."""
    labels = {"kueue.x-k8s.io/queue-name": "team-a", "kueue.x-k8s.io/priority-class": "urgent"}
    container = {
        "name": "main",
        "image": image,
        "command": ["python3", "-c", "import time; time.sleep(600)"],
        "resources": {"requests": {"cpu": "100m", "memory": memory}},
    }
    pod = {"spec": {"containers": [container], "restartPolicy": "Never", "terminationGracePeriodSeconds": 1}}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "namespace": "others", "labels": labels},
        "spec": {"suspend": True, "template": pod},
    }
