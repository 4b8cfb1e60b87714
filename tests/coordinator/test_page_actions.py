"""What a person changes from the page: each action says first what it would do and changes nothing, and then does it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from fakeagents import Plane, serving

MACHINE = "dmi-1"


async def act(plane: Plane, name: str, dry: bool, **arguments: str) -> tuple[int, Any]:
    address = f"{plane.url}/api/v1/act/{name}?dry={int(dry)}"
    async with plane.session.post(address, data=msgspec.json.encode(arguments)) as answer:
        text = await answer.text()
        return answer.status, msgspec.json.decode(text) if answer.status == 200 else text


async def twice(plane: Plane, name: str, **arguments: str) -> dict[str, Any]:
    """The dry run, which leaves everything as it is, and then the action itself; what both told."""
    seq, state = plane.coordinator._loop.seq, msgspec.msgpack.encode(plane.state)
    status, looked = await act(plane, name, True, **arguments)
    assert status == 200, looked
    assert looked["dry"] is True
    # Agents beat meanwhile; nothing else may have changed.
    assert plane.coordinator._loop.seq == seq
    assert len(msgspec.msgpack.encode(plane.state)) == len(state)
    status, done = await act(plane, name, False, **arguments)
    assert (status, done["dry"]) == (200, False)
    # What was promised is what was done: nothing happened between the two.
    assert done["would"] == looked["would"]
    assert done["command"] == looked["command"]
    return dict(looked)


def plays(home: Path, scene: Callable[[Plane], Awaitable[None]]) -> None:
    async def main() -> None:
        async with serving(home) as plane:
            await scene(plane)

    asyncio.run(main())


def test_drain(tmp_path: Path) -> None:
    async def scene(plane: Plane) -> None:
        await plane.pair()
        told = await twice(plane, "drain", node="n1")
        assert told["would"] == [
            "n1 leaves between two steps",
            "there is no spare node: training continues with 1 worker until another node joins",
            "no committed step is lost",
        ]
        assert told["command"] == "holdfast drain n1 --job job"
        assert (await plane.event("node-leaving"))["node"] == "n1"
        assert plane.state.membership.nodes["n1"].leaving == "requested on the page"
        for dry in (True, False):
            status, why = await act(plane, "drain", dry, node="n7")
            assert (status, "n7" in why) == (400, True)

    plays(tmp_path, scene)


def test_clear(tmp_path: Path) -> None:
    async def scene(plane: Plane) -> None:
        await plane.pair()
        plane.state.health.quarantine[MACHINE] = "it failed in three jobs"
        told = await twice(plane, "clear", machine=MACHINE)
        assert told["would"] == [f"{MACHINE} may be used again; it was not, because it failed in three jobs"]
        assert told["command"] == f"holdfast node clear {MACHINE}"
        assert MACHINE not in plane.state.health.quarantine
        assert (await act(plane, "clear", True))[0] == 400

    plays(tmp_path, scene)


def test_resize(tmp_path: Path) -> None:
    async def scene(plane: Plane) -> None:
        await plane.pair()
        told = await twice(plane, "resize", nodes="1")
        assert told["would"][0] == "from 2 to 1 node, which are 1 worker, between two steps"
        assert plane.state.wanted_nodes == 1
        for nodes in ("", "-1", "٣", "99999999"):
            assert (await act(plane, "resize", True, nodes=nodes))[0] == 400

    plays(tmp_path, scene)


def test_stop(tmp_path: Path) -> None:
    async def scene(plane: Plane) -> None:
        await plane.pair()
        told = await twice(plane, "stop")
        assert told["would"][0] == "the job ends at its next commit"
        assert told["command"] == "holdfast stop --job job"
        assert (await plane.event("stop-requested"))["reason"] == "requested on the page"
        assert plane.state.membership.stop_reason == "requested on the page"

    plays(tmp_path, scene)
