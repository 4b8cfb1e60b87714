"""A hash of some samples: the same for the same data, and for no other; none where samples are drawn anew each time."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset, random_split

from holdfast.data.batches import DatasetBatches
from holdfast.errors import UsageError
from holdfast.train.data_cursor import DataCursor


def probe(data):
    batches = DatasetBatches(data, global_batch=4, micro_batch=2, until=1, seed=0, device=torch.device("cpu"))
    try:
        return batches.probe()
    finally:
        batches.close()


def points():
    return TensorDataset(torch.arange(40.0).reshape(20, 2))


def split(seed):
    return random_split(points(), [16, 4], generator=torch.Generator().manual_seed(seed))[0]


class Drawn(torch.utils.data.Dataset):
    """Samples by a generator: one of the global ones, which are seeded for each micro-batch, or its own."""

    def __init__(self, draw, broken=False):
        self.draw, self.broken = draw, broken

    def __len__(self):
        return 20

    def __getitem__(self, i):
        if self.broken:
            raise OSError("no such file")
        return {"x": np.array([i, self.draw()]), "path": f"/tmp/{random.getrandbits(64)}", "y": i % 3}


def test_the_same_data_has_the_same_hash_and_other_data_another():
    assert probe(split(0)) == probe(split(0)) is not None
    hashes = [probe(points()), probe(split(0)), probe(split(1)), probe(TensorDataset(torch.ones(20, 2)))]
    assert len(set(hashes)) == 4


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: torch.rand(()).item()])
def test_augmentation_from_the_global_generators_is_no_difference_and_leaves_them_alone(draw):
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert probe(Drawn(draw)) == probe(Drawn(draw)) is not None
    assert states == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


@pytest.mark.parametrize("data", [Drawn(np.random.default_rng().random), Drawn(random.random, broken=True)])
def test_what_is_drawn_anew_or_cannot_be_loaded_has_none(data):
    assert probe(data) is None


def test_who_joins_with_other_samples_is_told_to_seed_the_split_and_a_resumed_run_may_have_more():
    def cursor(seed):
        return DataCursor(4, 0, None, None, "refuse", probe(split(seed)))

    saved, alike, other = cursor(0).state_dict(), cursor(0), cursor(1)
    other.load_state_dict(saved)
    alike.from_peer = other.from_peer = True
    alike.load_state_dict(saved)
    alike.load_state_dict({k: v for k, v in saved.items() if k != "probe"})
    with pytest.raises(UsageError, match="Seed your split"):
        other.load_state_dict(saved)


def test_samples_of_any_layout_have_a_hash():
    class Odd(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def batch(self, ids):
            numbers = torch.arange(8.0)[int(ids[0]) :]
            return [
                numbers[::2][:1],
                torch.complex(numbers, numbers).conj(),
                numbers.to_sparse(),
                numbers[:0],
                "a text",
                None,
            ]

    assert probe(Odd()) == probe(Odd()) is not None
