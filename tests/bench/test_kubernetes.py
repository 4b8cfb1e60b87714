"""`python -m bench.kubernetes`: its watches are the operator's own Informer, which calls them back."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.kubernetes.__main__ import Pods
from bench.kubernetes.coordinators import Coordinators

from holdfast.engines.kubernetes.informer import Informer


class OnePod:
    """An API server that has one pod, and then nothing more to tell."""

    async def list_all(self, path: str, query: Any) -> Any:
        metadata = {"name": "large-n0", "uid": "u", "resourceVersion": "7"}
        return [{"metadata": metadata, "status": {"phase": "Pending"}}], "7"

    async def watch(self, path: str, query: Any, version: str) -> Any:
        await asyncio.Event().wait()
        yield {}


def is_listed(follows: Any, on_change: Callable[[Any], None], on_gone: Callable[[Any], None]) -> None:
    """Its informer has told it of the pod, and did not fail over it."""

    async def scene() -> None:
        api: Any = OnePod()
        informer = Informer(
            api=api,
            path="/api/v1/pods",
            query={},
            on_list=follows.on_list,
            on_change=on_change,
            on_gone=on_gone,
        )
        running = asyncio.create_task(informer.run())
        listed = asyncio.create_task(informer.listed.wait())
        await asyncio.wait({running, listed}, return_when=asyncio.FIRST_COMPLETED)
        assert not running.done(), running.exception()
        running.cancel()

    asyncio.run(scene())


def test_the_benchmark_takes_what_its_watch_tells() -> None:
    pods = Pods()
    is_listed(pods, pods.put, pods.gone)
    assert set(pods.all) == {"large-n0"}


def test_the_coordinators_take_what_theirs_tells(tmp_path: Path) -> None:
    api: Any = OnePod()
    coordinators = Coordinators(api, tmp_path)
    is_listed(coordinators, coordinators.on_pod, coordinators.on_gone)
