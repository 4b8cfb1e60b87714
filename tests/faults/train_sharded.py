"""A small model with every trait that sharding must cope with, by flags: sizes that no degree divides, dropout, clipping,
a schedule; `--tensor`, `--bf16`, `--checkpointing`, `--compile`, `--meta`."""

import argparse
import os
import signal

import torch
import torch.distributed as dist
import xxhash
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import holdfast as hf

WIDTH, CLASSES = 34, 7


class Block(torch.nn.Module):
    def __init__(self, checkpointing: bool) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, 2 * WIDTH)
        self.down = torch.nn.Linear(2 * WIDTH, WIDTH)
        self.drop = torch.nn.Dropout(0.1)
        self.checkpointing = checkpointing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointing:
            return x + checkpoint(self.inner, x, use_reentrant=False)
        return x + self.inner(x)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int)
    parser.add_argument("--shard", type=int, default=2)
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--reduction", default="exact")
    parser.add_argument("--hsdp", action="store_true", help="shard over the two dimensions of the mesh")
    parser.add_argument("--evaluate", choices=["live", "die"])
    parser.add_argument("--gate", help="a FIFO: after step 13 everybody waits there for a byte")
    for flag in ("bf16", "checkpointing", "compile", "meta"):
        parser.add_argument(f"--{flag}", action="store_true")
    return parser.parse_args()


def build(run: hf.Run, args: argparse.Namespace) -> torch.nn.Module:
    mesh = run.mesh(shard=args.shard, tensor=args.tensor)
    if not run.alone:  # what a library finds is the replica
        found = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        assert found == (dist.get_rank(), dist.get_world_size()), found
    torch.manual_seed(0)
    with torch.device("meta" if args.meta else "cpu"):
        blocks = [Block(args.checkpointing) for _ in range(3)]
        model = torch.nn.Sequential(*blocks, torch.nn.Linear(WIDTH, CLASSES))
    if args.tensor > 1:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for block in blocks:
            parallelize_module(block, mesh["tensor"], plan, src_data_rank=None)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if args.bf16 else MixedPrecisionPolicy()
    over = mesh["replicate", "shard"] if args.hsdp else mesh["shard"]
    for block in blocks:
        fully_shard(block, mesh=over, mp_policy=policy)
    fully_shard(model, mesh=over, mp_policy=policy)
    if args.meta:
        model.to_empty(device="cpu")
        for p in model.parameters():
            torch.nn.init.uniform_(p, -0.1, 0.1)
    run.replicate(model)
    if args.compile:
        for block in blocks:
            block.compile(backend="eager")
    return model


class Average:
    """Of the model's parameters: every worker holds that of its own shards."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self.kept = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self) -> None:
        for name, p in self._model.named_parameters():
            self.kept[name].lerp_(p.detach(), 0.1)

    def state_dict(self) -> dict[str, object]:
        return self.kept

    def load_state_dict(self, state: dict) -> None:
        self.kept = state

    def digest(self) -> str:
        row = xxhash.xxh3_64()
        for kept in self.kept.values():
            row.update(kept.to_local().contiguous().view(torch.uint8).numpy().tobytes())
        return row.hexdigest()


def main(run: hf.Run) -> None:
    args = arguments()
    model = build(run, args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + 0.01 * n))
    average = Average(model)
    run.protect(model=model, optimizer=optimizer, scheduler=scheduler, average=average)
    drawn = torch.Generator().manual_seed(3)
    inputs = torch.randn(256, WIDTH, generator=drawn)
    targets = torch.randint(0, CLASSES, (256,), generator=drawn)
    data = torch.utils.data.TensorDataset(inputs, targets)
    for step in run.steps(data, global_batch=24, micro_batch=2, until=args.steps, reduction=args.reduction):
        with step:
            for x, y in step:
                step.backward(cross_entropy(model(x).float(), y, reduction="sum"), weight=len(y))
            step.apply(optimizer, max_grad_norm=1.0, scheduler=scheduler, also=average.update)
        if args.gate and step.committed and step.index == 13:
            with run.relaxed_watchdog(), open(args.gate, "rb", buffering=0) as gate:
                gate.read(1)
        if args.evaluate and step.committed and step.index % 4 == 3:
            with run.relaxed_watchdog(), torch.no_grad():
                for number in range(8):
                    if (step.index, run.rank, number, args.evaluate) == (11, 1, 5, "die"):
                        os.kill(os.getpid(), signal.SIGKILL)
                    model.eval()
                    found = cross_entropy(model(inputs[:32]), targets[:32])
                    torch.distributed.all_reduce(found)
                    print(f"evaluated: step {step.index}, {run.world.replica}, {float(found)!r}", flush=True)
            model.train()
        if args.compile and step.committed:
            compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            print(f"compiled: step {step.index}, {compiled} graphs", flush=True)
    print(f"averaged: {average.digest()}", flush=True)


if __name__ == "__main__":
    hf.start(main)
