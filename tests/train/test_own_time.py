"""What a script without phases needs by itself: the time of its thread, in blocks of steps."""

import time

import pytest
import torch

from holdfast.train.level0_hook import OwnTime, ThreadClock, trains_on_cpu


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def blocks(times, own, wall):
    """Of steps from 0 on, each with its own seconds and all of its seconds."""
    made = OwnTime(own, wall)
    found = []
    for step, (own_s, whole_s) in enumerate(times):
        own.now, wall.now = own.now + own_s, wall.now + whole_s
        found.append(made.stepped(step))
    return found


def test_a_block_of_five_without_its_longest_step():
    quick, spike = (0.1, 0.3), (7.0, 9.0)
    found = blocks([quick] * 5 + [quick, quick, spike, quick, quick], Clock(), Clock())
    (block,) = [block for block in found if block is not None]
    assert found[9] is block
    assert (block.first, block.micros) == (5, 1)
    assert block.own_s == block.thread_s == pytest.approx(0.1)
    assert block.wait_s == pytest.approx(0.2)
    assert block.step_s == pytest.approx(0.3)


def test_the_first_block_begins_with_the_imports_and_is_left_out():
    assert blocks([(5.0, 6.0), *[(0.1, 0.1)] * 4], Clock(), Clock())[4] is None


def test_a_thread_that_sleeps_needs_nothing_and_one_that_computes_does():
    clock = ThreadClock()
    began = clock()
    time.sleep(0.05)
    slept_s = clock() - began
    until = time.thread_time() + 0.05
    while time.thread_time() < until:
        pass
    assert clock() - began - slept_s >= 0.05
    assert slept_s < 0.04


def test_beside_another_device_nothing_is_compared():
    there, here = torch.nn.Parameter(torch.ones(1, device="meta")), torch.nn.Parameter(torch.ones(1))
    assert trains_on_cpu(torch.optim.SGD([here], 0.1))
    assert not trains_on_cpu(torch.optim.SGD([here, there], 0.1))
