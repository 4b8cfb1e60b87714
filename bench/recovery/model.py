"""The training job itself, the same for every system: model, data, loss, checkpoint.

A float32 multi-layer perceptron of 9.8 million parameters, AdamW, and synthetic data that is a function
of the sample's number. `ballast` bytes ride along in the state (checkpoints and transfers hold them, the
gradients do not), so that a large state can be measured on a small machine.

Imported by workers of every system, inside each peer's own environment: torch and the standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

INPUTS = 768
CLASSES = 1024
HIDDEN_LAYERS = 3
LEARNING_RATE = 1e-4
BATCH = 16
"""Samples of one replica in one step."""
POOL = 4096
"""Distinct samples; sample `i` is row `i % POOL`."""
WIDTHS = {"10m": 1536, "tiny": 8}
"""Hidden width of each model size: "10m" has 9.8 million parameters (39 MB of gradients), "tiny" 15 thousand."""


def build(size: str = "10m") -> nn.Module:
    """The model, with the same initial parameters in every process."""
    torch.manual_seed(0)
    width = WIDTHS[size]
    layers: list[nn.Module] = [nn.Linear(INPUTS, width), nn.ReLU()]
    for _ in range(HIDDEN_LAYERS):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, CLASSES))


def build_optimizer(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE)


class Ballast(nn.Module):
    """State without gradients: a buffer of `megabytes` that a replacement must receive too."""

    def __init__(self, megabytes: float) -> None:
        super().__init__()
        self.register_buffer("bytes", torch.zeros(int(megabytes * 1e6 / 4)))


class Samples:
    """A map-style data set of `length` samples: inputs (768,) float32 and a class number."""

    def __init__(self, length: int = 1 << 40) -> None:
        generator = torch.Generator().manual_seed(1)
        self._inputs = torch.randn(POOL, INPUTS, generator=generator)
        self._labels = torch.randint(CLASSES, (POOL,), generator=generator)
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._inputs[index % POOL], self._labels[index % POOL]

    def batch(self, ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs (n, 768) and labels (n,) of the samples `ids`."""
        rows = torch.as_tensor(ids) % POOL
        return self._inputs[rows], self._labels[rows]


def share(step: int, rank: int, world: int, batch: int = BATCH) -> range:
    """The sample numbers of `rank` in the global batch of `step`."""
    first = (step * world + rank) * batch
    return range(first, first + batch)


def prepare_process() -> None:
    """One compute thread: the replicas of a run share the machine's cores."""
    torch.set_num_threads(1)


class Checkpoint:
    """A checkpoint file of model, optimizer and ballast; the last whole one stays until the next is whole."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        ballast: Ballast,
    ) -> None:
        self._path = Path(path)
        self._parts = {"model": model, "optimizer": optimizer, "ballast": ballast}

    def load(self) -> int:
        """Bring the state back and return the number of steps it holds; 0 if there is no checkpoint."""
        if not self._path.exists():
            return 0
        saved = torch.load(self._path, weights_only=True)
        for name, part in self._parts.items():
            part.load_state_dict(saved[name])
        return int(saved["steps"])

    def save(self, steps: int) -> None:
        """Save the state after `steps` steps. Not forced to disk: the process may die, the machine does not."""
        saved = {name: part.state_dict() for name, part in self._parts.items()}
        scratch = self._path.with_suffix(".tmp")
        torch.save({**saved, "steps": steps}, scratch)
        scratch.replace(self._path)
