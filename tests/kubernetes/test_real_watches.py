"""A real API server that is away between two requests of an operator, whose watches say nothing, or that has forgotten a version."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kubernetes_asyncio")
pytest.importorskip("yaml")
from apiproxy import PASSES, ApiProxy, Asked, Fate, behind_proxy
from realkube import (
    FOLDER,
    IMAGE,
    LEASE,
    NAMESPACE,
    PACE_S,
    PATIENCE_S,
    STEPS,
    Job,
    Scene,
    Undisturbed,
    cluster,
    gone,
    pods_of,
    until,
)

from holdfast.engines.jobs import EXIT_STOPPED
from holdfast.kubernetes.client.api import SILENT_S, Api
from holdfast.kubernetes.objects.resource import job_path
from holdfast.kubernetes.objects.status import from_timestamp

pytestmark = [pytest.mark.kube, pytest.mark.nightly, pytest.mark.timeout(900)]
NODES = 4
TRIES = 3
TO_LIVE_S = 15
QUIET_S = 700.0
WATCHED = ("/apis/holdfast.dev/v1alpha1/holdfastjobs", "/api/v1/pods")


def test_the_api_server_is_gone_between_two_pods(
    play: Callable[[Scene], None], home: Path, undisturbed: Undisturbed
):
    """Two of four nodes are made. When it is back there are exactly four."""

    async def scene(api: Api) -> None:
        async with behind_proxy(api, home) as (proxy, _):
            made = 0

            def rule(asked: Asked) -> Fate:
                nonlocal made
                if is_pod(asked):
                    made += 1
                    # The coordinator's and two more are there. At once: asked to end it may take longer than the operator's lease
                    # lasts, and an operator without a lease tries nothing.
                    if made == 4:
                        cluster("apiserver", "kill")
                return PASSES

            proxy.rule = rule
            async with Job(api, home, "halfway", "--nnodes", NODES, steps=STEPS, pace_s=PACE_S) as job:
                try:

                    async def tried() -> bool:
                        # Of a pod whose creation was not answered it asks whether it is there, before anything else. A watch's
                        # list is of the pods of all namespaces, and is none of these.
                        pods = [one for one in proxy.seen if one.asked.path.startswith(f"{FOLDER}/pods")]
                        return sum(one.status == 0 for one in pods) >= TRIES

                    await until(tried, f"the operator has tried {TRIES} times without a server")
                finally:
                    cluster("apiserver", "start")
                await job.training(NODES, beyond=8)
                done = [one for one in proxy.seen if is_pod(one.asked) and one.status == 201]
                assert len(done) == NODES + 1
                assert len(await pods_of(api)) == NODES + 1
                await job.stops_as(undisturbed)

    play(scene)


def is_pod(asked: Asked) -> bool:
    """A request that makes one."""
    return asked.method == "POST" and asked.path.endswith("/pods")


@asynccontextmanager
async def watched(api: Api, home: Path, name: str) -> AsyncIterator[tuple[ApiProxy, Job, dict[str, Any]]]:
    """A job of one or two nodes and a spare, whose operator hears of it through a proxy."""
    async with behind_proxy(api, home) as (proxy, operator):
        options = ("--nnodes", "1:2", "--spares", 1)
        async with Job(api, home, name, *options, steps=STEPS, pace_s=PACE_S) as job:
            try:
                yield proxy, job, await job.training(2, beyond=3, spares=1)
            finally:
                print((home / "operator.log").read_text()[-3000:])
            assert operator.starts == 1, "the operator has ended"


@asynccontextmanager
async def changed_unheard(
    api: Api, home: Path, job: Job
) -> AsyncIterator[Callable[[float], Awaitable[None]]]:
    """The coordinator's pod vanishes, and another job is submitted. Only watches tell. Waits until both are answered."""
    before = await job.coordinator()
    pod = await job.pod(before)
    await api.delete(f"{FOLDER}/pods/{before}", pod["metadata"]["uid"], 0)
    options = ("--nnodes", 1)
    async with Job(api, home, f"{job.name}-other", *options, steps=STEPS, pace_s=PACE_S) as other:

        async def answered(within_s: float) -> None:
            await job.succeeds(before, within_s)
            await other.training(1, beyond=3, within_s=within_s)
            await other.stop()
            assert await other.wait() == EXIT_STOPPED

        yield answered


def test_watches_that_say_nothing(play: Callable[[Scene], None], home: Path, undisturbed: Undisturbed):
    """Their connections are open, and no byte comes. They are asked for again when they have been silent for too long."""

    async def scene(api: Api) -> None:
        async with watched(api, home, "silent") as (proxy, job, status):
            begun = len(proxy.seen)
            proxy.mute()
            async with changed_unheard(api, home, job) as answered:
                await answered(SILENT_S + PATIENCE_S)
            assert all(versions(proxy, path, begun) for path in WATCHED)
            await job.training(2, beyond=status.step, spares=1)
            await job.stops_as(undisturbed)

    play(scene)


