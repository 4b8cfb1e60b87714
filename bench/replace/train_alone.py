"""The job that loses nodes on Kubernetes: ten million parameters on Holdfast level 2. Its pods have no `bench`, so it is one file."""

from __future__ import annotations

import torch

import holdfast as hf

WIDTH, LAYERS = 1536, 4


class Noise:
    """Samples that are made of their number."""

    def __len__(self) -> int:
        return 1 << 40

    def batch(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.randn(len(ids), WIDTH, generator=torch.Generator().manual_seed(int(ids[0])))


def main(run: hf.Run) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    run.protect(model=model, optimizer=optimizer)
    for step in run.steps(Noise(), global_batch=12, micro_batch=2, until=1 << 40):
        with step:
            for inputs in step:
                step.backward(model(inputs).square().mean(), weight=len(inputs))
            step.apply(optimizer)


hf.start(main)
