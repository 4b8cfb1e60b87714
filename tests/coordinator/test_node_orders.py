"""A person wants a node's machine booted or replaced: it leaves between two steps, and no step is lost."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from desk import Desk, running
from fakeagents import serving

from holdfast.coordinator.kernel import events as e
from holdfast.protocol.engine_orders import MarkNode, RebootNode
from holdfast.protocol.health import Remedy


def leaves(remedy: Remedy) -> Desk:
    """A node of two with a spare, after it has left."""
    desk = running(2, spares=1, committed=3)
    desk.do(e.NodeOrdered("n1", remedy, "its fan is loud"))
    assert desk.state.membership.nodes["n1"].leaving == "its fan is loud"
    return desk


def test_what_is_ordered_belongs_to_no_incident_and_spends_no_budget() -> None:
    desk = leaves(Remedy.REBOOT)
    assert desk.state.incidents == []
    assert desk.state.health.acts == []
    # Nobody is ended for it: it trains on until the others can go on without it.
    assert desk.did(RebootNode) == []
    assert desk.state.membership.nodes["n1"].health.then is Remedy.REBOOT


def test_an_order_for_a_node_that_has_left_meanwhile_is_nothing() -> None:
    desk = running(2)
    before = len(desk.state.membership.nodes)
    desk.do(e.NodeOrdered("n7", Remedy.REPLACE, "x"))
    assert len(desk.state.membership.nodes) == before


@pytest.mark.parametrize("remedy", ["reboot", "replace"])
def test_over_the_wire(tmp_path: Path, remedy: str) -> None:
    async def scene() -> None:
        async with serving(tmp_path) as plane:
            await plane.pair()
            await plane.agent("n2")
            async with plane.session.post(f"{plane.url}/node?node=n1&remedy={remedy}&reason=loud") as answer:
                assert answer.status == 200, await answer.text()
            assert (await plane.event("node-leaving"))["reason"] == "loud"
            for query, word in (("node=n9&remedy=reboot", "n9"), ("node=n0&remedy=none", "remedy"),
                                ("node=n1&remedy=replace", "already leaving")):  # fmt: skip
                async with plane.session.post(f"{plane.url}/node?{query}") as answer:
                    assert answer.status == 400
                    assert word in await answer.text()

    asyncio.run(scene())


@pytest.mark.parametrize(("remedy", "order"), [(Remedy.REBOOT, RebootNode), (Remedy.REPLACE, MarkNode)])
def test_once_it_has_left(remedy: Remedy, order: type) -> None:
    desk = running(2, spares=1, committed=3)
    spare = "n2"
    desk.do(e.NodeOrdered(spare, remedy, "loud"))
    # A spare has nobody in the job, so it leaves at once.
    assert not desk.state.membership.nodes[spare].alive
    assert [x.node for x in desk.did(order)] == [spare]
    assert (spare in desk.state.health.quarantine) == (remedy is Remedy.REPLACE)
