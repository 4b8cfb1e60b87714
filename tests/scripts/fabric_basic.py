"""Fabric's basic kind of script: setup, setup_dataloaders, backward, all_reduce, save."""

import hashlib
import os
import sys

import torch
from lightning.fabric import Fabric, seed_everything
from torch.utils.data import DataLoader, TensorDataset


def main(path):
    seed_everything(5)
    fabric = Fabric(accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), strategy="ddp")
    fabric.launch()
    x = torch.randn(64, 10)
    data = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=8, shuffle=True)
    module = torch.nn.Sequential(torch.nn.Linear(10, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 2))
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=1e-2))
    data = fabric.setup_dataloaders(data)
    for epoch in range(3):
        for x, y in data:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            fabric.backward(loss)
            optimizer.step()
            print(f"[{fabric.global_rank}] epoch {epoch} loss {loss.item():.9f}", flush=True)
        mean = fabric.all_reduce(loss.detach(), reduce_op="mean").item()
        print(f"[{fabric.global_rank}] epoch {epoch} mean {mean:.9f}", flush=True)
    fabric.save(path, {"model": model, "optimizer": optimizer})
    state = b"".join(p.detach().numpy().tobytes() for p in module.parameters())
    print(f"[{fabric.global_rank}] {hashlib.sha256(state).hexdigest()}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
