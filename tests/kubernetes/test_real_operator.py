"""One life of a job on a real Kubernetes, by an operator for whom the way to the API server is bad."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kubernetes_asyncio")
pytest.importorskip("yaml")
from apiproxy import PASSES, ApiProxy, Asked, Fate, ProxiedOperator, behind_proxy
from realkube import (
    FOLDER,
    NAMESPACE,
    PACE_S,
    STEPS,
    Job,
    Scene,
    Undisturbed,
    gone,
    node_of,
    pods_of,
    until,
)

from holdfast.kubernetes.client.api import Api, ApiError, NoApiAnswer
from holdfast.kubernetes.objects.resource import job_path

pytestmark = [pytest.mark.kube, pytest.mark.timeout(900)]
PATIENCE_S = 150.0
"""An operator that is killed again and again, or refused for a minute, is slow and no more than that."""


@dataclass
class Weather:
    """What goes wrong on the way. Each method and kind of object counts once in each part of the job's life."""

    proxy: ApiProxy
    operator: ProxiedOperator
    part: str = "create"
    met: set[tuple[str, str, str]] = field(default_factory=set)

    def is_first(self, asked: Asked) -> bool:
        """Whether nothing of the kind was asked for in this part of the life."""
        return self._key(asked) not in self.met

    def meet(self, asked: Asked) -> None:
        self.met.add(self._key(asked))

    def _key(self, asked: Asked) -> tuple[str, str, str]:
        # Names of pods are numbered; /status is another kind of request than the object's.
        return self.part, asked.method, re.sub(r"\d+", "N", asked.path)

    def begins(self) -> None:
        """Before the job."""

    async def blow(self, api: Api, job: Job) -> None:
        """Beside the job, until it is cancelled."""
        await asyncio.Event().wait()

    def check(self) -> None:
        """After the life."""


class Killed(Weather):
    """The operator is killed after each of its requests, when it is done and not answered."""

    def begins(self) -> None:
        self.proxy.after = self._after

    def _after(self, asked: Asked, status: int) -> None:
        if asked.acts and status < 400 and self.is_first(asked):
            self.meet(asked)
            self.operator.kill()

    def check(self) -> None:
        print(f"killed {len(self.met)} times: {sorted(self.met)}")
        # Requests that are under way at once are ended by one kill.
        assert min(self.operator.starts, len(self.met)) > 15


class Lost(Weather):
    """Each request is done, and its answer is lost."""

    def begins(self) -> None:
        self.proxy.rule = self._rule

    def _rule(self, asked: Asked) -> Fate:
        if not asked.acts or not self.is_first(asked):
            return PASSES
        self.meet(asked)
        return Fate(lost=True)

    def check(self) -> None:
        assert self.operator.starts == 1, "the operator has ended"
        assert len(self.met) > 15


class Cut(Weather):
    """Watches are cut every second."""

    def begins(self) -> None:
        self.proxy.rule = lambda asked: Fate(cut_s=1.0) if asked.watches else PASSES

    def check(self) -> None:
        assert self.operator.starts == 1, "the operator has ended"
        watches = sum(one.asked.watches for one in self.proxy.seen)
        assert watches > 50


class Refused(Weather):
    """The server is busy: each request is asked to come again. For a minute it is broken, and once it does not know the operator."""

    AFTER_S = 2
    BROKEN_S = 60.0

    def begins(self) -> None:
        self.proxy.rule = self._rule
        self.early: list[Asked] = []
        self.told_s: dict[Asked, float] = {}
        self.broken: list[float] = []
        self.unknown = 0

    def _rule(self, asked: Asked) -> Fate:
        now_s = time.monotonic()
        if self.part == "replace" and (not self.broken or now_s < self.broken[0] + self.BROKEN_S):
            self.broken.append(now_s)
            return Fate(refused=500)
        if self.part == "take over" and not self.unknown:
            self.unknown += 1
            return Fate(refused=401)
        if not asked.acts:
            return PASSES
        # A hundredth of a second: the operator counts from the answer, and this from the question.
        if now_s - self.told_s.get(asked, 0.0) < self.AFTER_S - 0.01:
            self.early.append(asked)
        if self.is_first(asked):
            self.meet(asked)
            # Several POSTs to one folder are several objects, each asked for at its own time.
            if asked.method != "POST":
                self.told_s[asked] = now_s
            return Fate(refused=429, retry_after_s=self.AFTER_S)
        return PASSES

    def check(self) -> None:
        print(
            f"{len(self.broken)} requests in {self.BROKEN_S:g} s of errors; restarts: {self.operator.starts - 1}"
        )
        assert self.told_s
        assert not self.early, "what was asked to wait did not"
        # A handful of watches, each asked for again ever more slowly.
        assert 5 < len(self.broken) < 5 * self.BROKEN_S
        assert self.unknown == 1


