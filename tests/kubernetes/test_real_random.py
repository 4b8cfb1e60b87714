"""One job on a real Kubernetes, and whatever comes, in random order: at the end each step has the loss that it has without faults.

`HOLDFAST_KUBE_SEEDS=N` plays so many, from `HOLDFAST_KUBE_SEED` on.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from realkube import (
    FOLDER,
    MACHINES,
    PACE_S,
    PATIENCE_S,
    STEPS,
    Job,
    Scene,
    Undisturbed,
    cluster,
    cordon,
    evict,
    is_true,
    operators,
    pods_of,
    until,
)

from holdfast.errors import HoldfastError
from holdfast.kubernetes.client.api import Api, NoApiAnswer

pytestmark = [pytest.mark.kube, pytest.mark.nightly, pytest.mark.timeout(1800)]
EVENTS = 10
SEEDS = range(
    first := int(os.environ.get("HOLDFAST_KUBE_SEED", "1")),
    first + int(os.environ.get("HOLDFAST_KUBE_SEEDS", "3")),
)


class Fate:
    """What befalls a job. Each method is one event; `mended` ends what an event has begun."""

    def __init__(self, api: Api, job: Job, dice: random.Random) -> None:
        self.api, self.job, self.dice = api, job, dice
        self.happened: list[str] = []
        self._mends: list[Callable[[], Awaitable[object]]] = []

    async def strikes(self) -> None:
        """Something happens. At most one machine is away at a time: more than two at once is another scene."""
        events = [self.worker, self.pod, self.agent, self.coordinator, self.evicted, self.labels]
        events += [self.operator, self.server]
        if not self._mends:
            events += [self.power, self.cable, self.freeze, self.path, self.cordoned] * 2
        event = self.dice.choice(events)
        self.happened.append(event.__name__)
        print(f"{self.job.name}: {' '.join(self.happened)}")
        await event()

    async def mended(self) -> None:
        while self._mends:
            await self._mends.pop()()

    # ------------------------------------------------------------ events

    async def worker(self) -> None:
        try:
            async with self.job.client() as client:
                await client.post("/fault", f"kill-worker:rank={self.dice.randrange(2)}")
        except HoldfastError as error:
            # Nobody has the job just now, or nobody that rank: something else happens.
            print(f"{self.job.name}: no worker is killed: {error}")
            raise NoApiAnswer(str(error)) from error

    async def pod(self) -> None:
        name, uid = await self._a_node()
        await self.api.delete(f"{FOLDER}/pods/{name}", uid)

    async def agent(self) -> None:
        await self._container((await self._a_node())[0])

    async def coordinator(self) -> None:
        name = await self.job.coordinator()
        if is_true(await self.job.pod(name), "Ready"):
            await self._container(name)

    async def evicted(self) -> None:
        await evict(self.api, (await self._a_node())[0])

    async def labels(self) -> None:
        name, _ = await self._a_node()
        labels = (await self.job.pod(name))["metadata"]["labels"]
        await self.api.merge(f"{FOLDER}/pods/{name}", {"metadata": {"labels": dict.fromkeys(labels)}})

    async def operator(self) -> None:
        for pod in await operators(self.api):
            metadata = pod["metadata"]
            path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
            await self.api.delete(path, metadata["uid"], 0)

    async def server(self) -> None:
        await asyncio.to_thread(cluster, "apiserver", "stop")
        await asyncio.to_thread(cluster, "apiserver", "start")

    async def power(self) -> None:
        await self._with_machine("kill", "boot")

    async def cable(self) -> None:
        await self._with_machine("cut", "heal")

    async def freeze(self) -> None:
        await self._with_machine("freeze", "thaw")

    async def path(self) -> None:
        await self._with_machine("block", "unblock")

    async def cordoned(self) -> None:
        machine = self.dice.choice(MACHINES)
        await cordon(self.api, machine)
        self._mends.append(lambda: cordon(self.api, machine, on=False))

    # ------------------------------------------------------------ how

    async def _container(self, pod: str) -> None:
        try:
            await self.job.kill_container(pod)
        except subprocess.SubprocessError as error:
            # It has just been killed, or its machine has no power or stands still, and Kubernetes does not know it yet.
            print(f"{self.job.name}: nothing of {pod} is killed: {error}")
            raise NoApiAnswer(str(error)) from error

    async def _a_node(self) -> tuple[str, str]:
        """Its pod's name and uid."""

        async def ready() -> list[dict[str, Any]]:
            return [
                pod
                for pod in await pods_of(self.api)
                if "-n" in pod["metadata"]["name"] and is_true(pod, "Ready")
            ]

        nodes = await until(ready, "a node is ready")
        pod = self.dice.choice(sorted(nodes, key=lambda pod: str(pod["metadata"]["name"])))
        return pod["metadata"]["name"], pod["metadata"]["uid"]

    async def _with_machine(self, begin: str, end: str) -> None:
        machine = self.dice.choice(MACHINES)
        await asyncio.to_thread(cluster, begin, machine)
        self._mends.append(lambda: asyncio.to_thread(cluster, end, machine))


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_comes_the_curve_is_the_undisturbed_one(
    play: Callable[[Scene], None], home: Path, undisturbed: Undisturbed, seed: int
):
    async def scene(api: Api) -> None:
        options = ("--nnodes", "1:2", "--spares", 1)
        async with Job(api, home, f"fate{seed}", *options, steps=STEPS, pace_s=PACE_S) as job:
            status = await job.training(2, beyond=3, spares=1)
            fate = Fate(api, job, random.Random(seed))
            try:
                for _ in range(EVENTS):
                    await until(lambda: done(fate.strikes), "the next event")
                    if fate.dice.random() < 0.7:
                        # Alone, or two of them at once.
                        status = await job.training(
                            1, beyond=status.step + fate.dice.randint(1, 12), at_least=True
                        )
                        await fate.mended()
                        status = await job.training(2, beyond=status.step, spares=1, within_s=2 * PATIENCE_S)
            finally:
                await fate.mended()
            await job.training(2, beyond=status.step + 3, spares=1, within_s=2 * PATIENCE_S)
            await job.stops_as(undisturbed)

    play(scene)


async def done(act: Callable[[], Awaitable[Any]]) -> bool:
    await act()
    return True
