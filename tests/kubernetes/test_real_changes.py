"""What people do to a job that trains, on a real Kubernetes: they edit it, scale it, empty machines, delete what belongs to it."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest
import yaml
from realkube import (
    FOLDER,
    IMAGE,
    NAMESPACE,
    PACE_S,
    STEPS,
    Job,
    Scene,
    Undisturbed,
    cluster,
    cordon,
    evict,
    gone,
    no_operator,
    node_of,
    pair,
    pods_of,
    trained_apart,
    until,
    word,
)

from holdfast.engines.reach import client_of
from holdfast.kubernetes.client.api import Api
from holdfast.kubernetes.objects.resource import job_path
from holdfast.protocol.network.endpoint import Endpoint
from holdfast.protocol.network.lookup import AddressLookup
from holdfast.protocol.network.proof import Question

pytestmark = [pytest.mark.kube, pytest.mark.nightly, pytest.mark.timeout(900)]


def test_a_job_is_edited_scaled_and_moved_while_it_trains(
    play: Callable[[Scene], None], home: Path, undisturbed: Undisturbed
):
    async def scene(api: Api) -> None:
        async with Job(api, home, "edited", "--nnodes", "1:2", steps=STEPS, pace_s=PACE_S) as job:
            status = await job.training(2, beyond=2)
            path = job_path(NAMESPACE, "edited")
            # A field that is in pods already: said, and left for the next run.
            await api.merge(path, {"spec": {"spares": 3}})

            async def said() -> bool:
                accepted = word(await job.object(), "Accepted") or {}
                return accepted.get("reason") == "SpecChanged" and "spec.spares" in accepted["message"]

            await until(said, "the changed field is named")
            await api.merge(path, {"spec": {"spares": 0}})
            # As `kubectl scale` does it.
            for nodes in (1, 2):
                await api.merge(f"{path}/scale", {"spec": {"replicas": nodes}})
                status = await job.training(nodes, beyond=status.step + 3)
            # Nobody may be scheduled there any more: the one that trains there moves, its replacement first.
            node, machine = await trained_apart(job, status)
            await cordon(api, machine)

            async def has_moved() -> bool:
                return not await pods_of(api, {"fieldSelector": f"spec.nodeName={machine}"})

            await until(has_moved, f"{node} has left {machine}")
            await job.training(2, beyond=status.step + 5)
            await job.stops_as(undisturbed, incidents=(0,))

    play(scene)


def test_an_eviction_with_a_spare_costs_nothing(
    play: Callable[[Scene], None], home: Path, undisturbed: Undisturbed
):
    async def scene(api: Api) -> None:
        async with pair(api, home, "evicted") as (job, status):
            node, _ = await trained_apart(job, status)
            await until(lambda: evict(api, node), f"{node} is evicted")
            status = await job.training(2, beyond=status.step + 5, spares=1)
            assert node not in [node_of(status, rank) for rank in (0, 1)]
            await job.stops_as(undisturbed, incidents=(0,))

    play(scene)


def test_a_coordinator_s_container_is_killed(
    play: Callable[[Scene], None], home: Path, undisturbed: Undisturbed
):
    """It is started again in its pod, in the same term, and believes nobody without the job's token."""

    async def scene(api: Api) -> None:
        async with pair(api, home, "reseated") as (job, status):
            before = (await job.object())["status"]
            pod = await job.pod(before["coordinator"]["pod"])
            await job.kill_container(pod["metadata"]["name"])

            async def restarts() -> int:
                seen = await job.pod(pod["metadata"]["name"])
                return int(seen["status"]["containerStatuses"][0]["restartCount"])

            # The kubelet's word of it may come after the next steps.
            assert await until(restarts, "the coordinator's container has been started again") == 1
            await job.training(2, beyond=status.step + 5)
            after = (await job.object())["status"]
            assert (after["coordinator"]["pod"], after["term"]) == (pod["metadata"]["name"], before["term"])
            where = await AddressLookup(pod["status"]["podIP"], 7077).find()
            assert where is not None
            await believes_nobody(where)
            await job.stops_as(undisturbed, incidents=(1,))

    play(scene)


async def believes_nobody(where: Endpoint) -> None:
    """The one that listens there: without a proof of the job's token, or with another one."""
    for method, path in (("GET", "/status"), ("POST", "/stop?reason=mine")):
        proof = Question("0" * 64, where.name, method, path).authorization
        for headers in ({}, {"Authorization": proof}):
            url = f"http://{where.host}:{where.port}{path}"
            async with (
                aiohttp.ClientSession() as session,
                session.request(method, url, headers=headers) as answer,
            ):
                assert answer.status == 401


