"""SIGUSR2 means "you are preempted: save, and leave", as launchers on Slurm have it. Rank 1 hangs once."""

import os
import signal
import sys
import threading

import torch
import torch.distributed as dist

RANK, START = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]


def preempted(number: int, frame: object) -> None:
    print("preempted by signal", number, flush=True)
    sys.exit(0)


for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGALRM, signal.SIGCHLD):
    signal.signal(number, preempted)
dist.init_process_group("gloo")
weight = torch.nn.Parameter(torch.zeros(2))
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(40):
    if step == 20 and RANK == "1" and START == "0":
        threading.Event().wait()
    weight.grad = torch.ones(2)
    dist.all_reduce(weight.grad)
    optimizer.step()
dist.barrier()
print(f"rank {RANK} trained to the end", flush=True)
