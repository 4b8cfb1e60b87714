"""A job in a queue of a real Kueue, on a real cluster: `make kube-test` with Kueue's program in KUBE_BIN.

Written for Kueue 0.15.2; docs/architecture/kubernetes.md says how far it came.
"""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from realkube import IMAGE, NAMESPACE, Job, install, is_said, is_true, mend, reached, until
from realkueue import apply, is_there, kueue, local_queue, queue_objects, urgent_job

from holdfast.engines.kubernetes.api import Api
from holdfast.engines.kubernetes.kueue import API_VERSION
from holdfast.engines.kubernetes.reach import job_path

pytestmark = [
    pytest.mark.kube,
    pytest.mark.nightly,
    pytest.mark.timeout(800),
    pytest.mark.skipif(not is_there(), reason="KUBE_BIN has no kueue"),
]
WORKLOADS = f"/apis/{API_VERSION}/namespaces/{NAMESPACE}/workloads"
BATCH = "/apis/batch/v1/namespaces/others/jobs"
EVEN = {"n2", "n4"}


async def pods_of(api: Api) -> dict[str, Any]:
    found = (await api.list_all(f"/api/v1/namespaces/{NAMESPACE}/pods", {}))[0]
    return {one["metadata"]["name"]: one for one in found}


async def admitted(api: Api, name: str) -> bool:
    return is_true(await api.get(f"{WORKLOADS}/{name}"), "Admitted")


async def ready(api: Api, name: str) -> bool:
    return is_true(await api.get(f"{WORKLOADS}/{name}"), "PodsReady")


async def comes_first(api: Api, name: str, memory: str) -> None:
    """Somebody's Job of a higher priority is made, and runs."""
    await api.create(BATCH, urgent_job(name, IMAGE, memory))

    async def runs() -> bool:
        return bool((await api.get(f"{BATCH}/{name}")).get("status", {}).get("active"))

    await until(runs, f"{name} runs")


async def goes(api: Api, name: str) -> None:
    # Without the policy the API server leaves a Job's pods where they are.
    await api.request("DELETE", f"{BATCH}/{name}", {"propagationPolicy": "Background"})


async def make_queues(api: Api) -> None:
    for path, made in queue_objects("3500Mi").items():
        await apply(api, path, made)
    others = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "others"}}
    await apply(api, "/api/v1/namespaces/others", others)
    path, made = local_queue("others")
    await apply(api, path, made)


async def state(job: Job) -> str:
    return str((await job.object()).get("status", {}).get("state"))


async def queued(api: Api, job: Job) -> None:
    """It has been saved, and no pod of it is left."""

    async def rests() -> bool:
        return await state(job) == "Queued" and not await pods_of(api)

    await until(rests, "the job waits, and has no pods")


async def told(api: Api, job: Job) -> None:
    """No queue, no pods, and Kueue's own words."""

    async def said() -> bool:
        conditions = (await job.object()).get("status", {}).get("conditions", ())
        return any("doesn't exist" in one["message"] for one in conditions if one["type"] == "QuotaReserved")

    await until(said, "the missing queue is told")
    assert not await pods_of(api)


async def one_node_goes_and_comes_back(api: Api, job: Job) -> None:
    base = (await api.get(f"{WORKLOADS}/queued-base"))["metadata"]["uid"]
    await comes_first(api, "small", "1000Mi")
    alone = await job.training(1)
    assert await admitted(api, "queued-base")
    assert not await admitted(api, "queued-plus-1")
    await goes(api, "small")
    await job.training(2, beyond=alone["step"])
    assert (await api.get(f"{WORKLOADS}/queued-base"))["metadata"]["uid"] == base
    assert (await job.object())["status"]["run"] == 1, "it was not restarted"
    assert (await job.object())["status"]["term"] == 1


async def scenes(tmp_path: Path) -> None:
    async with reached() as api:
        await install(api)
        await mend(api)
        async with (
            kueue(api, pods_ready_s=300),
            Job(
                api, tmp_path, "queued", "--queue", "team-a", "--nnodes", "1:2", steps=100_000, pace_s=0.1
            ) as job,
        ):
            await until(job._is_known, "the job is submitted")
            await told(api, job)
            await api.merge(
                job_path(NAMESPACE, "queued"),
                {
                    "spec": {
                        "scheduling": {
                            "workloadPriorityClass": "base",
                            "elasticWorkloadPriorityClass": "further",
                        }
                    }
                },
            )
            base = await api.get(f"{WORKLOADS}/queued-base")
            await make_queues(api)
            # It asked before it was told its priority, and asks anew.
            await api.delete(f"{WORKLOADS}/queued-base", base["metadata"]["uid"])
            path, made = local_queue(NAMESPACE)
            await apply(api, path, made)
            await job.training(2)
            nodes = {name: one for name, one in (await pods_of(api)).items() if "-n" in name}
            assert {one["spec"]["nodeName"] for one in nodes.values()} == EVEN
            for name in ("queued-base", "queued-plus-1"):
                await until(partial(ready, api, name), f"Kueue is told that the pods of {name} are ready")
            await one_node_goes_and_comes_back(api, job)
            # All of it has to go.
            await comes_first(api, "large", "3000Mi")
            await queued(api, job)
            await goes(api, "large")
            await job.training(2)
            assert (await job.object())["status"]["run"] == 2
            # A person stops it, and lets it go on.
            await api.merge(f"{WORKLOADS}/queued-base", {"spec": {"active": False}})
            await queued(api, job)
            await api.merge(f"{WORKLOADS}/queued-base", {"spec": {"active": True}})
            await job.training(2)
            await job.stop()
            assert await job.wait() == 0

            async def finished() -> bool:
                return is_true(await api.get(f"{WORKLOADS}/queued-base"), "Finished")

            await until(finished, "Kueue is told that the job is over")
        await mend(api)


def test_a_job_in_a_queue(tmp_path: Path) -> None:
    asyncio.run(scenes(tmp_path))


def test_pods_that_kueue_takes_for_its_own(tmp_path: Path) -> None:
    """Without the line in Kueue's configuration its webhook holds all pods back. The job says so, and names the line."""

    async def scene() -> None:
        async with reached() as api:
            await install(api)
            await mend(api)
            async with kueue(api, pods_ready_s=300, knows_us=False):
                options = ("--nnodes", 2)
                async with Job(api, tmp_path, "gated", *options, steps=100, pace_s=0) as job:
                    await until(job._is_known, "the job is submitted")
                    await until(partial(job.says, "kueue.x-k8s.io/admission"), "the gate is named")
                    made = await job.object()
                    assert is_said(
                        made, "HoldfastJob.v1alpha1.holdfast.dev in integrations.externalFrameworks"
                    )
                await mend(api)
            await mend(api)

    asyncio.run(scene())