REFUSED = (409, 422)
"""Of writes: the object has changed."""


class Storm(Weather):
    """A script changes the job's object and pods fifty times a second."""

    def begins(self) -> None:
        self.changes = 0

    async def blow(self, api: Api, job: Job) -> None:
        while True:
            self.changes += 1
            note = {"metadata": {"annotations": {"tests.holdfast.dev/storm": str(self.changes)}}}
            try:
                await api.merge(job_path(NAMESPACE, job.name), note)
                for pod in await pods_of(api) if self.changes % 10 == 0 else ():
                    await api.merge(f"{FOLDER}/pods/{pod['metadata']['name']}", note)
            except (ApiError, NoApiAnswer):
                pass
            await asyncio.sleep(0.02)

    def check(self) -> None:
        writes = [one for one in self.proxy.seen if one.asked.acts]
        conflicts = sum(one.status in REFUSED for one in writes)
        seconds = writes[-1].at_s - writes[0].at_s
        print(
            f"{self.changes} changes in {seconds:.0f} s; {len(writes)} writes of the operator, {conflicts} conflicts"
        )
        assert self.changes > 300
        assert self.operator.starts == 1, "the operator has ended"
        tries = most = 0
        for one in writes:
            if one.asked.path.endswith("/status"):
                tries = tries + 1 if one.status in REFUSED else 0
                most = max(most, tries)
        assert most < 5, "a status was refused again and again"
        assert len(writes) < self.changes / 2, "the operator writes as often as the script"


@pytest.mark.parametrize(
    "weather",
    [Killed, *(pytest.param(weather, marks=pytest.mark.nightly) for weather in (Lost, Cut, Refused, Storm))],
    ids=lambda weather: weather.__name__.lower(),
)
def test_a_life_in_bad_weather(
    play: Callable[[Scene], None], home: Path, undisturbed: Undisturbed, weather: type[Weather]
):
    """Created, a node and the coordinator replaced, resized, at its end and taken away; suspended, resumed and deleted: all as ever,
    and no number of a pod twice."""

    async def scene(api: Api) -> None:
        async with behind_proxy(api, home) as (proxy, operator):
            now = weather(proxy, operator)
            now.begins()
            try:
                await first_life(api, now, home, undisturbed)
                await second_life(api, now, home)
            except (AssertionError, TimeoutError):
                await tell_pods(api)
                raise
            finally:
                print((home / "operator.log").read_text()[-3000:])
            now.check()

    play(scene)


async def first_life(api: Api, now: Weather, home: Path, undisturbed: Undisturbed) -> None:
    name = f"first-{type(now).__name__.lower()}"
    async with (
        numbered_once(api),
        Job(api, home, name, "--nnodes", "1:2", "--spares", 1, steps=STEPS, pace_s=PACE_S) as job,
        beside(now, api, job),
    ):
        path = job_path(NAMESPACE, job.name)
        status = await job.training(2, beyond=3, spares=1, within_s=PATIENCE_S)
        now.part = "replace"
        await delete(api, node_of(status, 1))
        status = await job.training(2, beyond=status.step + 10, spares=1, within_s=PATIENCE_S)
        now.part = "take over"
        before = await job.coordinator()
        await delete(api, before)

        await job.succeeds(before, PATIENCE_S)
        status = await job.training(2, beyond=status.step + 10, spares=1, within_s=PATIENCE_S)
        now.part = "resize"
        await until(changes(api, path, {"spec": {"nodes": 1}}), "a smaller size", PATIENCE_S)
        status = await job.training(1, beyond=status.step + 5, within_s=PATIENCE_S)
        await until(changes(api, path, {"spec": {"nodes": 2}}), "its size again", PATIENCE_S)
        await job.training(2, beyond=status.step + 5, spares=1, within_s=PATIENCE_S)
        now.part = "end"
        ttl = {"spec": {"runPolicy": {"ttlSecondsAfterFinished": 1}}}
        await until(changes(api, path, ttl), "a time to live", PATIENCE_S)
        # A pod that somebody deletes is a planned change; a coordinator's end is told as an incident.
        await job.stops_as(undisturbed)
        await until(lambda: gone(api, path), "the job is taken away", PATIENCE_S)
        await until(lambda: nothing(api), "no pod is left", PATIENCE_S)


