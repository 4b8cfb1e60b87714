import os
import random
import signal
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch

import holdfast as hf
from holdfast.data.batches import DatasetBatches
from holdfast.data.collate import on_device, packed, unpacked
from holdfast.data.order import SampleOrder
from holdfast.errors import DataError, UsageError


class Noisy:
    """What it gives depends on all three global generators."""

    def __init__(self, count=64):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return {"x": torch.randn(3) + i, "y": i, "z": np.random.rand() + random.random()}


class Batched(Noisy):
    def batch(self, ids):
        return torch.from_numpy(ids.copy()), torch.rand(len(ids))


class Bad(Noisy):
    def __getitem__(self, i):
        if i == 7:
            raise ValueError("cannot decode")
        return torch.tensor(i)


class Deadly(Noisy):
    """Ends the process that decodes sample 7, `times` times."""

    def __init__(self, folder, times):
        super().__init__()
        self.folder, self.times = folder, times

    def __getitem__(self, i):
        died = len(os.listdir(self.folder))
        if i == 7 and died < self.times:
            Path(self.folder, str(died)).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor(i)


class Moody(Noisy):
    """Cannot be read until `cheer_up`."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def cheer_up(self):
        Path(self.path).touch()

    def __getitem__(self, i):
        if not os.path.exists(self.path):
            raise OSError("not now")
        return torch.tensor(i)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(())


Pair = namedtuple("Pair", "ids total")


def to_pair(samples):
    return Pair([s["y"] for s in samples], torch.tensor(sum(s["y"] for s in samples)))


def batches(data, until=10, **more):
    sizes = {"global_batch": 16, "micro_batch": 4, "seed": 3} | more
    return DatasetBatches(data, until=until, device=torch.device("cpu"), **sizes)


def loaded(made, steps=range(4), micros=range(4), wait=True):
    """Everything, as one list; waits until the processes are up, so that it is they who decode."""
    if wait and made._decoders is not None:
        for greeting in made._decoders._greetings:
            greeting.result()
    out = []
    for step in steps:
        made.aim(step, step * 16, micros)
        out += [made.load(step, micro) for micro in micros]
    return out


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.fixture
def closing():
    made = []
    yield lambda *args, **more: made.append(batches(*args, **more)) or made[-1]
    for one in made:
        one.close()


@pytest.mark.parametrize("data", [pytest.param(Noisy(), marks=pytest.mark.nightly), Batched()])
def test_processes_make_what_the_worker_itself_would(closing, data):
    alone = loaded(closing(hf.data.shuffled(data, workers=0)))
    plain = loaded(closing(data))
    helped = loaded(closing(hf.data.shuffled(data, workers=2)))
    early = loaded(closing(hf.data.shuffled(data, workers=2)), wait=False)
    for other in (plain, helped, early):
        assert all(map(same, alone, other))


def test_a_micro_batch_does_not_depend_on_the_share_nor_on_what_came_before(closing):
    all_of_it = loaded(closing(Noisy()), steps=[2])
    made = closing(hf.data.shuffled(Noisy(), workers=2))
    loaded(made, steps=[0, 1], micros=range(2))
    assert same(loaded(made, steps=[2], micros=range(1, 3)), all_of_it[1:3])
    assert same(loaded(made, steps=[2], micros=range(4)), all_of_it)  # tried again, in another world


def test_a_batch_that_the_script_changes_is_new_when_the_step_is_tried_again(closing):
    made = closing(hf.data.shuffled(Noisy(), workers=1))
    (first,) = loaded(made, steps=[0], micros=range(1))
    before = first["x"].clone()
    first["x"].zero_()
    (again,) = loaded(made, steps=[0], micros=range(1))
    assert torch.equal(again["x"], before)


def test_the_order_is_that_of_every_dataset(closing):
    made = closing(hf.data.shuffled(Noisy(), workers=0))
    ids = torch.cat([batch["y"] for batch in loaded(made, steps=range(8))])
    assert ids.tolist() == SampleOrder(64, 3).at_many(np.arange(128)).tolist()


def test_a_dataset_may_bring_its_own_order(closing):
    class Reverse:
        def at_many(self, positions):
            return 63 - np.asarray(positions) % 64

    class Ordered(Noisy):
        def order(self, seed):
            assert seed == 3
            return Reverse()

    assert loaded(closing(Ordered()), steps=[0])[0]["y"].tolist() == [63, 62, 61, 60]


def test_going_on_at_another_position_is_not_mixed_with_what_was_ahead(closing):
    made = closing(hf.data.shuffled(Noisy(), workers=1))
    loaded(made, steps=[0])
    made.aim(1, 40, range(4))  # the state was loaded anew: sample 40, not 16
    expected = SampleOrder(64, 3).at_many(np.arange(40, 44)).tolist()
    assert made.load(1, 0)["y"].tolist() == expected


def test_a_collate_function_of_the_users_own(closing):
    for workers in (0, 1):
        (pair,) = loaded(
            closing(hf.data.shuffled(Noisy(), workers=workers, collate=to_pair)), steps=[0], micros=range(1)
        )
        assert type(pair) is Pair
        assert pair.total == sum(pair.ids)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_names_dataset_sample_and_step(closing, workers):
    made = closing(hf.data.shuffled(Bad(), workers=workers))
    with pytest.raises(
        DataError, match=r"sample 7 of Bad \(step \d+, micro-batch \d\): ValueError: cannot decode"
    ):
        loaded(made)


def test_an_error_that_passes_is_gone_when_the_step_is_tried_again(closing, tmp_path):
    data = Moody(str(tmp_path / "mood"))
    made = closing(hf.data.shuffled(data, workers=1))
    with pytest.raises(DataError, match="not now"):
        loaded(made, steps=[0])
    data.cheer_up()
    assert same(loaded(made, steps=[0]), loaded(closing(data), steps=[0]))


def test_a_process_that_dies_is_replaced_once(closing, tmp_path):
    good = loaded(closing(Deadly(str(tmp_path), 0)))
    assert same(loaded(closing(hf.data.shuffled(Deadly(str(tmp_path), 1), workers=1))), good)


@pytest.mark.long
def test_a_sample_that_ends_every_process_is_named(closing, tmp_path):
    with pytest.raises(DataError, match=r"died twice near step .*7.*workers=0"):
        loaded(closing(hf.data.shuffled(Deadly(str(tmp_path), 9), workers=1)))


def test_what_comes_next_is_told_to_a_dataset_that_can_read_ahead(closing):
    told = []

    class Mapped(Batched):
        def read_ahead(self, ids):
            told.extend(ids.tolist())

    made = closing(Mapped(), until=3)
    loaded(made, steps=range(3))
    assert told == SampleOrder(64, 3).at_many(np.arange(64)).tolist()[: len(told)]
    assert len(told) == 64


def test_batches_survive_the_way_from_another_process():
    batch = {
        "half": torch.arange(6).reshape(2, 3).to(torch.bfloat16),
        "empty": torch.empty(0, 4),
        "flag": torch.tensor(True),
        "view": torch.arange(12).reshape(3, 4)[:, 1],
        "rest": ("text", 1, None, [torch.ones(2)]),
    }
    assert same(unpacked(packed(batch)), batch)


def test_every_tensor_goes_to_the_device():
    batch = {"a": torch.ones(1), "b": [torch.ones(1), "text"], "c": Pair(torch.ones(1), 3)}
    moved = on_device(batch, torch.device("meta"))
    assert moved["a"].is_meta
    assert moved["b"][0].is_meta
    assert moved["c"].ids.is_meta
    assert moved["c"].total == 3


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: batches(Noisy(), micro_batch=5), "global_batch=16 is not a multiple of micro_batch=5"),
        (lambda: batches(Noisy(0)), "is empty"),
        (lambda: batches(Stream()), "Stream is not a map-style dataset"),
        (lambda: batches(Noisy(), seed=-1), r"seed must be between .* \(got -1\)"),
        (lambda: hf.data.shuffled(Stream()), "not a map-style dataset"),
        (lambda: hf.data.shuffled(Noisy(), workers=-1), r"workers must be between .* \(got -1\)"),
        (lambda: hf.data.shuffled(Noisy(), steps_ahead=0), "steps_ahead must be at least 1"),
        (lambda: hf.data.shuffled(Noisy(), memory="much"), r"memory must be a size \(got 'much'\)"),
        (lambda: hf.data.shuffled(hf.data.shuffled(Noisy())), "call it only once"),
        (
            lambda: batches(hf.data.shuffled(Noisy(), collate=lambda s: s)),
            "cannot be sent to a decoding process",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(make, said):
    with pytest.raises(UsageError, match=said):
        make()
