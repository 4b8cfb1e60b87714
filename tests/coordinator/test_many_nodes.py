"""What grows with the size of the job, and what must not: counted in lines that run and in bytes, not in time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from bench.coordinator import Job, hello, job, ready, says

from counted import lines_of
from holdfast.coordinator.kernel import events as e
from holdfast.coordinator.membership.failures import KEPT
from holdfast.coordinator.service.server import Coordinator
from holdfast.coordinator.service.store import SNAPSHOT
from holdfast.protocol import messages as m
from holdfast.protocol.job import Resume
from holdfast.protocol.messages import WorkerView
from holdfast.protocol.phases import PageReading, Phase


def lines(job: Job, event: e.Event) -> int:
    """Lines of Python that the core runs for one event."""
    return lines_of(lambda: job.do(event))


@pytest.mark.parametrize("said", ["heartbeat", "the same step", "a new step"])
def test_what_comes_many_times_a_second_costs_the_same_at_any_size(said):
    counts = []
    for nodes in (2, 32):
        job = Job(nodes, 4)
        worker = next(iter(job.core.state.membership.workers.values()))
        number, losses = job.core.state.membership.number, (m.ReportedStep(2, 1.0, 0.5),)
        event = {
            "heartbeat": e.NodeSays(worker.node, m.Heartbeat()),
            "the same step": says(worker, m.Progress(generation=number, committed=1, median_s=0.5)),
            "a new step": says(
                worker, m.Progress(generation=number, committed=3, median_s=0.5, losses=losses)
            ),
        }[said]
        job.do(e.NodeSays(worker.node, m.Heartbeat()))  # one more look at what the last change brought about
        counts.append(lines(job, event))
    assert counts[0] == counts[1] > 0


def test_a_look_at_everything_costs_the_same_at_any_size():
    """Where nothing is due and nobody leaves, joins or is repaired. It follows every event that is no sign of life."""
    counts = []
    for nodes in (2, 32, 128):
        job = Job(nodes, 4)
        job.do(e.Tick())
        counts.append(lines(job, e.Tick()))
    # The strength of a generation is found by halves: some lines for each doubling.
    assert 0 < counts[0] <= counts[1] <= counts[2] < 1.1 * counts[0]


def test_what_a_look_changes_is_looked_at_again_at_once_and_not_at_a_sign_of_life():
    looks = []
    for nodes in (2, 32):
        job = Job(nodes, 4)
        beat = e.NodeSays(next(iter(job.core.state.membership.nodes)), m.Heartbeat())
        looks.append([lines(job, beat) for _ in range(3)])
    assert all(first == second == third for first, second, third in looks)


def test_the_state_is_linear_in_the_workers():
    sizes = [len(msgspec.msgpack.encode(Job(nodes, 4).core.state)) for nodes in (16, 32, 64)]
    assert sizes[2] - sizes[1] < 2.2 * (sizes[1] - sizes[0])


def test_a_form_that_was_missed_is_told_again_as_it_was():
    job = Job(4, 2)
    state = job.core.state
    last = state.membership.workers[state.membership.generation.members[-1].worker]
    job.do(e.NodeLost(last.node, state.membership.nodes[last.node].session))
    left = [w for w in state.membership.workers.values() if w.node != last.node]
    told = job.do(*(says(w, m.Parked(generation=1, committed=w.committed)) for w in left))
    forms = {a.message.worker: a.message for a in told if isinstance(a, e.Send) and _form(a)}
    assert len(forms) == 6
    worker = left[0]
    view = WorkerView(
        worker=worker.name, slot=worker.slot, pid=1, formed=1, page=PageReading(), attached=True
    )
    number = int(worker.node.removeprefix("node-"))
    again = job.do(e.NodeJoined(msgspec.structs.replace(hello(number, 2), workers=(view,))))
    assert forms[worker.name] in [a.message for a in again if isinstance(a, e.Send)]


def _form(action: e.Send) -> bool:
    return isinstance(action.message, m.Relay) and isinstance(action.message.message, m.JoinGeneration)


async def _lost_and_formed(job_dir: Path, nodes: int, nproc: int) -> tuple[int, int, list[int], int]:
    """A node is lost, and all others answer as fast as they can. How many they are, how many of them are in the next
    generation, how many events each batch had, and how often the state was written."""
    coordinator = Coordinator(job_dir, job(nodes, nproc), Resume())
    state, batches = coordinator._core.state, []
    deciding = asyncio.create_task(coordinator._loop.decide_all())
    for number in range(nodes - 1):
        coordinator._loop.handle(e.NodeJoined(hello(number, nproc)))
    await coordinator._loop.effect(e.NodeJoined(hello(nodes - 1, nproc)))
    workers = list(state.membership.workers.values())
    for worker in workers:
        coordinator._loop.handle(says(worker, m.Attached()))
        coordinator._loop.handle(says(worker, ready(worker)))
    await coordinator._loop.effect(e.Tick())
    assert state.membership.number == 1
    for worker in workers:
        coordinator._loop.handle(says(worker, m.Joined(1, 0.01)))
        coordinator._loop.handle(says(worker, m.Progress(generation=1, committed=5, median_s=0.5)))
    await coordinator._loop.effect(e.Tick())
    handle_all, last = coordinator._core.handle_all, workers[-1].node
    coordinator._core.handle_all = lambda events, now: (batches.append(len(events)), handle_all(events, now))[
        1
    ]
    write, states = coordinator._ledger.write, []
    coordinator._ledger.write = lambda batch: (states.append(SNAPSHOT in batch.kept), write(batch))[1]
    await coordinator._loop.effect(e.NodeLost(last, state.membership.nodes[last].session))
    left = [w for w in workers if w.node != last]
    for worker in left:
        coordinator._loop.handle(e.NodeSays(worker.node, m.Heartbeat()))
        coordinator._loop.handle(says(worker, m.Parked(generation=1, committed=5)))
        await asyncio.sleep(0)  # each comes by a connection of its own
    await coordinator._loop.effect(e.Tick())
    for worker in left:
        coordinator._loop.handle(says(worker, m.Joined(state.membership.number, 0.01)))
    await coordinator._loop.effect(e.Tick())
    deciding.cancel()
    assert await coordinator._ledger.close(30.0)
    assert state.membership.generation is not None
    names = {x.worker for x in state.membership.generation.members}
    formed = len(names & {w.name for w in left}) * (state.membership.number == 2)
    return len(left), formed, batches, sum(states)


@pytest.mark.parametrize(
    ("nodes", "nproc"),
    [(24, 8), pytest.param(32, 8, marks=pytest.mark.nightly), pytest.param(64, 8, marks=pytest.mark.nightly)],
)
def test_every_survivor_is_in_the_next_generation(tmp_path, nodes, nproc):
    """With the real ledger. Each answer cost a write of the whole state; those that answered while it wrote were ended."""
    job_dir = tmp_path / "jobs" / "job"
    job_dir.mkdir(parents=True)
    (job_dir / "token").write_text("secret")
    left, formed, batches, states = asyncio.run(_lost_and_formed(job_dir, nodes, nproc))
    assert left == (nodes - 1) * nproc
    assert formed == left
    assert max(batches) >= left, "what waits is decided together"
    assert states == 2, "what was decided, when it was lost and when the next one formed"


def answers(job: Job, actions: list[e.Action]) -> None:
    """Every worker answers what it is told, each by a message of its own, until nobody is told anything."""
    while actions:
        events = []
        for action in actions:
            if not isinstance(action, e.Send) or not isinstance(action.message, m.Relay):
                continue
            worker = job.core.state.membership.workers[action.message.worker]
            match action.message.message:
                case m.Break(generation, _, True):
                    events.append(says(worker, m.Halted(generation, {"a": 7})))
                case m.RunTo(generation, begun, agreement, leave):
                    parked = m.Parked(generation=generation, committed=worker.committed, agreement=agreement)
                    events.append(says(worker, parked if leave else m.Halted(generation, begun, agreement)))
                case m.Break(generation):
                    events.append(says(worker, m.Parked(generation=generation, committed=worker.committed)))
                case m.JoinGeneration(generation=generation):
                    events += [
                        says(worker, m.Joined(generation.number, 0.01)),
                        says(worker, m.Progress(generation=generation.number, committed=9, median_s=0.5)),
                    ]
        actions = [action for event in events for action in job.do(event)]


def lost(job: Job) -> None:
    membership = job.core.state.membership
    last = membership.generation.members[-1].node
    answers(job, job.do(e.NodeLost(last, membership.nodes[last].session)))


def not_finite(job: Job) -> None:
    membership = job.core.state.membership
    for member in membership.generation.members:
        failed = m.Failed(
            generation=membership.number, step=1, phase=0, error="NonFiniteGradient", message="inf"
        )
        answers(job, job.do(says(membership.workers[member.worker], failed)))


def hangs(job: Job) -> None:
    """Everybody waits in the reduction; all nodes answer what is asked."""
    membership, views = job.core.state.membership, {}
    for member in membership.generation.members:
        page = PageReading(generation=membership.number, phase=Phase.REDUCE)
        view = WorkerView(
            worker=member.worker, slot=member.slot, pid=1, formed=1, page=page, attached=True, idle_s=60.0
        )
        views.setdefault(member.node, []).append(view)
    first, *_ = views
    job.do(e.NodeSays(first, m.Stalled(views[first][0].worker, views[first][0])))
    for node, there in views.items():
        answers(job, job.do(e.NodeSays(node, m.InspectReply(membership.inspect_request, tuple(there)))))


def waits(job: Job) -> None:
    """Signs of life of all, while a spare waits."""
    for name in list(job.core.state.membership.nodes):
        job.do(e.NodeSays(name, m.Heartbeat()))


@pytest.mark.parametrize("shards", [1, 8])
@pytest.mark.parametrize("story", [lost, not_finite, hangs, waits], ids=lambda story: story.__name__)
def test_a_whole_story_costs_no_more_than_the_size_of_the_job(story, shards):
    """With every message handled by itself: the more workers answer, the more lines, but not more for each of them."""
    per_worker = []
    for nodes in (4, 16):
        job = Job(nodes, 8, shards, spares=1)
        left = (nodes - 1 if story is lost else nodes) * 8
        per_worker.append(lines_of(lambda job=job: story(job)) / left)
    assert per_worker[1] <= 1.1 * per_worker[0]


def test_what_all_report_at_once_costs_no_more_than_the_size_of_the_job():
    """What has come is handled together, and what is forgotten is forgotten after it."""
    per_worker = []
    for nodes in (16, 64):
        job = Job(nodes, 8)
        membership = job.core.state.membership
        failed = m.Failed(
            generation=membership.number, step=1, phase=0, error="NonFiniteGradient", message="inf"
        )
        told = [says(membership.workers[x.worker], failed) for x in membership.generation.members]
        per_worker.append(lines_of(lambda job=job, told=told: job.do(*told)) / len(told))
        assert len(membership.failures) <= KEPT
    assert per_worker[1] <= 1.1 * per_worker[0]


class OneByOne(Job):
    """Handles every event by itself, as when messages come apart."""

    def do(self, *events: e.Event) -> list[e.Action]:
        return [action for event in events for action in super(OneByOne, self).do(event)]


@pytest.mark.parametrize("shards", [1, 8])
@pytest.mark.parametrize("fixed", [True, False], ids=["of a fixed size", "elastic"])
def test_a_start_costs_no_more_than_the_size_of_the_job(shards, fixed):
    per_worker = []
    for nodes in (8, 32):
        lines = lines_of(lambda n=nodes: OneByOne(n, 8, shards, spares=1, least=n if fixed else 1))
        per_worker.append(lines / (8 * nodes))
    assert per_worker[1] <= 1.1 * per_worker[0]
