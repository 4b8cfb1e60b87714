"""What level 1 is for every framework: when a state is saved, and which one is loaded."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from holdfast.adapters import world
from holdfast.adapters.snapshots import DeferredState, Saver, random_state, set_random_state
from holdfast.checkpoint import flush
from holdfast.errors import UsageError


def saver(tmp_path, every: int) -> Saver:
    return Saver(every, f"{tmp_path / 'saved'},every=1,keep=9")


def test_a_multiple_that_is_jumped_over_is_saved_at_the_next_step(tmp_path):
    saved = []
    one = saver(tmp_path, 4)
    for step in (1, 3, 5, 7, 8, 9, 11, 18, 19):
        if one.due(step):
            assert one.save({"step": step}, step)
            flush()  # a snapshot is skipped while others are on their way
            saved.append(step)
    assert saved == [5, 8, 18]


def test_after_a_load_the_next_multiple_is_due(tmp_path):
    saver(tmp_path, 4).save({"step": 6}, 6)
    one = saver(tmp_path, 4)
    kept = DeferredState()
    assert one.load({"step": kept}) == 6
    assert kept.value == 6
    assert [step for step in range(6, 13) if one.due(step)] == [8, 9, 10, 11, 12]


@pytest.mark.parametrize(("own", "loaded", "due"), [(6, None, [8]), (9, None, []), (5, 6, [8])])
def test_a_checkpoint_of_the_frameworks_own(tmp_path, own, loaded, due):
    saver(tmp_path, 4).save({"step": 6}, 6)
    one = saver(tmp_path, 4)
    assert one.load({"step": DeferredState()}, own=own) == loaded
    assert [step for step in range(own, 9) if one.due(step)] == due


def test_random_generators_go_on():
    def draw():
        return random.random(), np.random.rand(), torch.rand(1).item()

    saved = random_state()
    first = draw()
    assert draw() != first
    set_random_state(saved)
    assert draw() == first


def test_no_number_of_steps_is_refused(tmp_path):
    with pytest.raises(UsageError, match="every=0"):
        saver(tmp_path, 0)


def test_level_2_is_refused_where_there_is_one(tmp_path, monkeypatch):
    monkeypatch.setattr(world, "_runs", [object()])
    with pytest.raises(UsageError, match=r"holdfast\.x is imported"):
        Saver(1, str(tmp_path), level_2="holdfast.x")
    saver(tmp_path, 1)
