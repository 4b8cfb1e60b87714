"""A small level-2 job whose steps take a given time, until a file is there: there is time to break things."""

import sys
import time
from pathlib import Path

import torch

import holdfast as hf

WIDTH = 32


class Blobs:
    def __len__(self) -> int:
        return 100_000

    def batch(self, ids):
        rng = torch.Generator().manual_seed(int(ids[0]))
        labels = torch.randint(0, 8, (len(ids),), generator=rng)
        return torch.randn(len(ids), WIDTH, generator=rng) + labels[:, None], labels


def main(run: hf.Run) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.protect(model=model, optimizer=optimizer)
    for step in run.steps(Blobs(), global_batch=48, micro_batch=4, until=int(sys.argv[1]), reduction="exact"):
        with step:
            for inputs, labels in step:
                loss = torch.nn.functional.cross_entropy(model(inputs), labels, reduction="sum")
                step.backward(loss, weight=len(inputs))
            step.apply(optimizer, max_grad_norm=1.0)
        run.log(loss=step.loss)
        if len(sys.argv) > 2 and not Path(sys.argv[3]).exists():
            time.sleep(float(sys.argv[2]))


hf.start(main)
