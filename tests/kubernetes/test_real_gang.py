"""Kubernetes' own gang scheduling, on a real cluster of 1.37 that has it: `make kube-test` with

HOLDFAST_KUBE_GATES=GenericWorkload=true HOLDFAST_KUBE_APIS=scheduling.k8s.io/v1beta1=true
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kubernetes_asyncio")
pytest.importorskip("yaml")
import yaml
from kubejobs import job
from realkube import (
    IMAGE,
    MACHINES,
    NAMESPACE,
    STEPS,
    TRAIN,
    Scene,
    cluster,
    holdfast,
    is_true,
    no_operator,
    path_of,
    reached,
    until,
    word,
)

from holdfast.kubernetes.client.api import Api, ApiError
from holdfast.kubernetes.objects import render
from holdfast.kubernetes.objects.check import convert
from holdfast.kubernetes.objects.resource import job_path
from holdfast.kubernetes.objects.schema import crd_text

pytestmark = [pytest.mark.kube, pytest.mark.nightly, pytest.mark.timeout(1500)]
NAME = "gang"
GROUP = render.group_path(render.GROUP_VERSIONS["PodGroup"], NAMESPACE, NAME)


async def is_served(api: Api) -> bool:
    try:
        await api.list_all(GROUP.rpartition("/")[0], {})
    except ApiError as error:
        if error.status != 404:
            raise
        return False
    return True


async def submit(api: Api, home: Path) -> None:
    """As the command line makes it, and nobody follows."""
    options = [
        "--image",
        IMAGE,
        "--namespace",
        NAMESPACE,
        "--job",
        NAME,
        "--nnodes",
        "2",
        "--node-memory",
        "1500Mi",
        "--gang",
        "PodGroup",
    ]
    argv = [
        "run",
        "--engine",
        "kubernetes",
        *options,
        "--dry-run",
        str(TRAIN),
        str(STEPS),
        "0.25",
        "/tmp/at-once",
    ]
    shown = await asyncio.to_thread(holdfast, home, *argv)
    assert shown.returncode == 0, shown.stderr
    for made in filter(None, yaml.safe_load_all(shown.stdout)):
        await api.apply(path_of(made), made, manager="tests")


async def nodes(api: Api) -> dict[str, dict[str, Any]]:
    found = (await api.list_all(f"/api/v1/namespaces/{NAMESPACE}/pods", {}))[0]
    return {one["metadata"]["name"]: one for one in found if f"{NAME}-n" in one["metadata"]["name"]}


async def bound(api: Api) -> set[str]:
    """Machines of nodes that nobody has given up."""
    there = (await nodes(api)).values()
    return {
        one["spec"]["nodeName"]
        for one in there
        if "nodeName" in one["spec"] and "deletionTimestamp" not in one["metadata"]
    }


async def members(api: Api) -> int | None:
    return render.group_members(await api.get(GROUP))


async def step(api: Api) -> int:
    """That the job trains at, at full strength; 0: it does not."""
    made = await api.get(job_path(NAMESPACE, NAME))
    full = is_true(made, "Training") and is_true(made, "FullStrength")
    return int(made["status"].get("progress", {}).get("step") or 0) if full else 0


async def trains(api: Api, beyond: int) -> int:
    async def further() -> int:
        found = await step(api)
        return found if found > beyond else 0

    return int(await until(further, f"it trains at full strength, beyond step {beyond}"))


async def change(api: Api, **spec: Any) -> None:
    await api.merge(job_path(NAMESPACE, NAME), {"spec": spec})


def test_a_real_scheduler_takes_the_objects() -> None:
    """As they are rendered, without an operator and without a program in the pods: five nodes, and four machines."""

    async def act() -> None:
        async with reached() as api:
            if not await is_served(api):
                pytest.skip("this cluster does not serve scheduling.k8s.io/v1beta1")
            # It would make this job's pods, too.
            async with no_operator(api):
                await scene(api)

    async def scene(api: Api) -> None:
        for made in (
            yaml.safe_load(crd_text()),
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "gangs"}},
        ):
            await api.apply(path_of(made), made, manager="tests")
        asked = job(
            metadata={"name": "five", "namespace": "gangs"},
            spec__nodes=5,
            spec__scheduling={"gang": "PodGroup"},
        )
        # A person's cordons are no matter here.
        asked["spec"]["template"]["spec"]["tolerations"] = [{"operator": "Exists"}]
        # Until the definition is served.
        made = await until(
            lambda: api.apply(job_path("gangs", "five"), asked, manager="tests"), "the job is made"
        )
        mine = convert(made)
        group, pods = (
            render.group_path(render.GROUP_VERSIONS["PodGroup"], "gangs", "five"),
            "/api/v1/namespaces/gangs/pods",
        )
        assert render.group_members(await api.create(group.rpartition("/")[0], render.group(mine))) == 5

        async def make(number: int) -> None:
            pod = render.agent_pod(mine, number)
            # Nothing is to run: whether a pod is bound is all that is asked.
            pod["spec"]["volumes"] = []
            for one in pod["spec"]["containers"]:
                one["volumeMounts"] = []
            taken = await api.create(pods, pod)
            assert taken["spec"]["schedulingGroup"] == {"podGroupName": "five"}

        async def machines() -> dict[str, str]:
            found = (await api.list_all(pods, {}))[0]
            return {x["metadata"]["name"]: x["spec"]["nodeName"] for x in found if "nodeName" in x["spec"]}

        async def is_told() -> Any:
            told = word(await api.get(group), "PodGroupInitiallyScheduled")
            return told if told is not None and told["status"] == "False" else None

        for number in range(5):
            await make(number)
        print("--- five of four:", await until(is_told, "the group does not fit"))
        assert await machines() == {}
        await api.merge(group, render.resized_group(render.GROUP_VERSIONS["PodGroup"], 3))

        async def four() -> bool:
            return len(await machines()) == 4

        await until(four, "with a minimum of three, all that fit are bound")
        print("--- bound:", await machines())
        print("--- the group:", word(await api.get(group), "PodGroupInitiallyScheduled"))
        # A node is lost, and replaced under another number.
        lost = sorted(await machines())[0]
        there = await api.get(f"{pods}/{lost}")
        await api.request(
            "DELETE",
            f"{pods}/{lost}",
            None,
            {"gracePeriodSeconds": 0, "preconditions": {"uid": there["metadata"]["uid"]}},
        )
        await make(5)
        await until(four, "one of those that wait has its machine")
        print("--- replaced:", await machines())
        found = await api.get(group)
        await api.delete(group, found["metadata"]["uid"])
        print(
            "--- deleted:",
            (await api.get(group))["metadata"].get("deletionTimestamp"),
            found["metadata"].get("finalizers"),
        )
        # Before there is an operator again. Its pods go with it.
        await api.delete(job_path("gangs", "five"), made["metadata"]["uid"])

        async def empty() -> bool:
            return not (await api.list_all(pods, {}))[0]

        await until(empty, "the pods are gone")

    asyncio.run(act())


def test_nodes_are_bound_together_or_not_at_all(play: Callable[[Scene], None], home: Path) -> None:
    async def scene(api: Api) -> None:
        if not await is_served(api):
            pytest.skip("this cluster does not serve scheduling.k8s.io/v1beta1")
        for machine in MACHINES[1:]:
            await api.merge(f"/api/v1/nodes/{machine}", {"spec": {"unschedulable": True}})
        await submit(api, home)

        async def is_told() -> Any:
            told = word(await api.get(GROUP), "PodGroupInitiallyScheduled")
            return told is not None and told["status"] == "False" and told["reason"] == "Unschedulable"

        await until(is_told, "the group does not fit")
        assert await members(api) == 2
        assert not await bound(api), "one of two is bound"
        scheduled = word(await api.get(job_path(NAMESPACE, NAME)), "Scheduled")
        print("--- the group:", word(await api.get(GROUP), "PodGroupInitiallyScheduled"))
        print("--- the job:", scheduled)
        print("--- the pods:", [word(one, "PodScheduled") for one in (await nodes(api)).values()])
        # Room for both.
        for machine in MACHINES[1:3]:
            await api.merge(f"/api/v1/nodes/{machine}", {"spec": {"unschedulable": None}})
        at = await trains(api, 3)
        assert len(await bound(api)) == 2
        assert is_true(await api.get(GROUP), "PodGroupInitiallyScheduled")
        first = (await api.get(GROUP))["metadata"]["uid"]
        # A lost machine: the replacement is bound in the same group, onto the third one.
        there = await bound(api)
        coordinator = (await api.get(job_path(NAMESPACE, NAME)))["status"]["coordinator"]["pod"]
        pod = await api.get(f"/api/v1/namespaces/{NAMESPACE}/pods/{coordinator}")
        lost = next(one for one in sorted(there) if one != pod["spec"]["nodeName"])
        cluster("kill", lost)
        at = await trains(api, at + 3)
        assert lost not in await bound(api)
        cluster("boot", lost)
        # Fewer nodes than the group binds together are fewer than the job can train on: both stay as they are.
        with pytest.raises(ApiError, match=r"from status\.fewest to status\.most"):
            await change(api, nodes=1)
        assert await members(api) == 2
        at = await trains(api, at + 3)
        # Another run has another group.
        await change(api, runPolicy={"suspend": True})

        async def is_gone() -> bool:
            try:
                await api.get(GROUP)
            except ApiError as error:
                return error.status == 404 and not await nodes(api)
            return False

        await until(is_gone, "the group of the first run is gone")
        await change(api, runPolicy={"suspend": False})
        await trains(api, 3)
        assert (await api.get(GROUP))["metadata"]["uid"] != first

    play(scene)
