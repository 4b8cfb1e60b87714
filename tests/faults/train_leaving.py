"""Leaves the loop in the middle, by an error or by itself, while processes and threads are at work: error|break."""

import sys
from concurrent.futures import ThreadPoolExecutor

import torch

import holdfast as hf


class Numbers:
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, i):
        return torch.tensor([float(i)])


def main(run: hf.Run) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    run.protect(model=model, optimizer=optimizer)
    threads = ThreadPoolExecutor(1)
    threads.submit(print, "a thread that nobody ended").result()
    for step in run.steps(hf.data.shuffled(Numbers()), global_batch=8, micro_batch=2, until=100):
        if step.index == 3:
            if sys.argv[1] == "break":
                break
            raise RuntimeError("left in the middle")
        with step:
            for x in step:
                step.backward(model(x).sum(), weight=len(x))
            step.apply(optimizer)


hf.start(main)
