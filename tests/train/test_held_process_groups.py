"""A process group outlives the DDP module that used it, so that no destructor of torch's waits with the GIL held."""

import subprocess
import sys

import pytest

SCRIPT = """
import gc, os, sys
from pathlib import Path
import torch
import torch.distributed as dist
import torch.distributed.nn  # as a warm process has: imported after `init_process_group`, its functions keep that group
from torch.optim.optimizer import register_optimizer_step_post_hook
from holdfast.train.script import hold_process_groups

if sys.argv[1] == "held":
    register_optimizer_step_post_hook(lambda *_: hold_process_groups())

def threads():
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return names.count("pt_gloo_runloop")

def main():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    during = threads()
    dist.destroy_process_group()
    return during

for _ in range(3):
    during = main()
    gc.collect()
    print(during, threads(), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(("held", "left"), [("held", 2), ("bare", 0)])
def test_a_group_stays_until_a_step_of_the_next_one(held, left):
    ran = subprocess.run([sys.executable, "-c", SCRIPT, held], capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    # Each has two threads. Never more than those of one group are left.
    assert ran.stdout.splitlines() == [f"2 {left}"] * 3
