"""What a node's agent is sent of a generation: once for all its workers, and what has changed since the one that it has."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from fakeagents import serving

from holdfast.coordinator.service.queues import AgentLines, AgentQueue
from holdfast.protocol import messages as m
from holdfast.protocol.generation_difference import NOTHING, apply
from holdfast.protocol.phases import PageReading, Phase
from holdfast.protocol.wire.frames import SEVERAL_BYTES, Codec

_codec: Codec[m.ToAgent] = Codec(m.ToAgent)
NPROC = 8


def generation(number: int, nodes: list[int]) -> m.Generation:
    members = tuple(
        m.Member(
            rank=at * NPROC + slot,
            worker=f"n{node}.{slot}#1",
            node=f"n{node}",
            slot=slot,
            host=f"10.0.{node}.1",
            vote_port=40000 + slot,
            data_port=41000 + slot,
            replica=at * NPROC + slot,
        )
        for at, node in enumerate(nodes)
        for slot in range(NPROC)
    )
    count = len(members)
    return m.Generation(number=number, members=members, shape=(1, 1), groups_connected_in=(number,) * count)


def orders_of(generation: m.Generation, node: str) -> list[m.Relay]:
    return [
        m.Relay(member.worker, m.JoinGeneration(generation=generation, rank=member.rank, apply=False))
        for member in generation.members
        if member.node == node
    ]


class Queues:
    """Of the agents of some nodes, and what is in them."""

    def __init__(self, *nodes: str) -> None:
        self.lines = AgentLines()
        for node in nodes:
            line = self.lines.by_node[node] = AgentQueue(node, f"session of {node}", None)
            line.introduced = True

    def send(self, sent: Mapping[str, Sequence[m.ToAgent]]) -> None:
        """What was decided at once."""
        with self.lines.together():
            for node, messages in sent.items():
                for message in messages:
                    self.lines.send(node, message)

    def frames(self, node: str) -> list[bytes]:
        line, frames = self.lines.by_node[node], []
        while not line.empty():
            frame = line.get_nowait()
            assert frame is not None
            frames.append(frame)
        return frames

    def orders(self, node: str) -> list[Any]:
        return [order for frame in self.frames(node) for order in _codec.decode_all(frame)]


def test_a_node_is_sent_a_lost_node_once_and_in_a_few_bytes() -> None:
    """However many workers it has, and however many nodes there are."""
    every = [f"n{node}" for node in range(512)]
    queues = Queues(*every)
    first = generation(1, list(range(512)))
    queues.send({node: orders_of(first, node) for node in every})
    bases = {node: apply(NOTHING, queues.orders(node)[0].change) for node in ("n0", "n511")}
    assert set(bases.values()) == {first}
    second = generation(2, [node for node in range(512) if node != 200])
    queues.send({node: orders_of(second, node) for node in every})
    for node, base in bases.items():
        (frame,) = queues.frames(node)
        assert len(frame) < 1000
        form = _codec.decode(frame)
        assert apply(base, form.change) == second
        told = [m.Relay(name, msgspec.structs.replace(join, generation=second)) for name, join in form.orders]
        assert told == orders_of(second, node)


def test_what_follows_an_order_to_join_does_not_overtake_it() -> None:
    queues = Queues("n0")
    first, second = generation(1, [0, 1]), generation(2, [0])
    queues.send({"n0": [m.Drain("before"), *orders_of(first, "n0"), m.Drain("between")]})
    joins = orders_of(second, "n0")
    queues.send({"n0": [*joins[:4], m.KillWorker("n0.0#1"), *joins[4:]]})
    orders = queues.orders("n0")
    assert [type(order) for order in orders] == [m.Drain, m.Form, m.Drain, m.Form, m.KillWorker, m.Form]
    assert [o.change.number for o in orders if isinstance(o, m.Form)] == [1, 2, 2]
    assert [len(o.orders) for o in orders if isinstance(o, m.Form)] == [8, 4, 4]
    have = NOTHING
    for order in orders:
        if isinstance(order, m.Form):
            have = apply(have, order.change)
    assert have == second


def test_what_is_decided_at_once_is_one_frame_for_a_node() -> None:
    queues = Queues("n0", "n1")
    stop = [m.Relay(f"n0.{slot}#1", m.Break(1, "a node was lost")) for slot in range(NPROC)]
    queues.send({"n0": stop, "n1": [m.Drain("it leaves")]})
    assert [len(queues.frames(node)) for node in ("n0", "n1")] == [1, 1]
    queues.lines.send("n0", stop[0])
    queues.lines.send("n0", stop[1])
    assert len(queues.frames("n0")) == 2, "nothing waits that is not decided together"


def test_a_long_frame_is_cut_between_two_messages() -> None:
    queues = Queues("n0")
    orders = [m.Drain("x" * (SEVERAL_BYTES // 3)) for _ in range(7)] + [m.Drain("x" * 2 * SEVERAL_BYTES)]
    with queues.lines.together():
        for order in orders:
            queues.lines.send("n0", order)
    frames = queues.frames("n0")
    assert [len(_codec.decode_all(frame)) for frame in frames] == [2, 2, 2, 1, 1]
    assert [order for frame in frames for order in _codec.decode_all(frame)] == orders


def test_two_generations_in_one_batch_are_both_sent() -> None:
    queues = Queues("n0")
    first, second = generation(1, [0, 1]), generation(2, [0])
    queues.send({"n0": [*orders_of(first, "n0"), *orders_of(second, "n0")]})
    assert [(o.change.base, o.change.number) for o in queues.orders("n0")] == [(0, 1), (1, 2)]


def test_an_agent_that_connects_again_is_sent_what_it_lacks(tmp_path: Path) -> None:
    """A difference from the newest generation, if it has that, and else the whole."""

    async def scene() -> list[m.Form]:
        async with serving(tmp_path) as plane:
            first, _ = await plane.pair()
            page = PageReading(generation=1, committed=3, phase=Phase.FORWARD)
            # Its worker has not been told of the generation, as far as the agent knows.
            view = m.WorkerView(worker=first.worker, slot=0, pid=1, formed=0, page=page)
            await first.hello("s-n0", view)
            await first.told(m.JoinGeneration, 2)
            first.formed = NOTHING
            await first.hello("s-n0", view)
            await first.told(m.JoinGeneration, 3)
            first.formed = msgspec.structs.replace(first.formed, start=77)
            await first.hello("s-n0", view)
            await first.told(m.JoinGeneration, 4)
            return first.forms

    forms = asyncio.run(scene())
    number = forms[0].change.number
    assert [form.change.base for form in forms] == [0, number, 0, 0]
    assert {form.change.number for form in forms} == {number}
