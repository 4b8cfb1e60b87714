"""The bare mechanics of a recovery, nothing else: reduce, notice, build the group again, reduce.

usage: floor_worker.py store PORT | rank RANK WORLD PORT VICTIM EVENTS

Every rank knows beforehand who will die, so no time goes into finding out. What is left is what gloo and the
machine cost anyone.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch
import torch.distributed as dist

from bench.recovery import model as job


def serve(port: int) -> None:
    """A store server outside the ranks, which no fault takes away."""
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    while store is not None:
        time.sleep(3600)


def take_part(rank: int, world: int, port: int, victim: int, events: str) -> None:
    job.prepare_process()
    log = os.open(events, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    gradient = torch.zeros(sum(p.numel() for p in job.build().parameters()))

    def say(kind: str) -> None:
        line = {"t": time.monotonic(), "pid": os.getpid(), "rank": rank, "kind": kind}
        os.write(log, (json.dumps(line) + "\n").encode())

    def join(generation: int, members: list[int]) -> None:
        scope = dist.PrefixStore(str(generation), store)
        dist.init_process_group("gloo", store=scope, rank=members.index(rank), world_size=len(members))

    join(0, list(range(world)))
    try:
        while True:
            dist.all_reduce(gradient)
            say("reduced")
    except RuntimeError:
        say("noticed")
    dist.destroy_process_group()
    join(1, [other for other in range(world) if other != victim])
    dist.all_reduce(gradient)
    say("going")
    # Ranks that have ended would break the last reduction of the others.
    time.sleep(3600)


if __name__ == "__main__":
    if sys.argv[1] == "store":
        serve(int(sys.argv[2]))
    else:
        rank, world, port, victim = map(int, sys.argv[2:6])
        take_part(rank, world, port, victim, sys.argv[6])