async def second_life(api: Api, now: Weather, home: Path) -> None:
    name = f"second-{type(now).__name__.lower()}"
    async with (
        numbered_once(api),
        Job(api, home, name, "--nnodes", 2, steps=STEPS, pace_s=PACE_S) as job,
        beside(now, api, job),
    ):
        path = job_path(NAMESPACE, job.name)
        now.part = "create again"
        await job.training(2, beyond=1, within_s=PATIENCE_S)
        now.part = "suspend"
        await until(changes(api, path, {"spec": {"runPolicy": {"suspend": True}}}), "suspend", PATIENCE_S)
        await until(lambda: nothing(api), "every pod is given back", PATIENCE_S)
        await job.condition("Suspended", PATIENCE_S)
        now.part = "resume"
        await until(changes(api, path, {"spec": {"runPolicy": {"suspend": False}}}), "resume", PATIENCE_S)

        async def second_run() -> bool:
            return bool((await job.object())["status"].get("run") == 2)

        await until(second_run, "its second run", PATIENCE_S)
        await job.condition("Training", PATIENCE_S)
        now.part = "delete"
        made = await job.object()
        await api.delete(path, made["metadata"]["uid"])
        await until(lambda: gone(api, path), "the object is gone", PATIENCE_S)
        await until(lambda: nothing(api), "every pod is gone with it", PATIENCE_S)


async def delete(api: Api, pod: str) -> None:
    """As a person does it."""
    made = await api.get(f"{FOLDER}/pods/{pod}")
    await api.delete(f"{FOLDER}/pods/{pod}", made["metadata"]["uid"])


def changes(api: Api, path: str, patch: dict[str, Any]) -> Callable[[], Any]:
    async def change() -> bool:
        await api.merge(path, patch)
        return True

    return change


async def tell_pods(api: Api) -> None:
    """What is there, for whoever reads of a failure."""
    for pod in await pods_of(api):
        metadata, status = pod["metadata"], pod["status"]
        told = ("deletionTimestamp", "deletionGracePeriodSeconds", "finalizers", "ownerReferences")
        print(
            metadata["name"],
            pod["spec"].get("nodeName"),
            status.get("phase"),
            {key: metadata.get(key) for key in told},
            status.get("containerStatuses"),
        )


async def nothing(api: Api) -> bool:
    return not await pods_of(api)


@asynccontextmanager
async def beside(now: Weather, api: Api, job: Job) -> AsyncIterator[None]:
    """The weather, while the job lives."""
    blowing = asyncio.create_task(now.blow(api, job))
    try:
        yield
    finally:
        blowing.cancel()
        await asyncio.gather(blowing, return_exceptions=True)


@asynccontextmanager
async def numbered_once(api: Api) -> AsyncIterator[None]:
    """No name of a pod is ever used for a second one."""
    uids: dict[str, str] = {}

    async def look() -> None:
        _, version = await api.list_all(f"{FOLDER}/pods", {})
        while True:
            try:
                async for event in api.watch(f"{FOLDER}/pods", {}, version):
                    metadata = event["object"]["metadata"]
                    version = metadata["resourceVersion"]
                    if event["type"] != "BOOKMARK":
                        uids.setdefault(f"{metadata['name']} {metadata['uid']}", metadata["name"])
            except NoApiAnswer:
                pass

    looking = asyncio.create_task(look())
    try:
        yield
    finally:
        looking.cancel()
        found = await asyncio.gather(looking, return_exceptions=True)
    assert isinstance(found[0], asyncio.CancelledError), found
    names = Counter(uids.values())
    assert len(names) >= 5, names
    assert max(names.values()) == 1, names
