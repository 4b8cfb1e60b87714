"""The job that is resized: the model of `bench.recovery` on Holdfast level 2, at a constant global batch."""

from __future__ import annotations

import argparse
import os

from torch.nn.functional import cross_entropy

import holdfast as hf
from bench.recovery import model as job

MICRO_BATCHES = 12


def main(run: hf.Run) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=job.WIDTHS, default="10m")
    given = parser.parse_args()
    job.prepare_process()
    network = job.build(given.model).to(run.device)
    optimizer = job.build_optimizer(network.parameters())
    run.protect(model=network, optimizer=optimizer)
    batch = job.BATCH * MICRO_BATCHES
    for step in run.steps(job.Samples(), global_batch=batch, micro_batch=job.BATCH, until=1 << 40):
        with step:
            for inputs, labels in step:
                loss = cross_entropy(network(inputs), labels, reduction="sum")
                step.backward(loss, weight=len(labels))
            step.apply(optimizer)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    hf.start(main)
