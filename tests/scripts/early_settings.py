"""Settings that torch reads as it is imported, made by the script before that."""

import os

os.environ["OMP_NUM_THREADS"] = "2"
os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
print(f"[{dist.get_rank()}] {torch.get_num_threads()} {dist.get_debug_level()}", flush=True)
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.Adam([weight])
for _ in range(3):
    weight.grad = torch.ones(2)
    optimizer.step()
