"""A tiny level-2 job that stands still before the steps whose gates a test holds shut."""

import fcntl
import sys
import time
from pathlib import Path

import torch

import holdfast as hf

WIDTH = 16
MICRO_BATCH_S = 0.03
"""Stands for an accelerator. Of steps that take longer than 50 ms each is told before the next begins, see `ProgressReport`."""


class Blobs:
    def __len__(self) -> int:
        return 100_000

    def batch(self, ids):
        rng = torch.Generator().manual_seed(int(ids[0]))
        return torch.randn(len(ids), WIDTH, generator=rng), torch.randint(0, 8, (len(ids),), generator=rng)


def wait_at(gate: Path) -> None:
    """Returns at once where there is no gate, else when nobody holds it any more."""
    if gate.exists():
        with gate.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH)


def main(run: hf.Run) -> None:
    until, gates = int(sys.argv[1]), Path(sys.argv[2])
    torch.manual_seed(0)
    model = torch.nn.Linear(WIDTH, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    run.protect(model=model, optimizer=optimizer)
    for step in run.steps(Blobs(), global_batch=12, micro_batch=2, until=until):
        # Before the step: all steps before it are committed and told, and a fault of this step strikes behind the gate.
        wait_at(gates / str(step.index))
        with step:
            for inputs, labels in step:
                loss = torch.nn.functional.cross_entropy(model(inputs), labels, reduction="sum")
                time.sleep(MICRO_BATCH_S)
                step.backward(loss, weight=len(inputs))
            step.apply(optimizer)
        run.log(twice=2 * step.index)


hf.start(main)
