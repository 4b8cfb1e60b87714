"""sharded_model.py at level 2: a replica of two workers shards the model; distributed checkpoints are the job's."""

import hashlib

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import holdfast

STEPS = 10


class Rows(torch.utils.data.Dataset):
    """Anything, whatever number is asked for."""

    def __len__(self):
        return 1000

    def batch(self, ids):
        return torch.randn(len(ids), 16)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def digest(model):
    whole = [p.full_tensor().detach() for p in model.parameters()]
    return hashlib.sha256(b"".join(p.numpy().tobytes() for p in whole)).hexdigest()


def main(run):
    mesh = run.mesh(shard=2)["shard"]
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(16) for _ in range(3)))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    run.replicate(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.protect(model=model, optimizer=optimizer)
    for step in run.steps(Rows(), global_batch=16, micro_batch=8, until=STEPS, seed=100):
        with step:
            for x in step:
                loss = (model(x) - x.roll(1, dims=1)).square().mean()
                step.backward(loss * len(x), weight=len(x))
            step.apply(optimizer, max_grad_norm=1.0)
        if step.committed:
            norm = step.grad_norm
            print(f"[{run.rank}] step {step.index} loss {loss.item():.9f} norm {norm:.9f}", flush=True)
        if step.committed and step.index == STEPS - 1:
            with run.relaxed_watchdog():
                print(f"[{run.rank}] saved {digest(model)}", flush=True)


holdfast.start(main)
