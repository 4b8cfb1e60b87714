"""Orders to the engine: open until they are acknowledged, in the core, over HTTP and in the launcher."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from desk import running
from fakeagents import Plane, serving

from holdfast.coordinator.kernel.state import KEPT_ORDERS, CoreState, OpenOrders
from holdfast.protocol.engine_orders import (
    EngineOrders,
    MarkNode,
    OrderDone,
    ProvideNode,
    RebootNode,
    ReleaseNode,
)


def open_orders(desk: Any, kind: type) -> list[Any]:
    return [o for o in desk.state.orders.open.values() if isinstance(o, kind)]


def test_an_order_is_open_until_it_is_acknowledged() -> None:
    desk = running(3)
    desk.lose("n1")
    (release,) = open_orders(desk, ReleaseNode)
    assert desk.did(ReleaseNode) == [release]
    left = msgspec.msgpack.decode(msgspec.msgpack.encode(desk.state), type=CoreState)
    assert left.orders.open[release.order_id] == release  # a successor knows it
    assert desk.do(OrderDone(release.order_id)) == []
    assert not open_orders(desk, ReleaseNode)
    assert desk.do(OrderDone(release.order_id)) == []  # it may be acknowledged again


def test_an_order_that_failed_is_in_the_ledger() -> None:
    desk = running(3)
    desk.lose("n1")
    (release,) = open_orders(desk, ReleaseNode)
    desk.do(OrderDone(release.order_id, "Slurm does not answer"))
    assert desk.records("order-failed") == [
        {"order": "release-node", "node": "n1", "error": "Slurm does not answer"}
    ]
    assert not open_orders(desk, ReleaseNode)


def test_a_node_that_came_back_is_not_released_late() -> None:
    desk = running(3)
    desk.lose("n1")
    assert open_orders(desk, ReleaseNode)
    desk.node("n1", session="2")
    assert not open_orders(desk, ReleaseNode)


def test_a_node_whose_agent_ended_may_return_and_a_silent_one_may_not() -> None:
    desk = running(3)
    desk.lose("n1")
    desk.wait(desk.core.timing.detection_s + 0.1, alive=("n0",))
    assert [(one.node, one.may_return) for one in open_orders(desk, ReleaseNode)] == [
        ("n1", True),
        ("n2", False),
    ]


def test_a_node_that_is_not_awaited_any_more_is_not_provided_late() -> None:
    desk = running(3)
    desk.lose("n1")
    asked = open_orders(desk, ProvideNode)
    assert asked
    desk.wait(desk.core.timing.wait_s * 2 + 1)
    assert not {o.order_id for o in asked} & desk.state.orders.open.keys()
    assert len(desk.did(ProvideNode)) > len(asked)  # it is asked for anew


def test_a_node_has_one_open_order_of_a_kind() -> None:
    orders = OpenOrders()
    orders.add(MarkNode("n1", "first"))
    orders.add(RebootNode("n1", "x"))
    newest = orders.add(MarkNode("n1", "second"))
    orders.add(ProvideNode("a"))
    orders.add(ProvideNode("a"))
    assert [type(o) for o in orders.open.values()] == [RebootNode, MarkNode, ProvideNode, ProvideNode]
    assert orders.open[newest.order_id] == newest
    assert list(orders.open) == [2, 3, 4, 5]


def test_an_engine_that_acknowledges_nothing_does_not_make_the_state_grow() -> None:
    orders = OpenOrders()
    for count in range(KEPT_ORDERS + 10):
        orders.add(ReleaseNode(node=f"n{count}", reason="lost"))
    assert [len(orders.open), next(iter(orders.open))] == [KEPT_ORDERS, 11]


async def announced(plane: Plane, kind: str) -> dict[str, Any]:
    """The first announcement of a kind that a new watcher hears."""
    async with plane.session.ws_connect(f"{plane.url}/watch") as watch:
        async for frame in watch:
            heard = msgspec.json.decode(frame.data)
            if heard["kind"] == kind:
                value: dict[str, Any] = heard["value"]
                return value
    raise AssertionError("the coordinator ended")


def test_who_comes_late_hears_of_open_orders(tmp_path: Path) -> None:
    async def scene() -> None:
        async with serving(tmp_path) as plane:
            _, second = await plane.pair()
            await second.leave()
            await plane.event("node-lost")
            order = await announced(plane, "release-node")
            assert order["node"] == "n1"
            page = msgspec.json.decode(await plane.get("/orders"), type=EngineOrders)
            assert page.nodes == 2
            assert order["order_id"] in {o.order_id for o in page.orders}
            done = msgspec.json.encode(OrderDone(order["order_id"]))
            async with plane.session.post(f"{plane.url}/engine", data=done) as answer:
                assert answer.status == 200
            page = msgspec.json.decode(await plane.get("/orders"), type=EngineOrders)
            assert order["order_id"] not in {o.order_id for o in page.orders}

    asyncio.run(scene())


def test_a_foreign_acknowledgement_is_refused(tmp_path: Path) -> None:
    async def scene() -> None:
        async with serving(tmp_path) as plane:
            for text in ('{"type": "order-done"}', '{"type": "order-done", "order_id": "7"}'):
                async with plane.session.post(f"{plane.url}/engine", data=text) as answer:
                    assert answer.status == 400
            async with aiohttp.ClientSession() as stranger, stranger.get(f"{plane.url}/orders") as answer:
                assert answer.status == 401

    asyncio.run(scene())
