"""The position in the data and what a change of the global batch means for it and for the learning rate."""

import math

import numpy as np
import pytest
import torch

import holdfast as hf
from holdfast.data.batches import DatasetBatches
from holdfast.errors import UsageError
from holdfast.train import state_image
from holdfast.train.data_cursor import NAME, DataCursor


class Numbers:
    """Sample i is the number i."""

    def __len__(self):
        return 1000

    def batch(self, ids):
        return (torch.from_numpy(np.asarray(ids)),)


class Files:
    """A data set that says which one it is."""

    def __init__(self, fingerprint):
        self.fingerprint = fingerprint


def saved(global_batch=16, steps=3, seed=0, fingerprint="d1"):
    cursor = DataCursor(global_batch, seed, Files(fingerprint), None, "refuse")
    for _ in range(steps):
        cursor.advance()
    return cursor.state_dict()


def optimizer(lr=0.1, kind=torch.optim.SGD):
    return kind([torch.nn.Parameter(torch.zeros(2))], lr=lr)


def test_the_position_counts_samples():
    assert saved(global_batch=16, steps=3)["samples"] == 48


def test_a_changed_global_batch_is_refused_unless_told():
    with pytest.raises(UsageError, match=r"global_batch=32.*saved with 16.*linear"):
        DataCursor(32, 0, Files("d1"), None, "refuse").load_state_dict(saved())


@pytest.mark.parametrize(("rule", "expected"), [("keep", 0.1), ("linear", 0.2), ("sqrt", 0.1 * math.sqrt(2))])
def test_the_rule_is_followed_once(rule, expected):
    trained, cursor = optimizer(), DataCursor(32, 0, Files("d1"), None, rule)
    scheduler = torch.optim.lr_scheduler.LambdaLR(trained, lambda n: 1.0)
    protected = {"optimizer": trained, "scheduler": scheduler, NAME: cursor}
    cursor.load_state_dict(saved())
    cursor.adapt(protected)
    cursor.load_state_dict(cursor.state_dict())  # from a peer that has adapted
    cursor.adapt(protected)
    assert trained.param_groups[0]["lr"] == pytest.approx(expected)
    trained.step()
    scheduler.step()
    assert trained.param_groups[0]["lr"] == pytest.approx(expected)
    cursor.advance()
    assert cursor.samples == 48 + 32


def test_another_seed_or_data_set_is_refused():
    with pytest.raises(UsageError, match="seed 0"):
        DataCursor(16, 1, Files("d1"), None, "refuse").load_state_dict(saved())
    with pytest.raises(UsageError, match="is now d2"):
        DataCursor(16, 0, Files("d2"), None, "refuse").load_state_dict(saved())


def test_an_unknown_rule_is_refused_with_the_known_ones():
    with pytest.raises(UsageError, match="'sqrt'"):
        DataCursor(16, 0, None, None, "cubic")
    with pytest.raises(UsageError, match="'linear', 'sqrt'"):
        hf.scale_lr(optimizer(), 2.0, "cubic")
    with pytest.raises(UsageError, match=r"factor=0"):
        hf.scale_lr(optimizer(), 0)


def test_the_position_is_part_of_an_image():
    cursor = DataCursor(16, 0, None, None, "refuse")
    cursor.advance()
    image = state_image.capture({NAME: cursor}, 1)
    fresh = DataCursor(16, 0, None, None, "refuse")
    state_image.load({NAME: fresh}, image)
    assert fresh.samples == 16


def ids_of(global_batch, micro_batch, positions):
    """Of every micro-batch of the steps that begin at these positions."""
    batches = DatasetBatches(
        Numbers(),
        global_batch=global_batch,
        micro_batch=micro_batch,
        until=10_000,
        seed=0,
        device=torch.device("cpu"),
    )
    share = range(global_batch // micro_batch)
    ids = []
    for step, cursor in enumerate(positions):
        batches.aim(step, cursor, share)
        ids += [batches.load(step, micro)[0] for micro in share]
    return ids


def test_batches_neither_repeat_nor_skip_a_sample_when_the_global_batch_changes():
    first = ids_of(16, 4, range(0, 400, 16))
    rest = ids_of(24, 8, range(400, 1000, 24))
    assert sorted(torch.cat(first + rest).tolist()) == list(range(1000))


def test_batches_are_the_same_from_any_position_on():
    whole = ids_of(16, 4, range(0, 20_000, 16))
    resumed = ids_of(16, 4, range(4112, 20_000, 16))
    assert all(map(torch.equal, whole[-len(resumed) :], resumed))


def test_a_schedule_in_samples_sees_the_step_that_was_just_committed():
    seen = []

    def main(run):
        model = torch.nn.Linear(1, 1)
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(sgd, lambda _: 1.0 / (1 + run.samples))
        run.protect(model=model, optimizer=sgd, schedule=schedule)
        for step in run.steps(Numbers(), global_batch=8, micro_batch=4, until=3):
            with step:
                seen.append((step.samples, run.samples, sgd.param_groups[0]["lr"]))
                for (x,) in step:
                    step.backward(model(x[:, None] / 1000.0).sum(), weight=len(x))
                step.apply(sgd, scheduler=schedule)
        seen.append(run.samples)

    hf.start(main)
    assert seen == [(0, 0, 1.0), (8, 8, 1 / 9), (16, 16, 1 / 17), 24]


def test_the_name_of_the_position_is_taken():
    def main(run):
        run.protect(**{NAME: torch.nn.Linear(1, 1)})

    with pytest.raises(UsageError, match="is reserved"):
        hf.start(main)


def test_the_gain_of_adascale_lies_between_one_and_the_factor():
    assert hf.adascale_gain(4.0, variance=0.0, square=1.0) == 1.0
    assert hf.adascale_gain(4.0, variance=1.0, square=0.0) == 4.0
    assert 1.0 < hf.adascale_gain(4.0, variance=1.0, square=1.0) < 4.0
    with pytest.raises(UsageError, match="variance"):
        hf.adascale_gain(4.0, variance=-1.0, square=1.0)
