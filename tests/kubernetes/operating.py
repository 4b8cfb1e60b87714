"""The operator's edge over HTTP with an API server that remembers, and with no coordinator."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from fakeapi import serving
from kubejobs import job
from liveapi import LiveApi
from rights import is_permitted

from holdfast.kubernetes.policy.machines import Setting
from holdfast.kubernetes.tasks.operator import Operator
from holdfast.protocol.network.endpoint import Endpoint

JOB = "/apis/holdfast.dev/v1alpha1/namespaces/research/holdfastjobs/llm"
PODS = "/api/v1/namespaces/research/pods"

SETTING = Setting()


class Nobody:
    async def find(self) -> Endpoint | None:
        return None


def operated(
    scene: Callable[[LiveApi, Callable[[], Awaitable[None]]], Awaitable[None]],
    fake: LiveApi | None = None,
    setting: Setting = SETTING,
    **spec: Any,
) -> None:
    """A cluster with one job of two nodes and a spare; the scene may have the operator killed and started again."""
    fake = fake or LiveApi()

    async def run() -> None:
        running: list[asyncio.Task[None]] = []
        async with serving(fake) as api, asyncio.timeout(30):

            async def restart() -> None:
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)
                running[:] = [asyncio.create_task(Operator(api, setting, lambda _: Nobody()).run())]

            await fake.put(JOB, job(spec__nodes=2, spec__spares=1, **spec), "ADDED")
            await restart()
            try:
                await scene(fake, restart)
            finally:
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)
        asked = {(method, path, tuple(query.items())) for method, path, query, _ in fake.asked}
        # A cluster with access control would refuse what the manifest does not name, which this server does not.
        wants = setting.marking != "none", setting.replacements is not None
        assert not [(m, p) for m, p, query in asked if not is_permitted(m, p, dict(query), *wants)]

    asyncio.run(run())
