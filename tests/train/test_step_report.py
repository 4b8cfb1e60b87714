"""The stopwatch of a step's phases."""

import math

import pytest

from holdfast.protocol.phases import BLOCK_STEPS, Phase
from holdfast.train import step_report
from holdfast.train.step_report import StepTimer


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(step_report, "perf_counter", lambda: now[0])
    return now


def step(clock, watch, index, micros=2, own=1.0, loss=1.0, slow=1.0):
    """One step: 1 s of data, 2 of forward and 3 of backward for each micro-batch, 4 of waiting, 5 of update."""
    clock[0] += 6.0
    watch.begin()
    for _ in range(micros):
        for phase, took_s in ((Phase.DATA, 1), (Phase.FORWARD, 2), (Phase.BACKWARD, 3)):
            watch.enter(phase)
            clock[0] += took_s * slow
    watch.enter(Phase.REDUCE)
    clock[0] += 3.0
    watch.enter(Phase.VOTE)
    clock[0] += 1.0
    watch.enter(Phase.UPDATE)
    clock[0] += 5.0
    watch.enter(Phase.COMMIT)
    return watch.commit(index, micros, own, loss)


def test_a_block_has_the_means_of_its_steps_but_for_the_longest(clock):
    watch = StepTimer()
    watch.forget()
    found = [step(clock, watch, i, slow=10.0 if i == 2 else 1.0) for i in range(2 * BLOCK_STEPS)]
    first, second = found[BLOCK_STEPS - 1], found[-1]
    assert [f for f in found if f] == [first, second]
    assert (first.first, second.first, first.micros) == (0, BLOCK_STEPS, 2)
    assert (first.data_s, first.forward_s, first.backward_s) == (2.0, 4.0, 6.0)
    assert (first.wait_s, first.update_s, first.aside_s) == (4.0, 5.0, 6.0)
    assert first.own_s == 17.0
    assert first.step_s == 27.0


def test_a_block_that_is_not_whole_is_not_said(clock):
    watch = StepTimer()
    assert [step(clock, watch, i) for i in range(2, 5)] == [None] * 3
    assert [step(clock, watch, i) for i in range(5, 8)] == [None] * 3
    watch.forget()  # another generation
    assert [step(clock, watch, i) for i in range(8, 10)] == [None] * 2
    assert step(clock, watch, 10) is None
    assert [step(clock, watch, i) for i in range(11, 15)][-1] is not None


def test_the_loss_that_is_furthest_off_is_told(clock):
    watch = StepTimer()
    off = [1.1, 0.2, 1.3, 1.0, 1.0]
    assert [step(clock, watch, i, own=x) for i, x in enumerate(off)][-1].loss == 0.2
    off[3] = math.inf
    assert math.isnan([step(clock, watch, 5 + i, own=x) for i, x in enumerate(off)][-1].loss)


def test_what_a_dropped_try_took_does_not_count(clock):
    watch = StepTimer()
    watch.begin()
    watch.enter(Phase.FORWARD)
    clock[0] += 100.0
    assert [step(clock, watch, i) for i in range(BLOCK_STEPS)][-1].forward_s == 4.0


def test_the_rank_whose_vote_comes_last_is_told(clock):
    def vote(watch, index, slowest):
        watch.begin()
        watch.enter(Phase.VOTE)
        for rank in (0, 2, 3):
            watch.wait_for(rank)
            clock[0] += 0.5 if rank == slowest else 0.1
        watch.wait_for(-1)
        clock[0] += 9.0
        return watch.commit(index, 1, 1.0, 1.0)

    watch = StepTimer()
    assert [vote(watch, i, s) for i, s in enumerate([2, 3, 2, 0, 2])][-1].late == 2
    assert [vote(watch, 5 + i, s) for i, s in enumerate([2, 3, 2, 0, 0])][-1].late == -1


def test_who_is_known_to_have_voted_last_is_named_whomever_this_worker_waited_for(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("holdfast.train.step_report.perf_counter", lambda: clock[0])
    watch, block = StepTimer(), None
    for step in range(5):
        watch.begin()
        watch.enter(Phase.VOTE)
        watch.wait_for(1)  # its parent, or child
        clock[0] += 9.0
        watch.wait_for(-1)
        watch.late(6)
        block = watch.commit(step, 1, 1.0, 1.0)
    assert block.late == 6


def test_what_a_replica_does_together_is_waiting(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("holdfast.train.step_report.perf_counter", lambda: now[0])
    timer = StepTimer()
    block = None
    for step in range(5):
        timer.begin()
        timer.enter(Phase.FORWARD)
        now[0] += 0.25
        timer.on_collective(True)
        now[0] += 1.0
        timer.on_collective(False)
        now[0] += 0.5
        timer.enter(Phase.UPDATE)
        block = timer.commit(step, 1, None, 0.0)
    assert block is not None
    assert (block.forward_s, block.wait_s) == (0.75, 1.0)
