"""A job under the exact reduction whose model has chance and running statistics in it, for computing micro-batches twice."""

import sys

import torch

import holdfast as hf


class Blobs:
    def __len__(self) -> int:
        return 100_000

    def batch(self, ids):
        rng = torch.Generator().manual_seed(int(ids[0]))
        return torch.randn(len(ids), 64, generator=rng), torch.randint(0, 8, (len(ids),), generator=rng)


def main(run: hf.Run) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 8)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.protect(model=model, optimizer=optimizer)
    run.buffers("mean")
    for step in run.steps(Blobs(), global_batch=48, micro_batch=4, until=int(sys.argv[1]), reduction="exact"):
        with step:
            for inputs, labels in step:
                loss = torch.nn.functional.cross_entropy(model(inputs), labels, reduction="sum")
                step.backward(loss, weight=len(inputs))
            step.apply(optimizer, max_grad_norm=1.0)


hf.start(main)
