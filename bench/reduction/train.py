"""One rank: the same model trained by every reduction, in alternating blocks of steps."""

from __future__ import annotations

import math
import time
from multiprocessing.connection import Connection

import torch
from torch.nn.functional import cross_entropy

from bench.recovery import model as job
from bench.reduction.fixed_point import AheadSum, FixedPointSum
from holdfast.protocol.messages import Generation, Member
from holdfast.train.control_channel import ChannelListener
from holdfast.train.exact import ExactSum
from holdfast.train.generation_group import GenerationGroup
from holdfast.train.place import share
from holdfast.train.reduction import Gradients, GradientSum

KINDS: dict[str, type[Gradients]] = {
    "fast": GradientSum,
    "tree": ExactSum,
    "int64": FixedPointSum,
    "int64 ahead": AheadSum,
}
AGAIN = "fast again"
WIDTHS = {"10m": 1536, "100m": 5504}
"""Hidden width: 9.8 and 100.8 million parameters."""
WARM_UP = 2
HOST, TOKEN = "127.0.0.1", "bench"


def build(size: str) -> torch.nn.Module:
    job.WIDTHS[size] = WIDTHS[size]
    return job.build(size)


def rank_main(
    pipe: Connection, rank: int, world: int, size: str, micro_batches: int, rounds: int, steps: int
) -> None:
    """Says its port, hears all ports, trains, says after every block: (kind, seconds of each step)."""
    job.prepare_process()
    listener = ChannelListener(HOST, TOKEN, f"w{rank}")
    pipe.send(listener.port)
    members = tuple(
        Member(rank=i, worker=f"w{i}", node=f"n{i}", slot=0, host=HOST, vote_port=port)
        for i, port in enumerate(pipe.recv())
    )
    group = GenerationGroup(Generation(number=1, members=members, start=0), rank, HOST, listener)
    group.join(TOKEN)
    network = build(size)
    optimizer = job.build_optimizer(network.parameters())
    samples = job.Samples()
    mine = share(micro_batches, rank, world)
    index = 0

    def step(gradients: Gradients) -> float:
        nonlocal index
        group.channel.send_vote(index, (1.0, 0.0, 0.0))
        group.channel.receive_vote(index, [(1.0, 0.0, 0.0)])
        began = time.perf_counter()
        gradients.begin()
        gradients.expect(micro_batches, rank, world)
        for micro in mine:
            first = (index * micro_batches + micro) * job.BATCH
            inputs, labels = samples.batch(range(first, first + job.BATCH))
            loss = cross_entropy(network(inputs), labels, reduction="sum")
            gradients.before_backward()
            if micro == mine[-1]:
                gradients.last(group)
            loss.backward()
            gradients.after_backward()
        gradients.flush(group)
        gradients.clip(math.sqrt(gradients.finish(lambda: 1 / (micro_batches * job.BATCH))), 1.0)
        optimizer.step()
        index += 1
        return time.perf_counter() - began

    for _ in range(rounds):
        for name in (*KINDS, AGAIN):
            gradients = KINDS.get(name, GradientSum)(network.parameters(), lambda: None)
            for _ in range(WARM_UP):
                step(gradients)
            pipe.send((name, [step(gradients) for _ in range(steps)]))
            for p in network.parameters():
                p._post_accumulate_grad_hooks.clear()
                p.grad = None
    group.close()
    listener.close()
