"""What else a cluster does to jobs: cables, the way to the API server, other people's pods, and what cannot run at all."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("kubernetes_asyncio")
pytest.importorskip("yaml")
from kubejobs import job as asked
from realkube import (
    IMAGE,
    LEASE,
    NAMESPACE,
    PACE_S,
    PATIENCE_S,
    STEPS,
    TRAIN,
    Job,
    Scene,
    Undisturbed,
    cluster,
    evict,
    gone,
    is_said,
    is_true,
    machines_of,
    node_of,
    pair,
    trained_apart,
    until,
)

from holdfast.kubernetes.client.api import Api, ApiError
from holdfast.kubernetes.objects.resource import job_path

pytestmark = [pytest.mark.kube, pytest.mark.timeout(900)]
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"


# ------------------------------------------------------------ cables


def test_a_cable_that_is_plugged_in_again(
    play: Callable[[Scene], None], home: Path, undisturbed: Undisturbed
):
    """Nothing of what was behind it is taken for the job's: its pod ends, and its name does not come again."""

    async def scene(api: Api) -> None:
        async with pair(api, home, "cut") as (job, status):
            lost, machine = await trained_apart(job, status)
            cluster("cut", machine)
            status = await job.training(2, beyond=status.step + 5)
            assert lost not in [node_of(status, rank) for rank in (0, 1)]

            await job.gives_up(lost)
            cluster("heal", machine)
            # The kubelet says so, which was there all the time: its processes have ended.
            await until(lambda: gone(api, f"{PODS}/{lost}"), "the pod behind the cut is gone")
            status = await job.training(2, beyond=status.step + 5)
            await job.stops_as(undisturbed, incidents=(1,))

    play(scene)


def test_a_machine_that_the_api_server_alone_does_not_reach(
    play: Callable[[Scene], None], home: Path, undisturbed: Undisturbed
):
    async def scene(api: Api) -> None:
        async with pair(api, home, "path") as (job, status):
            node, machine = await trained_apart(job, status)
            before = sorted(pod["metadata"]["uid"] for pod in (await api.list_all(PODS, {}))[0])

            async def ready() -> bool:
                return is_true(await api.get(f"/api/v1/nodes/{machine}"), "Ready")

            async def not_ready() -> bool:
                return not await ready()

            cluster("block", machine)
            try:
                await until(not_ready, f"Kubernetes calls {machine} not ready")
                status = await job.training(2, beyond=status.step + 20, spares=1)
            finally:
                cluster("unblock", machine)
            assert node in [node_of(status, rank) for rank in (0, 1)]
            pods = (await api.list_all(PODS, {}))[0]
            assert sorted(pod["metadata"]["uid"] for pod in pods) == before
            assert not [pod for pod in pods if "deletionTimestamp" in pod["metadata"]]
            await until(ready, f"{machine} is ready again")
            await job.stops_as(undisturbed, incidents=(0,))

    play(scene)


def test_two_coordinators_that_do_not_see_each_other(
    play: Callable[[Scene], None], home: Path, undisturbed: Undisturbed
):
    async def scene(api: Api) -> None:
        async with pair(api, home, "split") as (job, status):
            first = await job.coordinator()
            machine = await job.machine(first)
            cluster("cut", machine)

            await job.succeeds(first)
            status = await job.training(2, beyond=status.step + 5)
            cluster("heal", machine)
            await until(lambda: gone(api, f"{PODS}/{first}"), "the coordinator behind the cut is gone")
            await job.training(2, beyond=status.step + 5)
            assert await job.coordinator() != first
            await job.stops_as(undisturbed)

    play(scene)


# Of its pod: the port of the machine's bridge behind which it is.
UNPLUG = """\
mac=$(ip neigh show {} dev cni0 | sed 's/.*lladdr \\([^ ]*\\).*/\\1/')
port=$(bridge fdb show br cni0 | sed -n "s/^$mac dev \\([^ ]*\\).*/\\1/p" | head -n 1)
ip link set "$port" down
"""


