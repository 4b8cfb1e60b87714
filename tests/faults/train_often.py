"""Gives its state after every step, and ends."""

import sys

import torch
import torch.distributed as dist

import holdfast as hf

last = int(sys.argv[1])
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
state = {"model": model, "optimizer": optimizer}
begin = hf.checkpoint.load(state) or 0
print(f"rank {dist.get_rank()} begins at {begin}", flush=True)
for step in range(begin, last):
    model(torch.ones(8, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    hf.checkpoint.save(state, step + 1, overlap=True)
