"""An unmodified torchrun script: DDP, env:// rendezvous, a checkpoint of its own."""

import os
import sys
import time

import torch
import torch.distributed as dist

steps, path = int(sys.argv[1]), sys.argv[2]
device_s = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0  # that an accelerator would take for a step
own_s = float(sys.argv[4]) if len(sys.argv) > 4 else 0.0  # that a step takes of the processor, and
slow_rank = int(sys.argv[5]) if len(sys.argv) > 5 else -1  # four times as long on this rank
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(32, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
begin = 0
if os.path.exists(path):
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    begin = saved["step"]
ddp = torch.nn.parallel.DistributedDataParallel(model)
for step in range(begin, steps):
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step * 100 + dist.get_rank()))
    until = time.thread_time() + own_s * (4 if dist.get_rank() == slow_rank else 1)
    while time.thread_time() < until:
        pass
    optimizer.zero_grad()
    ddp(x).square().mean().backward()
    optimizer.step()
    time.sleep(device_s)
    if dist.get_rank() == 0 and step % 5 == 4:
        torch.save({"model": model.state_dict(), "step": step + 1}, f"{path}.tmp")
        os.replace(f"{path}.tmp", path)
dist.barrier()
if dist.get_rank() == 0:
    print(f"finished at {steps} as one of {dist.get_world_size()}")
dist.destroy_process_group()
