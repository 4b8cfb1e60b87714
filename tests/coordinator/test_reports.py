"""Reports of workers: those of a node that come in one frame are one event, and what waits for a slow ledger adds up."""

from __future__ import annotations

import asyncio
import random
import time

import msgspec
import pytest
from bench.coordinator import Job

from holdfast.coordinator.kernel import events as e
from holdfast.coordinator.service import queues
from holdfast.coordinator.service.decision_loop import routine
from holdfast.coordinator.service.queues import Inbox
from holdfast.protocol import messages as m


def step(committed: int, generation: int = 1, **also) -> m.Progress:
    return m.Progress(generation=generation, committed=committed, median_s=0.5, **also)


def loss(number: int) -> tuple[m.ReportedStep, ...]:
    return (m.ReportedStep(number, 1.0, 0.5),)


def frame(*reports: tuple[str, m.WorkerMessage], node: str = "n0") -> e.WorkersSay:
    return e.WorkersSay(node, tuple(m.FromWorker(worker, message) for worker, message in reports))


def taken(*events: e.Event) -> list[e.Event]:
    """What the core gets of events that came while the ledger was written."""

    async def run() -> list[e.Event]:
        inbox = Inbox(time.monotonic)
        for event in events:
            inbox.put(event)
        return [waiting.event for waiting in await inbox.take()]

    return asyncio.run(run())


def drawn(rng: random.Random, number: int, rank: int) -> m.WorkerMessage:
    told = loss(number) if rank == 0 else ()
    kinds = [
        step(number, losses=told),
        step(number, losses=told),
        m.OffStep(rng.random() < 0.5),
        m.Parked(generation=1, committed=number, losses=told),
        m.CollectiveError(1, number, "the connection was reset"),
        m.Failed(generation=1, step=number, phase=0, error="ValueError", message="no"),
        m.Failed(generation=1, step=number, phase=0, error="NonFiniteGradient", message="inf", own=True),
        m.Joined(1, 0.01),
        m.Done(committed=number, params_xxh3="0", loss=1.0),
    ]
    return rng.choices(kinds, [30, 30, 4, 4, 1, 1, 1, 4, 1])[0]


@pytest.mark.parametrize("seed", range(25))
def test_reports_in_one_event_decide_what_they_decide_one_by_one(seed):
    rng = random.Random(seed)
    one, other = Job(3, 4), Job(3, 4)
    for number in range(2, 12):
        events = []
        for node in list(one.core.state.membership.nodes):
            ours = [w for w in one.core.state.membership.workers.values() if w.node == node]
            for _ in range(rng.randint(1, 2)):
                chosen = rng.sample(ours, rng.randint(1, len(ours)))
                reports = [
                    m.FromWorker(w.name, drawn(rng, number, w.shard_index), rng.random()) for w in chosen
                ]
                events.append(e.WorkersSay(node, tuple(reports)))
        split = [e.WorkersSay(x.node, (report,)) for x in events for report in x.reports]
        assert one.do(*events) == other.do(*split)
        assert msgspec.msgpack.encode(one.core.state) == msgspec.msgpack.encode(other.core.state)
        assert one.core.next_deadline() == other.core.next_deadline()


def test_what_waits_adds_up_for_each_worker():
    first = frame(("a", step(1)), ("b", step(1, losses=loss(0))))
    second = frame(("b", step(2)), ("a", step(2, losses=loss(1))), ("c", step(2)))
    third = frame(("a", step(3)), ("c", step(3)))
    assert taken(first, second, third) == [
        frame(("a", step(3, losses=loss(1))), ("b", step(2, losses=loss(0)))),
        frame(("c", step(3))),
    ]


def test_nothing_is_merged_across_what_a_worker_said_meanwhile():
    parked = m.Parked(generation=1, committed=1)
    events = [frame(("a", step(1))), frame(("a", parked)), frame(("a", step(2)))]
    assert taken(*events) == events
    together = frame(("a", step(1)), ("a", parked), ("b", step(1)))
    assert taken(together, frame(("a", step(2)), ("b", step(2)))) == [
        frame(("a", step(1)), ("a", parked), ("b", step(2))),
        frame(("a", step(2))),
    ]


def test_nothing_is_merged_across_a_generation_or_the_loss_of_a_node():
    events = [frame(("a", step(9))), frame(("a", step(5, generation=2)))]
    assert taken(*events) == events
    events = [frame(("a", step(1))), e.NodeLost("n1", "s"), frame(("a", step(2)))]
    assert taken(*events) == events


def test_losses_keep_a_time_of_their_own_while_there_is_room(monkeypatch):
    events = [frame(("a", step(1, losses=loss(0)))), frame(("a", step(2, losses=loss(1))))]
    assert taken(*events) == events
    monkeypatch.setattr(queues, "MANY", 1)
    assert taken(*events) == [frame(("a", step(2, losses=loss(0) + loss(1))))]


def test_the_wait_adds_to_the_age_of_each():
    waiting = queues.QueuedEvent(frame(("a", step(1))), 10.0)
    aged = waiting.aged(12.5)
    assert isinstance(aged, e.WorkersSay)
    assert aged.waited_s == 2.5
    assert waiting.aged(10.001) == waiting.event


def test_one_report_that_no_hello_repeats_is_written():
    repeated = [("a", step(1)), ("b", m.Joined(1, 0.01)), ("c", m.Parked(generation=1, committed=1))]
    assert routine(frame(*repeated))
    assert not routine(frame(*repeated, ("d", m.Parked(generation=1, committed=1, losses=loss(0)))))
    assert not routine(frame(*repeated, ("d", m.Halted(1, {"g": 1}))))
