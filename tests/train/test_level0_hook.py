"""Level 0: what an optimizer's steps tell of a script that does not know of Holdfast."""

import socket
import threading

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from holdfast.protocol import messages as m
from holdfast.protocol.faults import ArmedFault, FaultKind
from holdfast.protocol.machine.progress_record import ProgressRecord
from holdfast.protocol.phases import Phase
from holdfast.protocol.wire.frames import Codec, pack
from holdfast.train.faults import FaultPlan
from holdfast.train.level0_hook import StepCounter
from holdfast.train.link import Link


@pytest.fixture
def agent():
    """The agent's end of a worker's socket, and the counter at the other."""
    ours, theirs = socket.socketpair()
    record = ProgressRecord()
    link = Link(
        theirs,
        m.Start(
            worker="w",
            script="train.py",
            args=(),
            module=False,
            env={},
            cwd=".",
            log="",
            page="",
            stacks="",
            token="",
            host="127.0.0.1",
        ),
        record,
        "token",
    )
    faults = FaultPlan(link)
    before = set(
        threading.enumerate()
    )  # a job of one, of a test in the same process, has a thread of the same name
    link.listen()
    yield ours, StepCounter(link, faults), faults, record
    ours.shutdown(socket.SHUT_WR)  # ends the thread that reads
    for thread in set(threading.enumerate()) - before:
        if thread.name == "holdfast-link":
            thread.join()
    ours.close()
    theirs.close()
    record.close()


def train(counter: StepCounter, steps: int, last_told: bool = False) -> torch.nn.Parameter:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for step in range(steps):
        if last_told and step + 1 == steps:
            counter.every_s = 0.0
        weight.grad = torch.ones(3)
        optimizer.step()
        counter(optimizer, (), {})
    return weight


def test_steps_are_counted_and_told(agent):
    ours, counter, _, record = agent
    counter.every_s = 3600.0
    train(counter, 5)
    codec: Codec[m.WorkerMessage] = Codec(m.WorkerMessage)
    first, second = codec.read(ours), codec.read(ours)
    assert isinstance(first, m.Progress)
    assert isinstance(second, m.Progress)
    assert (first.committed, first.median_s) == (1, None)
    assert second.committed == 2
    assert second.median_s is not None  # a worker that stops right after must be found
    assert record.read().committed == 5


def test_blocks_of_steps_are_told_with_the_next_word(agent):
    ours, counter, _, _ = agent
    counter.every_s = 3600.0
    train(counter, 15, last_told=True)
    codec: Codec[m.WorkerMessage] = Codec(m.WorkerMessage)
    *_, last = (codec.read(ours) for _ in range(3))
    assert isinstance(last, m.Progress)
    assert [block.first for block in last.spent] == [5, 10]
    assert all(block.thread_s is not None and block.thread_s > 0 for block in last.spent)


def test_a_second_optimizer_does_not_count(agent):
    _, counter, _, record = agent
    train(counter, 2)
    train(counter, 5)
    assert record.read().committed == 2


def test_nan_poisons_this_rank_at_its_step(agent):
    ours, counter, faults, _ = agent
    faults.arm((ArmedFault(id="1/0", kind=FaultKind.NAN, step=2, phase=int(Phase.BACKWARD)),))
    ours.sendall(pack(m.Ack("1/0")))  # the agent's answer, which the worker waits for before a fault happens
    weight = train(counter, 2)
    assert weight.isnan().tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("kind", "options", "state", "told"),
    [
        (torch.optim.AdamW, {}, False, True),
        (torch.optim.AdamW, {}, True, False),
        (torch.optim.SGD, {"momentum": 0.9}, False, True),
        (torch.optim.SGD, {"momentum": 0.9}, True, False),
        (torch.optim.SGD, {}, False, False),
    ],
)
@pytest.mark.parametrize("rank", ["0", "1"])
def test_an_optimizer_that_begins_without_its_state_is_told_of(agent, kind, options, state, told, rank):
    ours, counter, _, _ = agent
    counter._link.start.env["RANK"] = rank
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizer = kind([weight], lr=0.1, **options)
    if state:
        optimizer.step()  # as one that a checkpoint was loaded into
    end = counter.listen()
    other = register_optimizer_step_pre_hook(
        lambda optimizer, args, kwargs: None
    )  # of the script's, behind ours
    try:
        optimizer.step()
        optimizer.step()
    finally:
        other.remove()
        end()
    codec: Codec[m.WorkerMessage] = Codec(m.WorkerMessage)
    expected = m.BeganAnew if told and rank == "0" else m.Progress
    assert isinstance(codec.read(ours), expected)
