"""One rank of a job under NVIDIA's in-process wrapper, after its CPU example.

The wrapped function runs again in every surviving process after a fault, and loads the checkpoint: the
survivors may have stopped on different sides of an update, so their state in memory cannot be kept.
"""

import argparse
import os
from datetime import timedelta
from typing import Optional

import torch
import torch.distributed as dist
from nvidia_resiliency_ext import inprocess
from torch.nn.functional import cross_entropy

from bench.recovery import model as job
from bench.recovery.events import CommitLog
from bench.recovery.gate import Gate
from bench.recovery.settings import Settings

SHORT = timedelta(seconds=0.1)
TUNED = {
    "monitor_thread_interval": SHORT,
    "monitor_process_interval": SHORT,
    "progress_watchdog_interval": SHORT,
    "heartbeat_interval": timedelta(seconds=0.5),
    "last_call_wait": timedelta(0),
    "termination_grace_time": timedelta(0),
}
"""Every interval of the wrapper that delays a restart, as short as it can be."""


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--store-port", type=int, required=True)
    parser.add_argument("--wrapper-port", type=int, required=True)
    parser.add_argument("--gloo-timeout-s", type=float, default=10.0, help="that of NVIDIA's CPU example")
    parser.add_argument("--tuned", action="store_true")
    return parser.parse_args()


def main() -> None:
    settings, chosen = Settings.from_environment(), options()
    job.prepare_process()
    initial_rank, processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    network, ballast = job.build(), job.Ballast(settings.state_mb)
    optimizer = job.build_optimizer(network.parameters())
    checkpoint = job.Checkpoint(settings.checkpoint, network, optimizer, ballast)
    samples = job.Samples()
    gate, log = Gate(settings.gate), CommitLog(settings.events)
    store = dist.TCPStore(
        "127.0.0.1", chosen.store_port, processes, initial_rank == 0, multi_tenant=True, use_libuv=True
    )

    # The wrapper finds the parameter that it fills by this annotation, and it must not be a string.
    def train(call: Optional[inprocess.CallWrapper] = None) -> None:  # noqa: UP045
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(str(call.iteration), store),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=chosen.gloo_timeout_s),
        )
        step = checkpoint.load()
        model = torch.nn.parallel.DistributedDataParallel(network)
        while True:
            held_s = gate.wait(step, rank)
            inputs, labels = samples.batch(job.share(step, rank, world))
            optimizer.zero_grad()
            cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            log.commit(rank=rank, step=step, world=world, gen=call.iteration, held_s=held_s)
            step += 1
            if rank == 0 and step % settings.checkpoint_every == 0:
                with call.atomic():
                    checkpoint.save(step)

    inprocess.Wrapper(
        store_kwargs={"port": chosen.wrapper_port},
        rank_assignment=inprocess.Compose(
            inprocess.rank_assignment.MaxActiveWorldSize(settings.replicas),
            inprocess.rank_assignment.ActivateAllRanks(),
            inprocess.rank_assignment.ShiftRanks(),
        ),
        **(TUNED if chosen.tuned else {}),
    )(train)()


if __name__ == "__main__":
    main()
