"""A job of a thousand nodes beside one that trains. Its machines have no kubelet: kwok says what one would, and no agent runs."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kubernetes_asyncio")
pytest.importorskip("yaml")
from kubejobs import job as asked
from realkube import (
    FOLDER,
    IMAGE,
    NAMESPACE,
    PATIENCE_S,
    Scene,
    Undisturbed,
    cluster,
    operators,
    pair,
    trained_apart,
    until,
)

from holdfast.kubernetes.client.api import Api
from holdfast.kubernetes.objects.resource import job_path

KWOK = Path(os.environ.get("KUBE_BIN", "/nowhere")) / "kwok"
pytestmark = [
    pytest.mark.kube,
    pytest.mark.nightly,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not KWOK.exists(), reason="kwok is not in KUBE_BIN"),
]
NODES, MACHINES, PODS_OF_A_MACHINE = 1000, 20, 60
TAINT = {"key": "tests.holdfast.dev/kwok", "value": "fake", "effect": "NoSchedule"}
MOST_BYTES = 300e6
"""The operator's memory."""


def machine(number: int) -> dict[str, Any]:
    room = {"cpu": "64", "memory": "512Gi", "pods": str(PODS_OF_A_MACHINE)}
    labels = {"kubernetes.io/hostname": f"fake{number}", "tests.holdfast.dev/kwok": "fake"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": f"fake{number}",
            "labels": labels,
            "annotations": {"kwok.x-k8s.io/node": "fake"},
        },
        "spec": {"taints": [TAINT]},
        "status": {"capacity": room, "allocatable": room},
    }


@asynccontextmanager
async def machines_of_kwok(api: Api) -> AsyncIterator[None]:
    """Beside the real ones, whose pods keep away from them."""
    uids: list[str] = []
    cluster("kwok", "start")
    try:
        for number in range(MACHINES):
            uids.append((await api.create("/api/v1/nodes", machine(number)))["metadata"]["uid"])
        yield
    finally:
        for number, uid in enumerate(uids):
            await api.delete(f"/api/v1/nodes/fake{number}", uid)
        cluster("kwok", "stop")


async def pods_of_large(api: Api) -> list[dict[str, Any]]:
    """Those that stay."""
    query = {"labelSelector": "holdfast.dev/job=large,holdfast.dev/role=node"}
    pods = (await api.list_all(f"{FOLDER}/pods", query))[0]
    return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]


async def operators_bytes(api: Api) -> list[int]:
    """What each operator holds, by its kubelet's account."""
    found = []
    for pod in await operators(api):
        path = f"/api/v1/nodes/{pod['spec']['nodeName']}/proxy/stats/summary"
        for one in (await api.get(path))["pods"]:
            if one["podRef"]["uid"] == pod["metadata"]["uid"]:
                found += [int(container["memory"]["rssBytes"]) for container in one["containers"]]
    return found


def test_a_thousand_nodes_beside_a_job_that_trains(
    play: Callable[[Scene], None], home: Path, undisturbed: Undisturbed
):
    """A machine is lost while they are made. What one job asks for is not in another one's way."""

    async def scene(api: Api) -> None:
        container = {"name": "worker", "image": IMAGE}
        spec = {
            "containers": [container],
            "tolerations": [TAINT | {"operator": "Equal"}],
            "nodeSelector": {TAINT["key"]: TAINT["value"]},
        }
        large = asked(
            metadata={"name": "large", "namespace": NAMESPACE},
            spec__nodes=NODES,
            spec__minNodes=1,
            spec__topology={"onePerNode": False},
            spec__template__spec=spec,
            spec__coordinator={"image": IMAGE},
        )
        path = job_path(NAMESPACE, "large")

        def there(count: int) -> Callable[[], Any]:
            async def true() -> bool:
                pods = await pods_of_large(api)
                return len(pods) == count and all(pod["status"]["phase"] == "Running" for pod in pods)

            return true

        async with machines_of_kwok(api), pair(api, home, "small") as (job, status):
            await api.create(path.rpartition("/")[0], large)

            async def are_made() -> bool:
                return len(await pods_of_large(api)) > NODES / 4

            await until(are_made, "a part of the pods is made")
            lost, away = await trained_apart(job, status)
            cluster("kill", away)
            await job.training(2, beyond=status.step + 5)
            await job.gives_up(lost)
            await until(there(NODES), f"{NODES} pods run", 2 * PATIENCE_S)
            cluster("boot", away)
            status = await job.training(2, beyond=status.step + 5, spares=1)
            before = {pod["metadata"]["name"] for pod in await pods_of_large(api)}
            gone = (await pods_of_large(api))[NODES // 2]["metadata"]
            await api.delete(f"{FOLDER}/pods/{gone['name']}", gone["uid"])
            await until(there(NODES), f"another pod in the place of {gone['name']}")
            now = {pod["metadata"]["name"] for pod in await pods_of_large(api)}
            assert len(now - before) == 1
            await api.merge(path, {"spec": {"nodes": NODES - 10}})

            # The coordinator chooses who leaves, and here it has met nobody.
            async def wants_fewer() -> bool:
                counts = (await api.get(path))["status"]["nodes"]
                return bool(counts["wanted"] == NODES - 10)

            await until(wants_fewer, "ten fewer are wanted")
            held = await operators_bytes(api)
            print(f"the operators hold {[round(one / 1e6) for one in held]} MB")
            assert len(held) == 2
            assert max(held) < MOST_BYTES
            made = await api.get(path)
            await api.delete(path, made["metadata"]["uid"])
            await until(there(0), "no pod of the large one is left", 2 * PATIENCE_S)
            await job.stops_as(undisturbed, incidents=(1,))

    play(scene)
