"""A torchrun script with two lines of `holdfast.checkpoint`: DDP, and a part of the state that every rank has alone."""

import sys
import time

import torch
import torch.distributed as dist

import holdfast as hf

steps, every = int(sys.argv[1]), int(sys.argv[2])
device_s = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0  # that an accelerator would take for a step
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 4096), torch.nn.Linear(4096, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
own = torch.zeros(5000)  # what only this rank knows
state = {"model": model, "optimizer": optimizer, "own": own, "seen": 0}
begin = hf.checkpoint.load(state) or 0
print(f"rank {rank} begins at {begin}", flush=True)
ddp = torch.nn.parallel.DistributedDataParallel(model)
for step in range(begin, steps):
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step * 100 + rank))
    optimizer.zero_grad()
    ddp(x).square().mean().backward()
    optimizer.step()
    time.sleep(device_s)
    own += (rank + 1) * step
    state["seen"] += rank + 1
    if (step + 1) % every == 0:
        hf.checkpoint.save(state, step + 1)
digest = sum(p.detach().double().sum().item() for p in model.parameters())
print(f"rank {rank} ends with {digest!r} {own[0].item()!r} {state['seen']}", flush=True)
dist.barrier()
dist.destroy_process_group()