def test_a_coordinator_whose_network_is_broken_while_its_machine_is_ready(
    play: Callable[[Scene], None], home: Path, undisturbed: Undisturbed
):
    """Its nodes say so, and another one takes over. Training goes on meanwhile."""

    async def scene(api: Api) -> None:
        async with pair(api, home, "unplugged") as (job, status):
            first = await job.coordinator()
            pod = await job.pod(first)
            machine = pod["spec"]["nodeName"]
            cluster("exec", machine, "sh", "-ec", UNPLUG.format(pod["status"]["podIP"]))
            began_s = time.monotonic()

            async def succeeded() -> bool:
                assert is_true(await api.get(f"/api/v1/nodes/{machine}"), "Ready")
                return await job.coordinator() != first

            await until(succeeded, "a coordinator of the next term")
            print(f"unplugged: another coordinator after {time.monotonic() - began_s:.1f} s")
            status = await job.training(2, beyond=status.step + 5)
            await until(lambda: gone(api, f"{PODS}/{first}"), "the coordinator that nobody reaches is gone")
            assert await job.machine(await job.coordinator()) != machine
            await job.stops_as(undisturbed, incidents=(1,))

    play(scene)


# ------------------------------------------------------------ memory

PATIENT = ("--detection", 10)
"""A worker that grows for longer than 3 s, on a machine whose processors others use too, would be found to hang."""
GROWS = """\
        if step.index == 20 and run.rank == 1:
            grown = [torch.ones(1 << 20) for _ in range(1 << 12)]
"""
"""After a commit, so the worker that takes its place begins with the next step and does not grow."""


def test_a_worker_that_outgrows_its_container_s_memory(
    play: Callable[[Scene], None], home: Path, undisturbed: Undisturbed
):
    """The kernel kills it. The incident names the limit, and no step is lost."""

    async def scene(api: Api) -> None:
        text, after = TRAIN.read_text(), "        run.log(loss=step.loss)\n"
        assert after in text
        hungry = home / "hungry.py"
        hungry.write_text(text.replace(after, after + GROWS))
        async with pair(api, home, "memory", *PATIENT, script=hungry) as (job, _):
            await job.training(2, beyond=30)
            await job.stops_as(undisturbed, incidents=(1,))
            (incident,) = json.loads((job.dir / "report.json").read_text())["incidents"]
            # --node-memory 1500Mi
            assert "whose memory limit is 1.57 GB" in incident["cause"]

    play(scene)


LEAKS = """\
        if Path("/etc/hostname").read_text().strip().endswith("NODE"):
            mine = step.index - globals().setdefault("first", step.index)
            if mine == 1:
                Path("/proc/1/oom_score_adj").write_text("1000")
                grown = torch.ones(1 << 32)
"""
"""On one node, one step after it has joined. The kernel then prefers the first process of the container, which is the agent. No
readiness probe sees it in that time, so the kubelet says late that it waits; and the operator may not see that it was back."""


def test_an_agent_is_killed_for_memory_again_and_again(
    play: Callable[[Scene], None], home: Path, undisturbed: Undisturbed
):
    """All of its container ends with it. The first time it is started again in its pod, and then on another machine, since the
    kubelet would wait. Each incident names the limit, which only the operator can see, and no step is lost."""

    async def scene(api: Api) -> None:
        text, after = TRAIN.read_text(), "        run.log(loss=step.loss)\n"
        assert after in text
        leaks = home / "leaks.py"
        leaks.write_text(text.replace(after, after + LEAKS.replace("NODE", "-n1")))
        # With limits on all, none of its processes is nearer to being killed than another.
        options = ("--nnodes", "1:2", "--spares", 0, "--node-cpus", 1, *PATIENT)
        async with Job(api, home, "leaks", *options, script=leaks, steps=STEPS, pace_s=PACE_S) as job:
            status = await job.training(2)
            (bad,) = (w.node for w in status.workers if w.node.endswith("-n1"))
            restarts = [0]

            async def elsewhere() -> bool:
                now = await machines_of(api)
                if bad in now:
                    (container,) = (await job.pod(bad))["status"].get("containerStatuses", ())
                    restarts.append(container["restartCount"])
                return len(now) == 2 and bad not in now

            await until(elsewhere, f"{bad} has another one in its place", 2 * PATIENCE_S)
            assert max(restarts) == 1
            status = await job.training(2, beyond=status.step + 5)
            await job.stops_as(undisturbed)
            incidents = json.loads((job.dir / "report.json").read_text())["incidents"]
            lost = [one["cause"] for one in incidents if one["cause_kind"] == "node"]
            # --node-memory 1500Mi
            assert len(lost) == 2
            assert all("out-of-memory killer" in cause and "1.57 GB" in cause for cause in lost)

    play(scene)


# ------------------------------------------------------------ operators, evictions


