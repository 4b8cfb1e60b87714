"""Jobs on a real Kubernetes of four machines, made with the command line: `make kube-test`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("kubernetes_asyncio")
pytest.importorskip("yaml")
from realkube import (
    FOLDER,
    IMAGE,
    NAMESPACE,
    PACE_S,
    STEPS,
    TRAIN,
    Job,
    Scene,
    Undisturbed,
    cluster,
    holdfast,
    is_said,
    is_true,
    machines_of,
    names_are_known,
    node_of,
    operators,
    pair,
    pods_of,
    until,
)
from realtrials import drain_every_machine, lose_node_without_api_server

from holdfast.engines.jobs import EXIT_LEFT
from holdfast.kubernetes.client.api import Api, ApiError
from holdfast.kubernetes.objects.resource import job_path

pytestmark = [pytest.mark.kube, pytest.mark.timeout(900)]
OUTAGES_S = (60.0, pytest.param(300.0, marks=pytest.mark.nightly))


def test_a_machine_without_power_and_an_agent_killed_cost_no_step(
    play: Callable[[Scene], None], home: Path, undisturbed: Undisturbed
):
    async def scene(api: Api) -> None:
        async with pair(api, home, "power") as (job, status):
            cluster("kill", await job.machine(node_of(status, 1)))
            status = await job.training(2, beyond=status.step + 5)
            # In its place: the container is started again in its pod, and the node comes back.
            await job.kill_container(killed := node_of(status, 0))
            await job.training(2, beyond=status.step + 5, spares=1)
            assert killed in await machines_of(api)
            # Within seconds of each other and in one zone they are one incident.
            await job.stops_as(undisturbed, incidents=(1, 2))

    play(scene)


def test_a_job_runs_to_its_end(play: Callable[[Scene], None], home: Path):
    async def scene(api: Api) -> None:
        async with Job(api, home, "whole", "--nnodes", 2, steps=30, pace_s=0) as job:
            assert await job.wait() == 0, job.log.read_text()
            made = await job.condition("Complete")
            assert made["status"]["state"] == "Succeeded"
            assert len(job.losses()) == 30
            report = await asyncio.to_thread(holdfast, home, "report", "--job", "whole")
            assert "finished" in report.stdout

    play(scene)


def test_a_new_namespace_is_waited_for(play: Callable[[Scene], None], home: Path, undisturbed: Undisturbed):
    """A controller makes its service account, and may be slower than whoever asks for a job."""
    account = f"{FOLDER}/serviceaccounts/default"
    path = job_path(NAMESPACE, "applied")

    @asynccontextmanager
    async def new(api: Api) -> AsyncIterator[None]:
        there = await until(lambda: api.get(account), "the controllers have made it once")
        cluster("controllers", "freeze")
        try:
            await api.delete(account, there["metadata"]["uid"])
            yield
        finally:
            cluster("controllers", "thaw")

    async def scene(api: Api) -> None:
        async with (
            new(api),
            Job(api, home, "early", "--nnodes", 2, steps=STEPS, pace_s=PACE_S) as job,
        ):

            async def waits() -> bool:
                assert job.process.poll() is None, job.log.read_text()
                return "the namespace research is new" in job.log.read_text()

            await until(waits, "the command says what it waits for")
            cluster("controllers", "thaw")
            await job.training(2, beyond=10)
            made = await job.object()
            await job.stops_as(undisturbed, incidents=(0,))

        # And so does the operator, for whoever makes the object without the command.
        async def refused() -> bool:
            return is_said(await api.get(path), 'serviceaccount "default" not found')

        async def trains() -> bool:
            return is_true(await api.get(path), "Training")

        async with new(api):
            parts = {key: made[key] for key in ("apiVersion", "kind", "spec")}
            await api.apply(path, parts | {"metadata": {"name": "applied"}}, manager="tests")
            await until(refused, "the operator says what is missing")
        await until(trains, "the job trains")

    play(scene)


@pytest.mark.parametrize("outage_s", OUTAGES_S)
def test_a_loss_while_the_api_server_is_down(
    play: Callable[[Scene], None], home: Path, undisturbed: Undisturbed, outage_s: float
):
    """Neither the API server nor the operator is needed for a recovery."""

    async def scene(api: Api) -> None:
        async with pair(api, home, "alone") as (job, status):
            await lose_node_without_api_server(api, job, status, outage_s)
            await job.stops_as(undisturbed)
        # Until then the nodes of a new job do not find their coordinator.
        await names_are_known(api)

    play(scene)


def test_operators_killed_and_the_coordinators_machine_lost(
    play: Callable[[Scene], None], home: Path, undisturbed: Undisturbed
):
    async def scene(api: Api) -> None:
        async with pair(api, home, "seat") as (job, status):
            for pod in await operators(api):
                path = f"/api/v1/namespaces/holdfast-system/pods/{pod['metadata']['name']}"
                await api.delete(path, pod["metadata"]["uid"], 0)
            before = await job.coordinator()
            cluster("kill", await job.machine(before))

            await job.succeeds(before)
            # More than was made before the power was gone: the machine may have had a node, too.
            await job.training(2, beyond=status.step + 20)
            await job.stops_as(undisturbed)

    play(scene)


def test_every_machine_is_drained_one_by_one(
    play: Callable[[Scene], None], home: Path, undisturbed: Undisturbed
):
    async def scene(api: Api) -> None:
        async with Job(api, home, "drained", "--nnodes", 2, steps=STEPS, pace_s=PACE_S) as job:
            status = await job.training(2, beyond=2)
            await drain_every_machine(api)
            assert job.process.poll() is None, "the job was over before the last machine was drained"
            # The coordinator may have moved with the last machine.
            await job.training(2, beyond=status.step + 20)
            # Planned changes are no faults.
            await job.stops_as(undisturbed, incidents=(0,))

    play(scene)


def test_a_job_is_left_attached_suspended_resumed_and_deleted(play: Callable[[Scene], None], home: Path):
    async def scene(api: Api) -> None:
        async with Job(api, home, "life", "--nnodes", 2, steps=100_000, pace_s=PACE_S) as job:
            await job.training(2, beyond=1)
            assert await asyncio.to_thread(job.detach) == EXIT_LEFT
            assert "holdfast attach --job life" in job.log.read_text()
            shown = await asyncio.to_thread(holdfast, home, "logs", "--job", "life", "--rank", "0")
            assert shown.returncode == 0, shown.stderr
            path = f"/apis/holdfast.dev/v1alpha1/namespaces/{NAMESPACE}/holdfastjobs/life"

            # Letters that the API server encodes otherwise than we do: a status that has them can still be written.
            async def is_told(wrong: str) -> bool:
                return is_said(await job.object(), wrong)

            for wrong in ("<boom> & é", "a > b"):
                await api.merge(path, {"spec": {"faults": [wrong]}})
                await until(partial(is_told, wrong), f"{wrong} is refused in the status")
            await api.merge(path, {"spec": {"faults": []}})
            await api.merge(path, {"spec": {"runPolicy": {"suspend": True}}})
            await job.condition("Suspended")

            async def given_back() -> bool:
                return not await pods_of(api)

            await until(given_back, "every pod is given back")
            asked = await asyncio.to_thread(holdfast, home, "status", "--job", "life")
            assert "suspended" in asked.stdout + asked.stderr
            await api.merge(path, {"spec": {"runPolicy": {"suspend": False}}})
            await job.training(2, beyond=1)
            made = await job.object()
            await api.delete(path, made["metadata"]["uid"])

            async def gone() -> bool:
                try:
                    await api.get(path)
                except ApiError as error:
                    return error.status == 404
                return False

            await until(gone, "the object is gone")
            await until(given_back, "every pod is gone with it")

    play(scene)


@pytest.mark.parametrize(
    ("option", "ours", "theirs"),
    [
        (("--copies", "9"), "spec.snapshots.copies: 9", "should be less than or equal to 8"),
        (("--namespace", "nowhere"), "", 'namespaces "nowhere" not found'),
        (("--node-memory", "2Q"), "", "quantities must match"),
        (("--fault", "boom"), "spec.faults[0]", ""),
    ],
)
def test_what_is_wrong_is_told_before_anything_is_made(
    play: Callable[[Scene], None], home: Path, option: tuple[str, str], ours: str, theirs: str
):
    async def scene(api: Api) -> None:
        asked = (
            "run",
            "--engine",
            "kubernetes",
            "--image",
            IMAGE,
            "--namespace",
            NAMESPACE,
            "--job",
            "wrong",
        )
        refused = await asyncio.to_thread(holdfast, home, *asked, *option, str(TRAIN), "5")
        assert refused.returncode == 2
        assert ours in refused.stderr
        assert theirs in refused.stderr
        for path in (
            "/apis/holdfast.dev/v1alpha1/holdfastjobs",
            f"/api/v1/namespaces/{NAMESPACE}/configmaps",
        ):
            made = (await api.list_all(path, {}))[0]
            assert [one["metadata"]["name"] for one in made if "wrong" in one["metadata"]["name"]] == []

    play(scene)
