"""A job in a queue of a real Kueue, on a real cluster: `make kube-test` with Kueue's program in KUBE_BIN.

Written for Kueue 0.15.2; docs/architecture/kubernetes.md says how far it came.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from realkube import (
    IMAGE,
    MACHINES,
    NAMESPACE,
    PACE_S,
    STEPS,
    Job,
    Scene,
    Undisturbed,
    cluster,
    install,
    is_said,
    is_true,
    machines_of,
    mend,
    node_of,
    reached,
    shared_folder,
    until,
    word,
)
from realkueue import RACK, apply, is_there, kueue, local_queue, queue_objects, rack_objects, urgent_job

from holdfast.engines.jobs import EXIT_STOPPED
from holdfast.kubernetes.client.api import Api
from holdfast.kubernetes.objects.kueue import API_VERSION, domains_of
from holdfast.kubernetes.objects.resource import job_path

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
    await job.training(2, beyond=alone.step)
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
            assert await job.wait() == EXIT_STOPPED

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


# ------------------------------------------------------------ racks

FIRST_RACK = {"n1", "n2", "n3"}
FOR_NODES = "example.com/gpu"
"""A taint of these machines. The template tolerates it, and a coordinator does not: it is on the fourth machine."""
LARGE = ("--node-cpus", "1500m", "--nproc-per-node", 1)
"""More than half of a machine for each node."""


@asynccontextmanager
async def racks(api: Api) -> AsyncIterator[None]:
    """Three machines are in one rack, the fourth is in another, and a queue knows it."""
    taint = {"key": FOR_NODES, "value": "yes", "effect": "NoSchedule"}
    try:
        for name in MACHINES:
            in_first = name in FIRST_RACK
            labels = {RACK: "r0" if in_first else "r1"}
            change = {"metadata": {"labels": labels}, "spec": {"taints": [taint] if in_first else None}}
            await api.merge(f"/api/v1/nodes/{name}", change)
        for path, made in (*rack_objects().items(), local_queue(NAMESPACE, "racks", "racks")):
            await apply(api, path, made)
        yield
    finally:
        for name in MACHINES:
            change = {"metadata": {"labels": {RACK: None}}, "spec": {"taints": None}}
            await api.merge(f"/api/v1/nodes/{name}", change)


def tolerant(home: Path, **pod: Any) -> Path:
    """A template of pods that may be in the first rack."""
    toleration = {"key": FOR_NODES, "operator": "Exists"}
    container = {"name": "worker", "image": IMAGE} | pod.pop("worker", {})
    path = home / "tolerant.yaml"
    path.write_text(yaml.safe_dump({"spec": {"tolerations": [toleration], "containers": [container]} | pod}))
    return path


async def chosen(api: Api, name: str) -> set[str]:
    """Machines on which Kueue has put the nodes of a Workload."""
    made = await api.get(f"{WORKLOADS}/{name}")
    return {one["kubernetes.io/hostname"] for one in domains_of(made, "node")}


def test_a_rack_of_which_a_machine_is_lost(
    play: Callable[[Scene], None], home: Path, undisturbed: Undisturbed
) -> None:
    """The spare takes over at once. Its own successor waits until Kueue chooses a machine, which is in the same rack."""

    async def scene(api: Api) -> None:
        async with kueue(api, pods_ready_s=300), racks(api):
            asked = ("--queue", "racks", "--queue-topology", f"required={RACK}", *LARGE)
            options = (*asked, "--nnodes", 1, "--spares", 1, "--pod-template", tolerant(home))
            options = (*options, "--snapshot-every", "2")
            async with Job(api, home, "racked", *options, steps=STEPS, pace_s=PACE_S) as job:
                status = await job.training(1, beyond=8, spares=1)
                there = await machines_of(api)
                assert set(there.values()) == await chosen(api, "racked-base")
                assert set(there.values()) < FIRST_RACK
                assert await job.machine(await job.coordinator()) == "n4"
                (third,) = FIRST_RACK - set(there.values())
                lost = there[node_of(status, 0)]
                cluster("kill", lost)
                began_s = time.monotonic()
                words = partial(job.says, "it waits until Kueue chooses its machine")
                told = asyncio.create_task(until(words, "it is told"))
                after = await job.training(1, beyond=status.step + 4)
                print(f"trains again {time.monotonic() - began_s:.1f} s after the loss")
                await told
                after = await job.training(1, beyond=after.step, spares=1)
                print(f"has a spare again {time.monotonic() - began_s:.1f} s after the loss")
                new = await machines_of(api)
                assert set(new.values()) == FIRST_RACK - {lost} == await chosen(api, "racked-base")
                assert new.keys() - there.keys() == {name for name, at in new.items() if at == third}
                made = (await job.object())["status"]
                assert (made["run"], made["term"]) == (1, 1)
                await job.stops_as(undisturbed, incidents=(1,))

    play(scene)


def test_a_rack_that_has_no_other_machine(play: Callable[[Scene], None], home: Path) -> None:
    """Kueue takes the whole quota back. The job is saved, and goes on when the machine is there again."""

    async def scene(api: Api) -> None:
        volume = {"name": "shared", "persistentVolumeClaim": {"claimName": await shared_folder(api, "racks")}}
        mounts = [{"name": "shared", "mountPath": "/shared"}]
        async with kueue(api, pods_ready_s=300), racks(api):
            asked = ("--queue", "racks", "--queue-topology", f"required={RACK}", *LARGE)
            template = tolerant(home, worker={"volumeMounts": mounts}, volumes=[volume])
            options = (*asked, "--nnodes", 2, "--spares", 1, "--pod-template", template)
            options = (*options, "--checkpoint", "/shared/full,every=10")
            async with Job(api, home, "full", *options, steps=STEPS, pace_s=PACE_S) as job:
                status = await job.training(2, beyond=12, spares=1)
                there = await machines_of(api)
                assert set(there.values()) == FIRST_RACK == await chosen(api, "full-base")
                lost = there[node_of(status, 1)]
                cluster("kill", lost)
                await job.training(2, beyond=status.step + 4)
                words = f"no replacement for unhealthy node(s): {lost}"
                await until(partial(job.says, words), "Kueue's words are told")

                async def one_is_left() -> bool:
                    # Whether it still runs nobody knows, so its quota is held until its machine says so.
                    return set(await pods_of(api)) == {node_of(status, 1)}

                await until(one_is_left, "the job is saved, and has given its pods back")
                assert await admitted(api, "full-base")
                cluster("boot", lost)
                await job.training(2, beyond=status.step + 4, spares=1)
                assert (await job.object())["status"]["run"] == 2
                await job.stop()
                assert await job.wait() == EXIT_STOPPED

    play(scene)


def test_two_nodes_for_which_kueue_chooses_one_machine(play: Callable[[Scene], None], home: Path) -> None:
    """It does not know that they are to be apart. The job says what to do."""

    async def scene(api: Api) -> None:
        async with kueue(api, pods_ready_s=300), racks(api):
            options = ("--queue", "racks", "--queue-topology", f"preferred={RACK}", "--nnodes", 2)
            options = (*options, "--pod-template", tolerant(home))
            async with Job(api, home, "narrow", *options, steps=STEPS, pace_s=PACE_S) as job:
                await until(job._is_known, "the job is submitted")
                await until(partial(job.says, "ask for more than half of a machine"), "it is told")
                print(word(await job.object(), "Scheduled"))
                assert len(await chosen(api, "narrow-base")) == 1
            await mend(api)

    play(scene)


def test_a_level_that_kueue_does_not_know(play: Callable[[Scene], None], home: Path) -> None:
    async def scene(api: Api) -> None:
        async with kueue(api, pods_ready_s=300), racks(api):
            options = ("--queue", "racks", "--queue-topology", "required=example.com/row", "--nnodes", 1)
            async with Job(api, home, "nowhere", *options, steps=STEPS, pace_s=PACE_S) as job:
                await until(job._is_known, "the job is submitted")
                await until(
                    partial(job.says, "does not contain the requested level"), "Kueue's words are told"
                )
                assert not await pods_of(api)
            await mend(api)

    play(scene)
