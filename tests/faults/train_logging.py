"""A tiny level-2 job that logs: a function of the step, a value of each rank, and one that is not finite."""

import sys
import time

import torch
from train_data import Blobs

import holdfast as hf

WIDTH = 16


def main(run: hf.Run) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(WIDTH, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    run.protect(model=model, optimizer=optimizer)
    for step in run.steps(Blobs(WIDTH), global_batch=12, micro_batch=2, until=int(sys.argv[1])):
        with step:
            for inputs, labels in step:
                loss = torch.nn.functional.cross_entropy(model(inputs), labels, reduction="sum")
                time.sleep(float(sys.argv[2]))  # stands for an accelerator
                step.backward(loss, weight=len(inputs))
            step.apply(optimizer)
        run.log(twice=2 * step.index, rank=run.rank, **{"not/finite": float("nan")})
        if step.index % 10 == 0:
            run.log(seldom=torch.tensor([0.5]))


hf.start(main)
