"""Where a real Kubernetes has no room for a job's nodes, or does not want them: drains, two jobs at once, limits, gates."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from kubejobs import job as asked
from realkube import (
    FOLDER,
    IMAGE,
    MACHINES,
    NAMESPACE,
    PACE_S,
    PATIENCE_S,
    STEPS,
    TRAIN,
    Job,
    Scene,
    Undisturbed,
    cordon,
    evict,
    gone,
    holdfast,
    is_said,
    is_true,
    node_of,
    trained_apart,
    until,
    word,
)

from holdfast.kubernetes.client.api import Api
from holdfast.kubernetes.objects.resource import job_path

pytestmark = [pytest.mark.kube, pytest.mark.nightly, pytest.mark.timeout(900)]


@asynccontextmanager
async def drained(api: Api, machine: str) -> AsyncIterator[None]:
    """Nothing may be scheduled there any more, as `kubectl drain` begins. No other machine has room; what runs there stays."""
    others = [f"/api/v1/nodes/{one}" for one in MACHINES if one != machine]
    full = {"key": "tests.holdfast.dev/full", "effect": "NoSchedule"}
    try:
        for other in others:
            await api.merge(other, {"spec": {"taints": [full]}})
        await cordon(api, machine)
        yield
    finally:
        for other in others:
            await api.merge(other, {"spec": {"taints": None}})


def test_a_drain_without_a_spare_shrinks_the_job(
    play: Callable[[Scene], None], home: Path, undisturbed: Undisturbed
):
    """The budget refuses the eviction until the node has left at a step's edge. With room again, the job grows back."""

    async def scene(api: Api) -> None:
        async with Job(api, home, "tight", "--nnodes", "1:2", steps=STEPS, pace_s=PACE_S) as job:
            status = await job.training(2, beyond=3)
            node, machine = await trained_apart(job, status)
            async with drained(api, machine):
                await until(lambda: evict(api, node), f"{node} is evicted", 2 * PATIENCE_S)
                status = await job.training(1, beyond=status.step + 3)
            await job.training(2, beyond=status.step + 3)
            await job.stops_as(undisturbed, incidents=(0,))

    play(scene)


def test_a_drain_of_a_job_of_fixed_size_waits_for_a_machine(
    play: Callable[[Scene], None], home: Path, undisturbed: Undisturbed
):
    """It trains on meanwhile, its eviction is refused, and a condition says what is missing."""

    async def scene(api: Api) -> None:
        async with Job(api, home, "fixed", "--nnodes", 2, steps=STEPS, pace_s=PACE_S) as job:
            status = await job.training(2, beyond=3)
            node, machine = await trained_apart(job, status)
            async with drained(api, machine):
                await until(lambda: job.says("untolerated taint"), "what is missing is said")
                assert not await evict(api, node)
                assert not await gone(api, f"{FOLDER}/pods/{node}")
                status = await job.training(2, beyond=status.step + 20)
                assert node in [node_of(status, rank) for rank in (0, 1)]
                assert not await evict(api, node)
            await until(lambda: evict(api, node), f"{node} is evicted")
            await job.training(2, beyond=status.step + 5)
            await job.stops_as(undisturbed, incidents=(0,))

    play(scene)


def test_two_jobs_and_room_for_one_and_a_half(
    play: Callable[[Scene], None], home: Path, undisturbed: Undisturbed
):
    """Each may get a part of what both need. One trains, the other gives its machines back, and has its turn afterwards."""

    async def scene(api: Api) -> None:
        options = ("--nnodes", 3, "--node-cpus", "1100m")
        jobs = [Job(api, home, name, *options, steps=STEPS, pace_s=PACE_S) for name in ("left", "right")]
        try:

            async def one_trains() -> Job | None:
                for job in jobs:
                    if is_true(await job.object(), "Training"):
                        return job
                return None

            first: Job = await until(one_trains, "one of them trains", 6 * PATIENCE_S)
            (second,) = [job for job in jobs if job is not first]
            assert not is_true(await second.object(), "Training")
            status = await first.training(3, beyond=5)
            await until(lambda: second.says("the next try is at"), "the other gave back", 4 * PATIENCE_S)
            await first.training(3, beyond=status.step + 5)
            await first.stops_as(undisturbed, incidents=(0,))
            await second.condition("Training", 6 * PATIENCE_S)
            await second.training(3, beyond=5)
            await second.stops_as(undisturbed, incidents=(0,))
        finally:
            for job in jobs:
                await job.__aexit__(None, None, None)

    play(scene)


def test_what_the_cluster_does_not_allow_is_said_in_its_words(play: Callable[[Scene], None], home: Path):
    """By a limit of the namespace, and by its Pod Security: to who submits, and in the object that somebody applied."""

    async def scene(api: Api) -> None:
        await limited_namespace(api)
        usual = {"spec__nodes": 2, "spec__template__spec__containers__0__image": IMAGE}
        path = "spec__template__spec__containers__0__"
        resources = {"limits": {"memory": "2Gi"}}
        powers = {"capabilities": {"add": ["SYS_ADMIN"]}}
        wanted = {
            ("large", "limited"): ({f"{path}resources": resources}, "maximum memory usage per Container"),
            ("root", NAMESPACE): ({f"{path}securityContext": powers}, 'violates PodSecurity "restricted'),
        }
        for (name, namespace), (changes, words) in wanted.items():
            made = asked(metadata__name=name, metadata__namespace=namespace, **usual, **changes)
            del made["metadata"]["uid"], made["metadata"]["generation"]
            await api.create(job_path(namespace, "").rstrip("/"), made)

            async def said(name: str = name, namespace: str = namespace, words: str = words) -> bool:
                there = await api.get(job_path(namespace, name))
                accepted = word(there, "Accepted") or {}
                return accepted.get("reason") == "PodRejected" and is_said(there, words)

            await until(said, f"{name} says {words!r}")
            pods = (await api.list_all(f"/api/v1/namespaces/{namespace}/pods", {}))[0]
            nodes = [pod for pod in pods if pod["metadata"]["name"].startswith(f"{name}-n")]
            assert not nodes
            there = await api.get(job_path(namespace, name))
            await api.delete(job_path(namespace, name), there["metadata"]["uid"])
            await until(lambda name=name, at=namespace: gone(api, job_path(at, name)), f"{name} is gone")
        argv = ["run", "--engine", "kubernetes", "--image", IMAGE, "--namespace", "limited", "--job", "asked"]
        argv += ["--nnodes", "2", "--node-memory", "2Gi", str(TRAIN), "10"]
        refused = await asyncio.to_thread(holdfast, home, *argv)
        assert refused.returncode != 0
        assert "maximum memory usage per Container" in refused.stdout + refused.stderr
        assert await gone(api, job_path("limited", "asked"))

    play(scene)


async def limited_namespace(api: Api) -> None:
    """No container in it may have more than a gigabyte."""
    limits: list[dict[str, Any]] = [{"type": "Container", "max": {"memory": "1Gi"}}]
    metadata = {"name": "limited"}
    made = {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}
    await api.apply("/api/v1/namespaces/limited", made, manager="tests")
    made = {
        "apiVersion": "v1",
        "kind": "LimitRange",
        "metadata": metadata | {"namespace": "limited"},
        "spec": {"limits": limits},
    }
    await api.apply("/api/v1/namespaces/limited/limitranges/limited", made, manager="tests")
