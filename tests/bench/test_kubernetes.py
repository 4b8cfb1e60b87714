"""`python -m bench.kubernetes`: its watches are the operator's own Informer, which calls them back; its racks."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench.kubernetes import racks
from bench.kubernetes.coordinators import Coordinators
from bench.kubernetes.stage import Pods

from holdfast.kubernetes.client.informer import Informer


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


def places(*counts: tuple[str, int]) -> list[tuple[str, ...]]:
    return [tuple(place.split("/")) for place, count in counts for _ in range(count)]


def test_machines_stand_in_racks_of_64_of_which_others_have_a_part() -> None:
    there = [racks.place_of(number) for number in range(4096)]
    assert racks.spans(there) == [2, 4, 64]
    assert {there.count(place) for place in set(there)} == {64}
    others = racks.taken(4096, seed=1)
    assert others == racks.taken(4096, seed=1)
    assert others != racks.taken(4096, seed=2)
    of_racks = [sum(number // 64 == rack for number in others) for rack in range(64)]
    assert min(of_racks) < 8 < 24 < max(of_racks) < 48


def test_the_fewest_places_are_of_each_level_alone() -> None:
    """The two largest racks are in two zones; one zone has room for all, in three racks."""
    free = places(("a/x/1", 3), ("a/x/2", 3), ("a/y/3", 2), ("b/z/4", 5))
    assert racks.fewest(free, 8) == [1, 2, 2]
    assert racks.fewest(free, 5) == [1, 1, 1]
    assert racks.fewest(free, 13) == [2, 3, 4]
    with pytest.raises(ValueError, match="14 nodes do not fit into 13"):
        racks.fewest(free, 14)


def test_a_ring_crosses_each_border_that_its_neighbours_stand_at() -> None:
    """Racks of one name in two blocks are two, and the last is the first's neighbour."""
    ring = places(("a/x/1", 2), ("a/y/1", 1), ("a/x/2", 1))
    assert racks.crossings(ring) == [0, 2, 3]
    assert racks.crossings(ring[:1]) == [0, 0, 0]
