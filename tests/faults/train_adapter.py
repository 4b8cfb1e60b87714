"""A tiny level-2 job with a frozen base and a part that is trained, as LoRA has. Nodes from the third on build another base:
their workers can only train with the others after they have fetched theirs. `--shard` makes replicas of that many workers."""

import argparse
import os

import torch
from torch.distributed.fsdp import fully_shard
from train_data import Blobs

import holdfast as hf

WIDTH = 32


class Adapted(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = torch.nn.Linear(WIDTH, 4, bias=False), torch.nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.base(x) + self.up(self.down(x)))[:, :8]


def main(run: hf.Run) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int)
    parser.add_argument("--members", type=int, default=2)
    parser.add_argument("--reduction", default="exact")
    parser.add_argument("--shard", type=int, default=1)
    args = parser.parse_args()
    node = int("".join(filter(str.isdigit, os.environ["HOLDFAST_NODE"])))
    torch.manual_seed(0)
    model = Adapted()
    if node >= args.members:
        torch.nn.init.normal_(model.base.weight)
        print("built another base", flush=True)
    if args.shard > 1:
        fully_shard(model, mesh=run.mesh(shard=args.shard)["shard"])
        run.replicate(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    run.constant(base=model)
    run.protect(model=model, optimizer=optimizer)
    for step in run.steps(
        Blobs(WIDTH), global_batch=48, micro_batch=4, until=args.steps, reduction=args.reduction, seed=1
    ):
        with step:
            for inputs, labels in step:
                loss = torch.nn.functional.cross_entropy(model(inputs), labels, reduction="sum")
                step.backward(loss, weight=len(inputs))
            step.apply(optimizer, max_grad_norm=1.0)


hf.start(main)