def test_a_version_that_the_server_has_forgotten(
    play: Callable[[Scene], None], home: Path, undisturbed: Undisturbed
):
    """410: everything is listed anew, and what vanished meanwhile is noticed."""

    async def scene(api: Api) -> None:
        async with watched(api, home, "forgotten") as (proxy, job, status):
            # A server that starts knows nothing of what was before.
            begun = len(proxy.seen)
            cluster("apiserver", "stop")
            cluster("apiserver", "start")

            async def watched_again() -> bool:
                return all(versions(proxy, path, begun) for path in WATCHED)

            await until(watched_again, "the operator watches again")
            proxy.rule = lambda asked: Fate(refused=503) if asked.watches else PASSES
            proxy.cut()
            told: set[str] = set()

            def old(asked: Asked) -> Fate:
                """The first time the server is asked for what happened since its beginning."""
                if not asked.watches or asked.path in told:
                    return PASSES
                told.add(asked.path)
                return Fate(version="1")

            async with changed_unheard(api, home, job) as answered:
                assert proxy.gone == 0
                proxy.rule = old
                await answered(PATIENCE_S)
            print(f"{proxy.gone} watches were told that their version is gone")
            assert proxy.gone >= len(WATCHED)
            await job.training(2, beyond=status.step, spares=1)
            await job.stops_as(undisturbed)

    play(scene)


CLOCK = """
import time

real = time.time
time.time = lambda: real() + {off_s}
"""
"""A sitecustomize module: a process whose clock is wrong."""


@pytest.mark.parametrize("off_s", [-600, 600])
def test_an_operator_whose_clock_is_wrong(
    play: Callable[[Scene], None], home: Path, undisturbed: Undisturbed, off_s: int
):
    """A job that ends is there for its time to live, one that is deleted has its time to save."""

    async def scene(api: Api) -> None:
        clock = home / f"clock{off_s}"
        clock.mkdir()
        (clock / "sitecustomize.py").write_text(CLOCK.format(off_s=off_s))
        async with behind_proxy(api, home, environment={"PYTHONPATH": str(clock)}):
            name = f"clock{off_s}".replace("-", "-minus-")
            async with Job(api, home, name, "--nnodes", 2, steps=STEPS, pace_s=PACE_S) as job:
                await job.training(2, beyond=8)
                lease = await api.get(LEASE)
                renewed_s = from_timestamp(lease["spec"]["renewTime"])
                assert renewed_s == pytest.approx(time.time() + off_s, abs=60), "its clock is right"
                path = job_path(NAMESPACE, name)
                await api.merge(path, {"spec": {"runPolicy": {"ttlSecondsAfterFinished": TO_LIVE_S}}})
                await job.stops_as(undisturbed)
                ended_s = time.monotonic()
                await until(lambda: gone(api, path), "the job is taken away")
                assert TO_LIVE_S - 5 < time.monotonic() - ended_s < TO_LIVE_S + 30
            async with Job(api, home, f"{name}-del", "--nnodes", 2, steps=STEPS, pace_s=PACE_S) as job:
                await job.training(2, beyond=8)
                made = await job.object()
                await api.delete(job_path(NAMESPACE, job.name), made["metadata"]["uid"])
                await until(lambda: gone(api, job_path(NAMESPACE, job.name)), "the job is gone")
                # It was asked to save, and did.
                assert "stopped at step" in job.log.read_text()

    play(scene)


@pytest.mark.timeout(1500)
def test_ten_minutes_in_which_nothing_happens(play: Callable[[Scene], None], home: Path):
    """Bookmarks keep the versions young: watches that end go on from there, and nothing is listed anew.

    A pod of somebody else's changes, of which the operator is told nothing. Kubernetes 1.34.4 has no younger version of pods while
    none changes.
    """

    async def scene(api: Api) -> None:
        async with behind_proxy(api, home) as (proxy, _), strangers_pod(api) as change:

            async def watched() -> bool:
                return all(versions(proxy, path, 0) for path in WATCHED)

            await until(watched, "the operator watches")
            begun = len(proxy.seen)

            async def asked_again() -> bool:
                """A watch lasts four to five minutes. One that is ended before is asked for from the same version."""
                await change()
                return all(len(set(versions(proxy, path, 0))) >= 3 for path in WATCHED)

            await until(asked_again, "each watch was asked for from two younger versions", QUIET_S)
            for path in WATCHED:
                found = [int(version) for version in versions(proxy, path, 0)]
                print(path, found)
                assert found == sorted(found), f"{path}: the version goes back"
            assert proxy.gone == 0
            lists = [one for one in proxy.seen[begun:] if one.asked.path in WATCHED and not one.asked.watches]
            assert not lists

    play(scene)


@asynccontextmanager
async def strangers_pod(api: Api) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """It never runs. With what changes it, every fiftieth time that it is asked to."""
    path = "/api/v1/namespaces/default/pods/strangers"
    container = {"name": "sleeps", "image": IMAGE}
    spec = {"schedulerName": "nobody", "containers": [container]}
    made = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "strangers", "namespace": "default"},
        "spec": spec,
    }
    uid = (await api.apply(path, made, manager="tests"))["metadata"]["uid"]
    times = itertools.count()

    async def change() -> None:
        if (number := next(times)) % 50 == 0:
            await api.merge(path, {"metadata": {"annotations": {"times": str(number)}}})

    try:
        yield change
    finally:
        await api.delete(path, uid, 0)


def versions(proxy: ApiProxy, path: str, begun: int) -> list[str]:
    """From which on a path was watched, since then."""
    return [one.asked.version for one in proxy.seen[begun:] if one.asked.path == path and one.asked.watches]
