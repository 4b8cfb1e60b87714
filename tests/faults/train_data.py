"""Synthetic data that needs no files: a function of the sample's number."""

import torch


class Blobs:
    def __init__(self, width: int) -> None:
        self._width = width

    def __len__(self) -> int:
        return 100_000

    def batch(self, ids):
        rng = torch.Generator().manual_seed(int(ids[0]))
        labels = torch.randint(0, 8, (len(ids),), generator=rng)
        return torch.randn(len(ids), self._width, generator=rng) + labels[:, None], labels
