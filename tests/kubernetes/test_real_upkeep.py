"""What is done to a real Kubernetes, and to what belongs to a job, while the job trains: outages, upgrades, labels, a namespace."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml
from realkube import (
    FOLDER,
    LEASE,
    LOOK_S,
    MACHINES,
    NAMESPACE,
    OPERATOR,
    PACE_S,
    PATIENCE_S,
    STEPS,
    Job,
    Scene,
    Undisturbed,
    cluster,
    cordon,
    gone,
    is_true,
    no_operator,
    node_of,
    operators,
    pair,
    pods_of,
    trained_apart,
    until,
)

from holdfast.kubernetes.client.api import Api, ApiError, NoApiAnswer
from holdfast.kubernetes.objects.resource import job_path
from holdfast.kubernetes.objects.schema import crd_text

pytestmark = [pytest.mark.kube, pytest.mark.nightly, pytest.mark.timeout(900)]


def test_a_coordinator_is_lost_while_the_api_server_is_down(
    play: Callable[[Scene], None], home: Path, undisturbed: Undisturbed
):
    """Nobody can make another one. The nodes wait for it, and all is well when the API server is back."""

    async def scene(api: Api) -> None:
        async with pair(api, home, "headless") as (job, status):
            term = (await job.object())["status"]["term"]
            seat = await job.machine(await job.coordinator())
            cluster("apiserver", "stop")
            try:
                with pytest.raises(NoApiAnswer):
                    await job.object()
                cluster("kill", seat)
            finally:
                cluster("apiserver", "start")
            await job.training(2, beyond=status.step + 5)
            after = (await job.object())["status"]
            assert after["term"] > term
            assert after["run"] == 1
            cluster("boot", seat)
            await job.training(2, beyond=status.step + 10, spares=1)
            await job.stops_as(undisturbed)

    play(scene)


def test_the_leading_operator_is_lost_with_the_coordinator(
    play: Callable[[Scene], None], home: Path, undisturbed: Undisturbed
):
    """And with a node, on one machine. The other operator has never heard the coordinator: what the first one heard is in the status."""

    async def scene(api: Api) -> None:
        async def both_are_there() -> bool:
            ready = [pod for pod in await operators(api) if is_true(pod, "Ready")]
            return len({pod["spec"]["nodeName"] for pod in ready}) == 2

        async def held() -> bool:
            return not await gone(api, LEASE) and bool((await api.get(LEASE))["spec"]["holderIdentity"])

        await until(both_are_there, "there is another operator on another machine")
        await until(held, "one of them leads")
        holder = str((await api.get(LEASE))["spec"]["holderIdentity"])
        leader = f"/api/v1/namespaces/holdfast-system/pods/{holder.rpartition('-')[0]}"
        seat = str((await api.get(leader))["spec"]["nodeName"])
        for machine in set(MACHINES) - {seat}:
            await cordon(api, machine)
        options = ("--nnodes", 2, "--spares", 1)
        async with Job(api, home, "bereft", *options, steps=STEPS, pace_s=PACE_S) as job:
            before = await job.coordinator()

            async def is_seated() -> bool:
                return (await job.pod(before))["spec"].get("nodeName") == seat

            await until(is_seated, "the coordinator is beside the leading operator")
            for machine in set(MACHINES) - {seat}:
                await cordon(api, machine, on=False)
            status = await job.training(2, beyond=3, spares=1)
            term, at = (await job.object())["status"]["term"], time.monotonic()
            cluster("kill", seat)
            await job.succeeds(before)
            print(f"another coordinator after {time.monotonic() - at:.1f} s")
            await job.training(2, beyond=status.step + 20)
            print(f"training again after {time.monotonic() - at:.1f} s")
            assert (await api.get(LEASE))["spec"]["holderIdentity"] not in ("", holder)
            assert (await job.object())["status"]["term"] == term + 1
            await job.stops_as(undisturbed, incidents=(1, 2))

    play(scene)


def test_a_coordinator_is_lost_after_the_nodes_that_kept_its_ledger(
    play: Callable[[Scene], None], home: Path, undisturbed: Undisturbed
):
    """One by one, with their machines, to which connections stand for minutes. Others keep it by then."""

    async def scene(api: Api) -> None:
        async with pair(api, home, "keepers") as (job, status):
            before, dark = await job.coordinator(), []
            seat = await job.machine(before)
            for node in ("keepers-n0", "keepers-n1"):
                if (machine := await job.machine(node)) != seat:
                    cluster("kill", machine)
                    dark.append(machine)
                    status = await job.training(2, beyond=status.step + 5)
            cluster("kill", seat)
            # An operator may be on any of them.
            for machine in dark:
                cluster("boot", machine)
            await job.succeeds(before)
            await job.training(2, beyond=status.step + 5, spares=1)
            cluster("boot", seat)
            async with job.client() as client:
                assert (await client.get("/report"))["steps"]["lost"] == 0
            await job.stops_as(undisturbed, incidents=(2, 3, 4))

    play(scene)


def test_a_coordinator_is_lost_while_the_name_service_is_down(
    play: Callable[[Scene], None], home: Path, undisturbed: Undisturbed
):
    """The operator tells the nodes where the next one is. The pod that is made meanwhile is not known to anybody before."""

    async def scene(api: Api) -> None:
        async with pair(api, home, "nameless") as (job, status):
            before = await job.coordinator()
            cluster("dns", "stop")
            try:
                cluster("kill", await job.machine(before))
                await job.succeeds(before)
                status = await job.training(2, beyond=status.step + 20)
            finally:
                cluster("dns", "start")
            await job.training(2, beyond=status.step, spares=1)
            assert (await job.object())["status"]["run"] == 1
            await job.stops_as(undisturbed)

    play(scene)


def test_a_database_that_stands_still(play: Callable[[Scene], None], home: Path, undisturbed: Undisturbed):
    """The API server answers and can do nothing, while a machine is lost: the spare trains, and afterwards a pod is made, once."""

    async def scene(api: Api) -> None:
        async with pair(api, home, "stalled") as (job, status):
            lost, machine = await trained_apart(job, status)
            cluster("etcd", "freeze")
            try:
                cluster("kill", machine)
                # Through the API server's proxy nobody is reached now. What the job did meanwhile is in its report.
                with pytest.raises((NoApiAnswer, ApiError)):
                    await job.object()
            finally:
                cluster("etcd", "thaw")
            status = await job.training(2, beyond=status.step + 5, spares=1)
            assert lost not in [node_of(status, rank) for rank in (0, 1)]
            assert (await job.object())["status"]["nextNumber"] == 4
            await job.stops_as(undisturbed, incidents=(1,))

    play(scene)


def test_the_definition_and_the_operator_are_upgraded_in_a_run(
    play: Callable[[Scene], None], home: Path, undisturbed: Undisturbed
):
    """All pods stay. The operator that comes looks after the job from then on."""

    async def scene(api: Api) -> None:
        async with pair(api, home, "upgraded") as (job, status):
            before = {pod["metadata"]["uid"] for pod in await pods_of(api)}
            crd = yaml.safe_load(crd_text())
            schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
            schema["properties"]["spec"]["properties"]["later"] = {"type": "string"}
            name = crd["metadata"]["name"]
            path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}"
            await api.apply(path, crd, manager="tests")
            old = {pod["metadata"]["uid"] for pod in await operators(api)}
            version = {"metadata": {"annotations": {"tests.holdfast.dev/version": "2"}}}
            await api.merge(OPERATOR, {"spec": {"template": version}})

            async def is_new() -> bool:
                there = await operators(api)
                return bool(there) and not [pod for pod in there if pod["metadata"]["uid"] in old]

            await until(is_new, "no operator of before is there", 2 * PATIENCE_S)
            try:
                await api.merge(
                    job_path(NAMESPACE, "upgraded"), {"spec": {"later": "a field of a later version"}}
                )
                _, machine = await trained_apart(job, status)
                assert {pod["metadata"]["uid"] for pod in await pods_of(api)} == before
                cluster("kill", machine)
                await job.training(2, beyond=status.step + 5, spares=1)
                await job.stops_as(undisturbed, incidents=(1,))
            finally:
                await api.apply(path, yaml.safe_load(crd_text()), manager="tests")

    play(scene)


def test_labels_are_taken_from_all_pods_and_a_stranger_has_them(
    play: Callable[[Scene], None], home: Path, undisturbed: Undisturbed
):
    """Nothing that trains is taken for lost, by the operator that is there or by one that comes; the stranger is left alone."""

    async def scene(api: Api) -> None:
        async with pair(api, home, "unlabelled") as (job, status):
            mine = await pods_of(api)
            stranger = _stranger(mine[0], "unlabelled-n7")
            made = await api.create(f"{FOLDER}/pods", stranger)
            for by_one_that_comes in (False, True):
                async with no_operator(api) if by_one_that_comes else nullcontext():
                    for pod in mine:
                        labels = dict.fromkeys(pod["metadata"]["labels"])
                        path = f"{FOLDER}/pods/{pod['metadata']['name']}"
                        await api.merge(path, {"metadata": {"labels": labels}})

                async def have_them() -> bool:
                    now = {
                        pod["metadata"]["uid"]: pod["metadata"].get("labels", {})
                        for pod in await pods_of(api)
                    }
                    return all(
                        now.get(pod["metadata"]["uid"], {}).items() >= _ours(pod).items() for pod in mine
                    )

                await until(have_them, "all pods have their labels again")
                status = await job.training(2, beyond=status.step + 5, spares=1)
            there = {pod["metadata"]["uid"] for pod in await pods_of(api)}
            assert there == {pod["metadata"]["uid"] for pod in mine} | {made["metadata"]["uid"]}
            await job.stops_as(undisturbed, incidents=(0,))
            assert not await gone(api, f"{FOLDER}/pods/unlabelled-n7")
            await api.delete(f"{FOLDER}/pods/unlabelled-n7", made["metadata"]["uid"], 0)

    play(scene)


def operators_logs() -> str:
    """What their containers have written, on the disks of all machines."""
    found = Path(os.environ["HOLDFAST_KUBE_DIR"]).glob("n*/pods/holdfast-system_*/*/*.log")
    return "\n".join(path.read_text() for path in found)


def _ours(pod: dict[str, Any]) -> dict[str, str]:
    labels: dict[str, str] = pod["metadata"]["labels"]
    return {name: value for name, value in labels.items() if "holdfast" in name or "holdfast" in value}


def _stranger(like: dict[str, Any], name: str) -> dict[str, Any]:
    """A pod of nobody's with the labels of the job's, under a name that could be its."""
    container = {"name": "one", "image": os.environ["HOLDFAST_KUBE_IMAGE"]}
    container |= {
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "resources": {"requests": {"cpu": "10m"}},
    }
    secure = {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": like["metadata"]["labels"]},
        "spec": {"containers": [container], "securityContext": secure},
    }


# A coordinator, and its container's program, which would put another one in its place; and not this shell.
STOP = "pids=$(pgrep -f '[h]oldfast[.a-z]*coordinator') && kill -STOP $pids || true"


async def silence() -> None:
    """Has each coordinator stand still, on whatever machine, until it is cancelled."""
    while True:
        for machine in MACHINES:
            await asyncio.to_thread(cluster, "exec", machine, "sh", "-c", STOP)
        await asyncio.sleep(LOOK_S)


def test_a_coordinator_that_stands_still_has_a_successor(
    play: Callable[[Scene], None], home: Path, undisturbed: Undisturbed
):
    """Its kernel keeps the connections, and its machine is ready. Its nodes miss it."""

    async def scene(api: Api) -> None:
        async with pair(api, home, "still") as (job, status):
            first = await job.coordinator()
            cluster("exec", await job.machine(first), "sh", "-c", STOP)

            await job.succeeds(first)
            status = await job.training(2, beyond=status.step + 5)
            await until(lambda: gone(api, f"{FOLDER}/pods/{first}"), "the one that stands still is gone")
            await job.stops_as(undisturbed, incidents=(1,))

    play(scene)


def test_a_coordinator_that_never_answers_does_not_hold_a_deletion_for_ever(
    play: Callable[[Scene], None], home: Path
):
    """The object goes after its deadline, with a warning; who does not want to wait says so by an annotation."""

    async def scene(api: Api) -> None:
        async with Job(api, home, "mute", "--nnodes", 2, steps=STEPS, pace_s=PACE_S) as job:
            await job.training(2, beyond=5)
            path = job_path(NAMESPACE, "mute")

            async def is_known_to_train() -> bool:
                return bool((await job.object())["status"].get("progress", {}).get("step"))

            # A job of which nobody has heard that it trains has nothing to save, and goes at once.
            await until(is_known_to_train, "its status has a step")
            made = await job.object()
            # Its successors as well, which would save the state.
            silencing = asyncio.create_task(silence())
            try:
                await api.delete(path, made["metadata"]["uid"])
                await until(lambda: gone(api, path), "the object is gone", 2 * PATIENCE_S)
            finally:
                silencing.cancel()
                await asyncio.gather(silencing, return_exceptions=True)
            events = (await api.list_all(f"{FOLDER}/events", {}))[0]
            warned = [one for one in events if one["reason"] == "NotSaved"]
            assert [one["involvedObject"]["name"] for one in warned] == ["mute"]

            async def nothing() -> bool:
                return not await pods_of(api)

            await until(nothing, "its pods are gone")

    play(scene)


def test_a_namespace_is_deleted_while_its_job_trains(play: Callable[[Scene], None], home: Path):
    """It ends. Nothing is made in it again and again while it goes."""

    async def scene(api: Api) -> None:
        at = "/api/v1/namespaces/doomed"
        await api.apply(
            at, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "doomed"}}, manager="tests"
        )
        async with Job(
            api, home, "doomed", "--namespace", "doomed", "--nnodes", 2, steps=STEPS, pace_s=PACE_S
        ) as job:

            async def trains() -> bool:
                return is_true(await api.get(job_path("doomed", "doomed")), "Training")

            await until(trains, "it trains")
            uid = (await api.get(at))["metadata"]["uid"]
            await api.delete(at, uid)
            await until(lambda: gone(api, at), "the namespace is gone", 2 * PATIENCE_S)
            assert await job.wait() != 0
        assert operators_logs().count("because it is being terminated") < 8, "it does not ask again"

    play(scene)