def test_an_operator_that_stood_still_makes_no_second_pod(
    play: Callable[[Scene], None], home: Path, undisturbed: Undisturbed
):
    async def scene(api: Api) -> None:
        async with pair(api, home, "rivals") as (job, status):

            async def leads() -> tuple[str, str]:
                """Who, and on which machine."""
                holder = str((await api.get(LEASE))["spec"]["holderIdentity"])
                pod = f"/api/v1/namespaces/holdfast-system/pods/{holder.rpartition('-')[0]}"
                return holder, str((await api.get(pod))["spec"]["nodeName"])

            holder, stays = await leads()
            # Of the processes of that machine, which sees no others.
            freeze = "kill -{} $(pgrep -f 'holdfast.kubernetes$')"
            cluster("exec", stays, "sh", "-c", freeze.format("STOP"))

            async def passed() -> bool:
                return (await api.get(LEASE))["spec"]["holderIdentity"] not in ("", holder)

            await until(passed, "the other operator leads")
            nodes = [node_of(status, rank) for rank in (0, 1)]
            seats = [stays, (await leads())[1], await job.machine(await job.coordinator())]
            elsewhere = [node for node in nodes if await job.machine(node) not in seats]
            lost = elsewhere[0] if elsewhere else None
            if lost is None:  # both stand beside what has to stay: a pod is enough
                lost = nodes[0]
                await until(lambda: evict(api, lost or ""), f"{lost} is evicted")
            else:
                cluster("kill", await job.machine(lost))
            status = await job.training(2, beyond=status.step + 5)

            async def replaced() -> bool:
                return (await job.object())["status"]["nextNumber"] == 4

            # Before the one that stood still wakes up: it must find that the other has made what it would make.
            await until(replaced, f"the other operator makes a node in the place of {lost}")
            cluster("exec", stays, "sh", "-c", freeze.format("CONT"))

            async def whole() -> bool:
                pods = (await api.list_all(PODS, {}))[0]
                stay = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
                there = lost not in [pod["metadata"]["name"] for pod in stay]
                return there and len(stay) == 4 and all(is_true(pod, "Ready") for pod in stay)

            await until(whole, "three nodes and a coordinator, and nothing else")
            made = await job.object()
            # One was lost and one was made for it; nobody has numbered a second one.
            assert made["status"]["nextNumber"] == 4
            await job.stops_as(undisturbed)

    play(scene)


def test_a_pod_of_higher_priority_takes_a_machine(
    play: Callable[[Scene], None], home: Path, undisturbed: Undisturbed
):
    """The scheduler evicts a node that trains: it leaves at a step's edge, and the spare is in its place."""

    async def scene(api: Api) -> None:
        async with pair(api, home, "lower", "--node-cpus", 1) as (job, status):
            node, machine = await trained_apart(job, status)
            room = (await api.get(f"/api/v1/nodes/{machine}"))["status"]["allocatable"]["cpu"]
            await api.apply(
                "/apis/scheduling.k8s.io/v1/priorityclasses/urgent",
                {
                    "apiVersion": "scheduling.k8s.io/v1",
                    "kind": "PriorityClass",
                    "metadata": {"name": "urgent"},
                    "value": 1000,
                },
                manager="tests",
            )
            urgent: dict[str, Any] = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": "urgent"},
                "spec": {
                    "priorityClassName": "urgent",
                    "nodeSelector": {"kubernetes.io/hostname": machine},
                    "terminationGracePeriodSeconds": 0,
                    "containers": [
                        {
                            "name": "one",
                            "image": IMAGE,
                            "resources": {"requests": {"cpu": f"{int(room) * 1000 - 500}m"}},
                        }
                    ],
                },
            }
            path = "/api/v1/namespaces/default/pods"
            made = await api.create(path, urgent)
            try:

                async def runs() -> bool:
                    return is_true(await api.get(f"{path}/urgent"), "Ready")

                await until(runs, "the urgent pod has the machine")
                status = await job.training(2, beyond=status.step)
                assert node not in [node_of(status, rank) for rank in (0, 1)]
                await job.stops_as(undisturbed, incidents=(0,))
            finally:
                await api.delete(f"{path}/urgent", made["metadata"]["uid"], 0)

    play(scene)


# ------------------------------------------------------------ what cannot run