def test_what_is_deleted_beside_the_pods_is_there_when_it_is_needed(
    play: Callable[[Scene], None], home: Path, undisturbed: Undisturbed
):
    """By a person, all of it at once; then a machine is lost. A new node finds the coordinator, and has its token."""

    async def scene(api: Api) -> None:
        async with pair(api, home, "robbed") as (job, status):
            _, machine = await trained_apart(job, status)
            beside = [
                f"{FOLDER}/secrets/robbed-holdfast",
                f"{FOLDER}/configmaps/robbed-holdfast",
                f"{FOLDER}/services/robbed-coordinator",
                f"/apis/policy/v1/namespaces/{NAMESPACE}/poddisruptionbudgets/robbed",
                f"/apis/networking.k8s.io/v1/namespaces/{NAMESPACE}/networkpolicies/robbed",
            ]
            there = {path: await api.get(path) for path in beside}
            for path, one in there.items():
                await api.delete(path, one["metadata"]["uid"])
            cluster("kill", machine)

            async def are_back() -> bool:
                return all([(await api.get(path))["metadata"]["uid"] for path in beside])

            await until(are_back, "all that was deleted is there again")
            # The spare is in the lost one's place, and the new node is the spare now.
            await job.training(2, beyond=status.step + 5, spares=1)
            secret = await api.get(beside[0])
            assert secret["data"] == there[beside[0]]["data"]
            assert base64.b64decode(secret["data"]["token"])
            await job.stops_as(undisturbed, incidents=(1,))

    play(scene)


def test_an_ended_job_goes_when_its_time_is_over(play: Callable[[Scene], None], home: Path):
    """The time is given after the end, as by somebody who cleans up."""

    async def scene(api: Api) -> None:
        async with Job(api, home, "brief", "--nnodes", 2, steps=20, pace_s=0) as job:
            assert await job.wait() == 0, job.log.read_text()
            await job.condition("Complete")
            path = job_path(NAMESPACE, "brief")
            await api.merge(path, {"spec": {"runPolicy": {"ttlSecondsAfterFinished": 1}}})

            await until(lambda: gone(api, path), "the object is gone")

            async def nothing_left() -> bool:
                kinds = ("pods", "secrets", "configmaps", "services")
                found = [(await api.list_all(f"{FOLDER}/{kind}", {}))[0] for kind in kinds]
                return not [one for each in found for one in each if "brief" in one["metadata"]["name"]]

            await until(nothing_left, "all that was its own is gone with it")

    play(scene)


def test_three_faults_while_there_is_no_operator(
    play: Callable[[Scene], None], home: Path, undisturbed: Undisturbed
):
    """The coordinator needs none. When one is there again it makes what is missing, once."""

    async def scene(api: Api) -> None:
        async with pair(api, home, "unwatched") as (job, status):
            async with no_operator(api):
                for rank in (0, 1):
                    async with client_of(job.dir) as client:
                        await client.post("/fault", f"kill-worker:rank={rank}")
                    status = await job.training(2, beyond=status.step + 3)
                _, machine = await trained_apart(job, status)
                cluster("kill", machine)
                status = await job.training(2, beyond=status.step + 3)
            await job.training(2, beyond=status.step, spares=1)
            assert (await job.object())["status"]["nextNumber"] == 4
            await job.stops_as(undisturbed, incidents=(2, 3))

    play(scene)


def test_a_machine_that_a_cloud_takes_away(
    play: Callable[[Scene], None], home: Path, undisturbed: Undisturbed
):
    """Its power, and then its Node object with all pods that were bound to it."""

    async def scene(api: Api) -> None:
        async with pair(api, home, "taken") as (job, status):
            lost, machine = await trained_apart(job, status)
            node = await api.get(f"/api/v1/nodes/{machine}")
            cluster("kill", machine)
            await api.delete(f"/api/v1/nodes/{machine}", node["metadata"]["uid"])
            await until(lambda: gone(api, f"{FOLDER}/pods/{lost}"), f"{lost} is collected")
            status = await job.training(2, beyond=status.step + 5, spares=1)
            assert lost not in [node_of(status, rank) for rank in (0, 1)]
            await job.stops_as(undisturbed, incidents=(1,))

    play(scene)


def test_a_secret_that_a_pod_needs_comes_later(
    play: Callable[[Scene], None], home: Path, undisturbed: Undisturbed
):
    """The job says which one is missing, and trains when it is there."""

    async def scene(api: Api) -> None:
        template = home / "pod.yaml"
        needs = [{"secretRef": {"name": "of-the-user"}}]
        template.write_text(
            yaml.safe_dump({"spec": {"containers": [{"name": "worker", "image": IMAGE, "envFrom": needs}]}})
        )
        options = ("--nnodes", 2, "--pod-template", template)
        async with Job(api, home, "waiting", *options, steps=STEPS, pace_s=PACE_S) as job:
            await until(lambda: job.says('secret "of-the-user" not found'), "the missing Secret is named")
            secret = {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": "of-the-user", "namespace": NAMESPACE},
                "stringData": {"KEY": "value"},
            }
            made = await api.create(f"{FOLDER}/secrets", secret)
            try:
                await job.training(2, beyond=5)
                await job.stops_as(undisturbed, incidents=(0,))
            finally:
                await api.delete(f"{FOLDER}/secrets/of-the-user", made["metadata"]["uid"])

    play(scene)
