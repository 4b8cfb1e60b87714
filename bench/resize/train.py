"""The job that is resized: the model of `bench.recovery` on Holdfast level 2, at a constant global batch."""

from __future__ import annotations

import os

from torch.nn.functional import cross_entropy

import holdfast as hf
from bench.recovery import model as job
from bench.recovery.events import CommitLog
from bench.recovery.settings import Settings

MICRO_BATCHES = 12


def main(run: hf.Run) -> None:
    settings = Settings.from_environment()
    job.prepare_process()
    network = job.build(os.environ["BENCH_RESIZE_MODEL"]).to(run.device)
    optimizer = job.build_optimizer(network.parameters())
    run.protect(model=network, optimizer=optimizer)
    log, batch = CommitLog(settings.events), job.BATCH * MICRO_BATCHES
    for step in run.steps(job.Samples(), global_batch=batch, micro_batch=job.BATCH, until=1 << 40):
        with step:
            world, generation = run.world_size, run.generation
            for inputs, labels in step:
                loss = cross_entropy(network(inputs), labels, reduction="sum")
                step.backward(loss, weight=len(labels))
            step.apply(optimizer)
        log.commit(rank=run.rank, step=step.index, world=world, gen=generation)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    hf.start(main)
