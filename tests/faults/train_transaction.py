"""A tiny level-2 job in which everything that may be part of a commit is: a callback of the run's, a scaler whose scale
overflows at first and whenever it has grown, and gradients that are not finite. Every step begins with an evaluation, summed
over the workers. `--shard` makes replicas of that many workers; `--die`: one dies where the others wait for its part of the sum;
`--outside`: rank 0 halves its weights after each commit from step 3 on."""

import argparse
import os
import signal

import torch
from torch.distributed.fsdp import fully_shard
from train_data import Blobs

import holdfast as hf

WIDTH = 32
SPOILED = 13
"""In this step one micro-batch's loss is not finite, whatever the scale."""


class Count:
    """How often it was called, and over which steps and skipped ones. evaluated: the sum of what was found by `step.sum`."""

    def __init__(self) -> None:
        self.calls = self.steps = self.skipped = 0
        self.evaluated = self.found = 0.0

    def __call__(self, step: hf.Step) -> None:
        self.calls, self.steps = self.calls + 1, self.steps + step.index
        self.skipped += step.skipped
        self.evaluated += self.found

    def state_dict(self) -> dict[str, float]:
        return {name: value for name, value in vars(self).items() if name != "found"}

    def load_state_dict(self, state: dict[str, float]) -> None:
        vars(self).update(state)


class Statistics(torch.nn.Module):
    """What a forward pass changes: running statistics, and counts of the largest of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(WIDTH, affine=False)
        self.register_buffer("loads", torch.zeros(WIDTH, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.loads += x.argmax(1).bincount(minlength=WIDTH)
        return self.norm(x)


def main(run: hf.Run) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int)
    parser.add_argument("--reduction", default="exact")
    parser.add_argument("--shard", type=int, default=1)
    parser.add_argument("--die", action="store_true")
    parser.add_argument("--outside", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), Statistics(), torch.nn.Linear(WIDTH, 8)
    )
    run.buffers("mean", "model.2.norm.*")
    run.buffers("sum", "model.2.loads")
    if args.shard > 1:
        fully_shard(model, mesh=run.mesh(shard=args.shard)["shard"])
        run.replicate(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=2.0**126, growth_factor=2.0**6, growth_interval=4, backoff_factor=2.0**-6
    )
    count = Count()
    run.protect(model=model, optimizer=optimizer, scaler=scaler, count=count)
    run.on_commit(count)
    data = Blobs(WIDTH)

    def evaluate(step: hf.Step) -> None:
        if args.die and (step.index, run.rank, run.generation) == (5, 1, 1):
            os.kill(os.getpid(), signal.SIGKILL)
        # One sample at a time: in a batch the last bits may depend on how many there are.
        mine = [data.batch([i]) for i in range(run.rank, 12, run.world_size)]
        model.eval()
        with torch.no_grad():
            losses = [
                torch.nn.functional.cross_entropy(model(inputs), labels).item() for inputs, labels in mine
            ]
        model.train()
        found = step.sum({"losses": losses, "count": len(mine)})
        assert found["count"] == 12
        count.found = found["losses"]

    for step in run.steps(
        data, global_batch=48, micro_batch=4, until=args.steps, reduction=args.reduction, seed=1
    ):
        with step:
            evaluate(step)
            for number, (inputs, labels) in enumerate(step):
                loss = torch.nn.functional.cross_entropy(model(inputs), labels, reduction="sum")
                if step.index == SPOILED and run.world.micro_batches[number] == 7:
                    loss = loss * float("inf")
                step.backward(scaler.scale(loss), weight=len(inputs))
            step.apply(optimizer, max_grad_norm=1.0, scaler=scaler)
        if args.outside and step.index >= 3 and run.rank == 0:
            with torch.no_grad():
                model[0].weight.mul_(0.5)
    loads, norm = model[2].loads, model[2].norm
    assert int(loads.sum()) == 48 * (count.calls - count.skipped)
    assert int(norm.num_batches_tracked) == count.calls - count.skipped
    print(
        f"counted {norm.running_mean.double().sum().item()} {count.state_dict()} {scaler.state_dict()}",
        flush=True,
    )


hf.start(main)
