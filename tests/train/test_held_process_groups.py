"""A process group outlives the DDP module that used it, so that no destructor of torch's waits with the GIL held."""

import subprocess
import sys

SCRIPT = """
import gc, os
from pathlib import Path
import torch
import torch.distributed as dist
import torch.distributed.nn  # as a warm process has: imported after `init_process_group`, its functions keep that group
from torch.optim.optimizer import register_optimizer_step_post_hook
from holdfast.train.script import hold_process_groups

register_optimizer_step_post_hook(lambda *_: hold_process_groups())

def held():
    # Of a group: each of its two threads gives itself its name, a moment after its start.
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return names.count("pt_gloo_runloop") > 0

def main():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    dist.destroy_process_group()

for _ in range(3):
    main()
    gc.collect()
    print(held(), flush=True)
os._exit(0)
"""


def test_a_group_outlives_its_module():
    """Without the hook it goes with the module, and now and then this hangs there."""
    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == ["True"] * 3
