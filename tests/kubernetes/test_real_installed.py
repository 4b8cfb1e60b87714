"""The operator as an administrator installs it: two pods with an account of their own, and nobody else who operates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kubernetes_asyncio")
pytest.importorskip("yaml")
from realkube import (
    FOLDER,
    LEASE,
    OPERATOR,
    Job,
    Scene,
    Undisturbed,
    is_true,
    node_of,
    operators,
    pair,
    until,
)

from holdfast.engines.client import Announcement
from holdfast.kubernetes.client.api import ANSWER_S, Api, open_client

pytestmark = [pytest.mark.kube, pytest.mark.nightly, pytest.mark.timeout(900)]
SYSTEM = "/api/v1/namespaces/holdfast-system"
ACCOUNT = "system:serviceaccount:holdfast-system:holdfast-operator"
MAY_NOT = (
    ("list", "", "secrets", ""),
    ("create", "", "pods", "exec"),
    ("patch", "", "nodes", ""),
    ("create", "apps", "deployments", ""),
    ("create", "rbac.authorization.k8s.io", "clusterroles", ""),
)


def test_two_operators_in_pods_and_the_leading_one_deleted(
    play: Callable[[Scene], None], home: Path, undisturbed: Undisturbed
):
    """Each of them replaces a node that somebody deleted, with the rights of the manifest and no others."""

    async def scene(api: Api) -> None:
        known = await both_ready(api)
        # An earlier scene may have cut the power of a machine that has one.
        before = {name: await restarts(api, name) for name in known}
        for asked in MAY_NOT:
            assert not await may(api, *asked), asked
        assert await may(api, "create", "", "pods", ""), "the account is not the one that is bound"
        async with pair(api, home, "installed") as (job, status):
            status = await replaced(api, job, status)
            leader = await leading(api, known)
            assert leader, "nobody leads"
            assert await refusals(api, leader) == []
            await delete(api, f"{SYSTEM}/pods/{leader}")

            async def other() -> str:
                holder = await leading(api, known)
                return "" if holder == leader else holder

            successor = await until(other, "another operator leads")
            print(f"{leader} led, then {successor}; there were {sorted(known)}")
            await replaced(api, job, status)
            await job.stops_as(undisturbed)
            made = await job.condition("Failed")
            assert made["status"]["reason"] == "enough", "the operator has not read how the job ended"
            for name in await both_ready(api):
                assert await leading(api, known), "nobody leads"
                assert await refusals(api, name) == []
                assert await restarts(api, name) == before.get(name, 0), name

    play(scene)


async def both_ready(api: Api) -> set[str]:
    """Their names. They are as the manifest wants them, in a namespace where Pod Security is enforced."""
    namespace = await api.get("/api/v1/namespaces/holdfast-system")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"

    async def there() -> set[str]:
        stays = [pod for pod in await operators(api) if "deletionTimestamp" not in pod["metadata"]]
        assert all(pod["spec"]["serviceAccountName"] == ACCOUNT.rpartition(":")[2] for pod in stays)
        ready = len(stays) == 2 and all(is_true(pod, "Ready") for pod in stays)
        return {pod["metadata"]["name"] for pod in stays} if ready else set()

    assert (await api.get(OPERATOR))["spec"]["replicas"] == 2
    found: set[str] = await until(there, "two operators are ready")
    return found


async def restarts(api: Api, name: str) -> int:
    """How often the kubelet started the container of an operator's pod again."""
    (told,) = (await api.get(f"{SYSTEM}/pods/{name}"))["status"]["containerStatuses"]
    return int(told["restartCount"])


async def leading(api: Api, known: set[str]) -> str:
    """Whose Lease it is; empty: nobody's. known: the operators' pods so far, with those of now afterwards.

    Fails where it is somebody's who is none of them.
    """
    # The Lease first: the pod of a holder was made before.
    holder = (await api.get(LEASE))["spec"].get("holderIdentity") or ""
    known |= {pod["metadata"]["name"] for pod in await operators(api)}
    # The host's name, which is the pod's, and a number of the process.
    name = holder.rpartition("-")[0]
    assert name in known | {""}, f"{holder} leads, and the operators are {sorted(known)}"
    return name


async def replaced(api: Api, job: Job, status: dict[str, Any]) -> dict[str, Any]:
    """A node's pod is deleted, as a person does it; two train, and there is a spare again, which only an operator makes."""
    lost = node_of(status, 1)
    await delete(api, f"{FOLDER}/pods/{lost}")

    def left(said: Announcement) -> bool:
        return said.kind == "status" and all(worker.node != lost for worker in said.value.workers)

    await job.see(left)
    after = await job.training(2, beyond=status.step + 10, spares=1)
    before = {worker.node for worker in status.workers}
    assert {worker.node for worker in after.workers} - before, "no pod was made"
    return after


async def delete(api: Api, path: str) -> None:
    made = await api.get(path)
    await api.delete(path, made["metadata"]["uid"])


async def may(api: Api, verb: str, group: str, resource: str, part: str) -> bool:
    """What the API server's own authorizer says of the operators' account."""
    asked = {"verb": verb, "group": group, "resource": resource, "subresource": part, "namespace": "research"}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "metadata": {"name": ""},
        "spec": {"user": ACCOUNT, "resourceAttributes": asked},
    }
    told = await api.create("/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
    return bool(told["status"]["allowed"])


async def refusals(api: Api, pod: str) -> list[str]:
    """What the operator in this pod was refused: the API server says `forbidden`, and the operator tells each."""
    async with open_client() as transport:
        answer = await transport.call_api(
            f"{SYSTEM}/pods/{pod}/log",
            "GET",
            auth_settings=["BearerToken"],
            _preload_content=False,
            _request_timeout=ANSWER_S,
        )
        async with answer:
            text = await answer.text()
    assert answer.status == 200, text
    return [line for line in text.splitlines() if "forbidden" in line.lower()]
