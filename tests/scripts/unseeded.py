"""Seeds nothing: dropout, augmentation and loader workers of each rank draw their own numbers."""

import os
import random

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader


class Drawn(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.rand(()).item(), random.random()


dist.init_process_group("gloo")
rank = os.environ["RANK"]
drawn = {
    "torch": torch.rand(()).item(),
    "python": random.random(),
    "numpy": float(np.random.rand()),
    "generator": float(np.random.default_rng().random()),
    "dropout": torch.nn.functional.dropout(torch.ones(64)).nonzero().flatten().tolist(),
    "loader": [v.tolist() for v in next(iter(DataLoader(Drawn(), batch_size=4, num_workers=2)))],
}
for name, value in drawn.items():
    print(f"[{rank}] {name}: {value}", flush=True)
dist.destroy_process_group()
