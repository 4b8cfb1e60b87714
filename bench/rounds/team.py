"""The members of one generation, as processes that only vote: run as a script, with any version of Holdfast on the path.

Arguments: members, nodes, fan-out (0: as the job would choose). It reads numbers of rounds from its input, a line each, and answers
with the seconds of each round at rank 0, as JSON. Members that have nothing to do wait for their pipe, and take no processor.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

from holdfast.protocol.messages import Generation, Member
from holdfast.train import control_channel

TOKEN = "bench"


def _channel(generation: Generation, rank: int, fan_out: int) -> Any:
    try:
        from holdfast.train.generation_group import channel_of
    except ImportError:  # an older version, which has no tree
        return control_channel.ControlChannel(generation, rank)
    return channel_of(generation, rank, fan_out or None)


def _vote(channel: Any, step: int) -> None:
    message = (1.0, 0.0, 0.0)
    if hasattr(channel, "send_vote"):
        channel.send_vote(step, message)
        channel.receive_vote(step, [message])
    else:
        channel.send(step, message)
        channel.receive(step, [message])


def _member(rank: int, nodes: list[str], fan_out: int, pipe: Connection) -> None:
    worker = f"w{rank}"
    listener = control_channel.ChannelListener("127.0.0.1", TOKEN, worker)
    pipe.send(listener.port)
    members = tuple(
        Member(rank=r, worker=f"w{r}", node=node, slot=0, host="127.0.0.1", vote_port=port)
        for r, (node, port) in enumerate(zip(nodes, pipe.recv(), strict=True))
    )
    channel = _channel(Generation(number=1, members=members), rank, fan_out)
    channel.connect(listener, TOKEN)
    step = 0
    while rounds := pipe.recv():
        took = []
        for _ in range(rounds):
            began = time.perf_counter()
            _vote(channel, step)
            took.append(time.perf_counter() - began)
            step += 1
        pipe.send(took if rank == 0 else None)
    os._exit(0)  # the listener's thread is of no use any more


def main() -> None:
    """The members, and whoever asks them."""
    size, nodes, fan_out = map(int, sys.argv[1:])
    of = [f"n{rank * nodes // size}" for rank in range(size)]
    fork = multiprocessing.get_context(
        "fork"
    )  # this process has no other thread, and imported everything once
    pipes = []
    for rank in range(size):
        ours, theirs = fork.Pipe()
        fork.Process(target=_member, args=(rank, of, fan_out, theirs), daemon=True).start()
        pipes.append(ours)
    ports = [pipe.recv() for pipe in pipes]
    for pipe in pipes:
        pipe.send(ports)
    for line in sys.stdin:
        for pipe in pipes:
            pipe.send(int(line))
        took, *_ = [pipe.recv() for pipe in pipes]
        print(json.dumps(took), flush=True)
    for pipe in pipes:
        pipe.send(0)


if __name__ == "__main__":
    main()
