"""One rank ends in the middle of training, without an error, and the others lose its connection: os._exit|return."""

import os
import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(20):
    if step == 10 and dist.get_rank() == 1:
        os._exit(0) if sys.argv[1] == "os._exit" else sys.exit()
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
