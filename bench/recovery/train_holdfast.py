"""The same job on Holdfast level 2: the loop is written with `hf.Run`."""

from __future__ import annotations

import os

from torch.nn.functional import cross_entropy

import holdfast as hf
from bench.recovery import model as job
from bench.recovery.events import CommitLog
from bench.recovery.gate import Gate
from bench.recovery.settings import Settings

FOR_EVER = 1 << 40


def main(run: hf.Run) -> None:
    settings = Settings.from_environment()
    job.prepare_process()
    network, ballast = job.build().to(run.device), job.Ballast(settings.state_mb)
    optimizer = job.build_optimizer(network.parameters())
    run.protect(model=network, optimizer=optimizer, ballast=ballast)
    gate, log = Gate(settings.gate), CommitLog(settings.events)
    batch = job.BATCH * settings.replicas

    for step in run.steps(job.Samples(), global_batch=batch, micro_batch=job.BATCH, until=FOR_EVER):
        held_s = gate.wait(step.index, run.rank)
        world, gen = run.world_size, getattr(run, "generation", "")
        with step:
            # The membership of this attempt: after a fault the step is retried in another one.
            world, gen = run.world_size, getattr(run, "generation", "")
            for inputs, labels in step:
                loss = cross_entropy(network(inputs), labels, reduction="sum")
                step.backward(loss, weight=len(labels))
            step.apply(optimizer)
        if step.committed:
            log.commit(rank=run.rank, step=step.index, world=world, gen=gen, held_s=held_s)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    hf.start(main)
