"""The sharded job on Holdfast: FSDP2 inside a replica, `run.replicate` across replicas."""

from __future__ import annotations

import os

from torch.nn.functional import cross_entropy

import holdfast as hf
from bench.recovery import model as job
from bench.recovery import sharded
from bench.recovery.events import CommitLog, StateLog
from bench.recovery.gate import Gate
from bench.recovery.settings import Settings
from bench.recovery.train_holdfast import FOR_EVER
from holdfast.train.peer_transfer import Fetch
from holdfast.train.state_image import Image, Protected


def count_fetches(states: StateLog) -> None:
    """Write down the bytes of every state that this process fetches."""
    run = Fetch.run

    def counted(self: Fetch, objects: Protected) -> Image:
        image = run(self, objects)
        states.fetched(image.index.nbytes)
        return image

    Fetch.run = counted  # type: ignore[method-assign]


def main(run: hf.Run) -> None:
    settings = Settings.from_environment()
    job.prepare_process()
    mesh = run.mesh(shard=settings.shards)
    network = sharded.build(settings.size)
    sharded.shard(network, mesh if settings.size == "moe" else mesh["shard"])
    sharded.materialize(network, mesh["shard"].get_local_rank())
    run.replicate(network)
    optimizer = sharded.build_optimizer(network)
    run.protect(model=network, optimizer=optimizer)
    states = StateLog(settings.states)
    states.holds(sharded.nbytes(sharded.state(network, optimizer)))
    gate, log = Gate(settings.gate), CommitLog(settings.events)
    batch = sharded.BATCH * settings.workers

    for step in run.steps(job.Samples(), global_batch=batch, micro_batch=sharded.BATCH, until=FOR_EVER):
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
    count_fetches(StateLog(Settings.from_environment().states))
    hf.start(main)
