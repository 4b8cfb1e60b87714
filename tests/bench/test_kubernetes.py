"""`python -m bench.kubernetes`: its watches are the operator's own Informer, which calls them back."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
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


def pods(api: Any, folder: Path) -> Any:
    return Pods()


@pytest.mark.parametrize("make", [pods, Coordinators])
def test_what_follows_the_pods_takes_what_an_informer_tells(make: Callable[..., Any], tmp_path: Path) -> None:
    async def scene() -> None:
        api: Any = OnePod()
        follows = make(api, tmp_path)
        change = getattr(follows, "put", None) or follows.on_pod
        gone = getattr(follows, "gone", None) or follows.on_gone
        informer = Informer(
            api=api, path="/api/v1/pods", query={}, on_list=follows.on_list, on_change=change, on_gone=gone
        )
        running = asyncio.create_task(informer.run())
        listed = asyncio.create_task(informer.listed.wait())
        await asyncio.wait({running, listed}, return_when=asyncio.FIRST_COMPLETED)
        assert not running.done(), running.exception()
        running.cancel()
        if make is pods:
            assert set(follows.all) == {"large-n0"}

    asyncio.run(scene())
