"""Another machine in place of one that stays marked: the real API server has the objects of Cluster API and Karpenter, the test acts
as their controllers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kubernetes_asyncio")
pytest.importorskip("yaml")
from apiproxy import behind_proxy
from realkube import Scene, Undisturbed, cluster, gone, holdfast, pair, trained_apart, until, word

from holdfast.kubernetes.client.api import Api
from holdfast.kubernetes.objects.machine import FAULT_CONDITION

pytestmark = [pytest.mark.kube, pytest.mark.nightly, pytest.mark.timeout(900)]
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
FINALIZER = "test.holdfast.dev/drain"
RECORDS = "/api/v1/namespaces/holdfast-system/configmaps/holdfast-replacements"


@pytest.mark.parametrize("way", ["karpenter", "cluster-api"])
def test_another_machine_is_asked_for(
    play: Callable[[Scene], None], home: Path, undisturbed: Undisturbed, way: str
):
    """A GPU falls off the bus. The machine is marked and its owner's object deleted, once; its Node goes, and the job trains on."""

    async def scene(api: Api) -> None:
        options = ("--mark", "taint", "--replace", way, "--replace-after", "2")
        async with (
            kind_of_owner(api, way) as (folder, kind),
            behind_proxy(api, home, *options),
            pair(api, home, f"replaced-{way}") as (job, status),
        ):
            node, machine = await trained_apart(job, status)
            path = await owned(api, folder, kind, machine)
            told = await asyncio.to_thread(
                holdfast, home, "fault", "xid=79", f"node={node}", "--job", job.name
            )
            assert told.returncode == 0, told.stdout + told.stderr

            async def deleted() -> bool:
                return "deletionTimestamp" in (await api.get(path))["metadata"]

            await until(deleted, "its owner is deleted")

            async def said() -> bool:
                shown = word(await api.get(f"/api/v1/nodes/{machine}"), FAULT_CONDITION)
                return shown is not None and "is deleted, so that it is replaced" in shown["message"]

            await until(said, "the mark says what was asked")
            records = json.loads((await api.get(RECORDS))["data"]["records.json"])
            assert [one["machine"] for one in records] == [machine]
            # The controller: no node is there any more, the machine is switched off, and its Node goes.
            uid = (await api.get(f"/api/v1/nodes/{machine}"))["metadata"]["uid"]
            cluster("kill", machine)
            await api.merge(path, {"metadata": {"finalizers": None}})
            if kind == "Machine":
                await api.delete(f"/api/v1/nodes/{machine}", uid)
            await until(lambda: gone(api, f"/api/v1/nodes/{machine}"), f"the Node of {machine} is gone")
            status = await job.training(2, beyond=status.step + 5, spares=1)
            assert len(json.loads((await api.get(RECORDS))["data"]["records.json"])) == 1
            await job.stops_as(undisturbed, incidents=(1,))

    play(scene)


@asynccontextmanager
async def kind_of_owner(api: Api, way: str) -> AsyncIterator[tuple[str, str]]:
    """Its definition is there, and no record of a scene before. Yields the folder of its objects, and the kind."""
    group, version, kind, scope, folder = (
        ("karpenter.sh", "v1", "NodeClaim", "Cluster", "/apis/karpenter.sh/v1/nodeclaims")
        if way == "karpenter"
        else (
            "cluster.x-k8s.io",
            "v1beta2",
            "Machine",
            "Namespaced",
            "/apis/cluster.x-k8s.io/v1beta2/namespaces/default/machines",
        )
    )
    plural = kind.lower() + "s"
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    metadata: dict[str, Any] = {"name": f"{plural}.{group}"}
    if group.endswith("k8s.io"):
        metadata["annotations"] = {"api-approved.kubernetes.io": "unapproved, for a test"}
    spec = {
        "group": group,
        "scope": scope,
        "names": {"kind": kind, "plural": plural, "singular": kind.lower(), "listKind": f"{kind}List"},
        "versions": [
            {"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
        ],
    }
    made = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": metadata,
        "spec": spec,
    }
    there = await api.create(DEFINITIONS, made)

    async def served() -> bool:
        return not await gone(api, folder)

    try:
        await until(served, f"{kind} is served")
        yield folder, kind
    finally:
        if not await gone(api, RECORDS):
            await api.delete(RECORDS, (await api.get(RECORDS))["metadata"]["uid"])
        await api.delete(f"{DEFINITIONS}/{plural}.{group}", there["metadata"]["uid"])


async def owned(api: Api, folder: str, kind: str, machine: str) -> str:
    """The machine's Node has an owner, as its controller would have written it. Returns the owner's path."""
    api_version = folder.removeprefix("/apis/").split("/namespaces/")[0].removesuffix("/nodeclaims")
    name = f"pool-{machine}"
    made = await api.create(
        folder,
        {
            "apiVersion": api_version,
            "kind": kind,
            "metadata": {"name": name, "finalizers": [FINALIZER]},
            "spec": {},
        },
    )
    notes = {"cluster.x-k8s.io/machine": name, "cluster.x-k8s.io/cluster-namespace": "default"}
    owner = {"apiVersion": api_version, "kind": kind, "name": name, "uid": made["metadata"]["uid"]}
    metadata = {"annotations": notes} if kind == "Machine" else {"ownerReferences": [owner]}
    await api.merge(f"/api/v1/nodes/{machine}", {"metadata": metadata})
    return f"{folder}/{name}"