def test_what_cannot_run_says_why_and_leaves_nothing(play: Callable[[Scene], None], home: Path):
    """Each in its own job, all at once: none of them comes so far that it would need a machine's time."""

    def made(name: str, namespace: str = NAMESPACE, **changes: Any) -> dict[str, Any]:
        usual = {"spec__nodes": 2, "spec__template__spec__containers__0__image": IMAGE}
        one = asked(metadata__name=name, metadata__namespace=namespace, **(usual | changes))
        del one["metadata"]["uid"], one["metadata"]["generation"]
        return one

    async def scene(api: Api) -> None:
        await small_namespace(api)

        async def says(name: str, words: str, namespace: str = NAMESPACE) -> None:
            async def said() -> bool:
                return is_said(await api.get(job_path(namespace, name)), words)

            try:
                await until(said, f"{name} says {words!r}")
            except AssertionError as error:
                raise AssertionError(f"{error}\n{await seen_of(api, namespace, name)}") from None

        async def is_deleted(name: str, namespace: str = NAMESPACE) -> None:
            path = job_path(namespace, name)
            await api.delete(path, (await api.get(path))["metadata"]["uid"])
            await until(lambda: gone(api, path), f"{name} is gone")

        async def unschedulable() -> None:
            limits = {"cpu": "400"}
            await put(api, made("wide", spec__template__spec__containers__0__resources={"limits": limits}))
            await says("wide", "Insufficient cpu")
            await is_deleted("wide")

        async def no_image() -> None:
            await put(api, made("bare", spec__template__spec__containers__0__image="holdfast.test/none:1"))
            await says("bare", "holdfast.test/none:1")
            await is_deleted("bare")

        async def quota() -> None:
            await put(api, made("third", "small"))
            await says("third", "exceeded quota", "small")
            await is_deleted("third", "small")

        async def wrong() -> None:
            with pytest.raises(ApiError, match="minNodes: at most nodes"):
                await put(api, made("odd", spec__minNodes=3))
            with pytest.raises(ApiError, match=r"spec\.nodes"):
                await put(api, made("odder", spec__nodes=0))

        async def again() -> None:
            limits = {"cpu": "400"}
            one = made("twice", spec__template__spec__containers__0__resources={"limits": limits})
            first = await put(api, one)
            await says("twice", "Insufficient cpu")
            await api.delete(job_path(NAMESPACE, "twice"), first["metadata"]["uid"])

            async def is_made() -> dict[str, Any]:
                return await put(api, one)

            second = await until(is_made, "the name is free")
            assert second["metadata"]["uid"] != first["metadata"]["uid"]

            async def is_owned() -> bool:
                pods = [
                    pod
                    for pod in (await api.list_all(PODS, {}))[0]
                    if pod["metadata"]["name"].startswith("twice-")
                    and "deletionTimestamp" not in pod["metadata"]
                ]
                owners = {pod["metadata"]["ownerReferences"][0]["uid"] for pod in pods}
                return len(pods) == 3 and owners == {second["metadata"]["uid"]}

            await until(is_owned, "two nodes and a coordinator, of the second one alone")
            await is_deleted("twice")

        await asyncio.gather(unschedulable(), no_image(), quota(), wrong(), again())
        for namespace in (NAMESPACE, "small"):
            pods = f"/api/v1/namespaces/{namespace}/pods"

            async def nothing(pods: str = pods) -> bool:
                return not (await api.list_all(pods, {}))[0]

            await until(nothing, f"{namespace} has no pods")

    play(scene)


async def seen_of(api: Api, namespace: str, name: str) -> str:
    """What the object and its pods say of themselves."""
    job = (await api.get(job_path(namespace, name))).get("status")
    pods = [
        {"name": pod["metadata"]["name"], "machine": pod["spec"].get("nodeName"), "status": pod["status"]}
        for pod in (await api.list_all(f"/api/v1/namespaces/{namespace}/pods", {}))[0]
    ]
    return yaml.safe_dump({"job": job, "pods": pods})


async def put(api: Api, made: dict[str, Any]) -> dict[str, Any]:
    """A new object."""
    return await api.create(job_path(made["metadata"]["namespace"], "").rstrip("/"), made)


async def small_namespace(api: Api) -> None:
    """With room for two pods."""
    metadata = {"name": "small"}
    await api.apply(
        "/api/v1/namespaces/small",
        {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata},
        manager="tests",
    )
    await api.apply(
        "/api/v1/namespaces/small/resourcequotas/pods",
        {
            "apiVersion": "v1",
            "kind": "ResourceQuota",
            "metadata": {"name": "pods", "namespace": "small"},
            "spec": {"hard": {"pods": "2"}},
        },
        manager="tests",
    )
