"""A small network in two stages of a pipeline, by `--schedule`; `one`: the same network on one worker."""

import argparse

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.functional import cross_entropy

import holdfast as hf

WIDTH, CLASSES, MICRO, PARTS = 8, 5, 8, 4
SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int)
    parser.add_argument("--schedule", choices=[*SCHEDULES, "one"], default="1f1b")
    parser.add_argument("--shard", type=int, default=1)
    parser.add_argument("--reduction", default="exact")
    parser.add_argument("--silent", action="store_true", help="a stage that does not specify its shapes")
    return parser.parse_args()


def layers() -> list[torch.nn.Module]:
    """All of the network: each worker makes it from the same seed and keeps its part."""
    torch.manual_seed(0)
    blocks = [
        torch.nn.Sequential(torch.nn.Linear(WIDTH, 16), torch.nn.Tanh(), torch.nn.Linear(16, WIDTH))
        for _ in range(4)
    ]
    return [*blocks, torch.nn.Linear(WIDTH, CLASSES)]


def summed(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return cross_entropy(out, target, reduction="sum")


def staged(run: hf.Run, args: argparse.Namespace) -> tuple[torch.nn.Module, object]:
    """This worker's stage, and its schedule."""
    mesh = run.mesh(shard=args.shard, stage=2)
    stage = mesh["stage"].get_local_rank()
    model = torch.nn.Sequential(*(layers()[:2], layers()[2:])[stage])
    if args.shard > 1:
        fully_shard(model, mesh=mesh["shard"])
    run.replicate(model)
    part = torch.empty(MICRO // PARTS, WIDTH, requires_grad=True)
    out = part if stage == 0 else torch.empty(MICRO // PARTS, CLASSES)
    shapes = {} if args.silent else {"input_args": (part,), "output_args": (out,)}
    at = PipelineStage(model, stage, 2, torch.device("cpu"), group=mesh["stage"].get_group(), **shapes)
    kind = SCHEDULES[args.schedule]
    return model, kind(at, n_microbatches=PARTS, loss_fn=summed, scale_grads=False)


def main(run: hf.Run) -> None:
    args = arguments()
    if args.schedule == "one":
        model, schedule = torch.nn.Sequential(*layers()), None
    else:
        model, schedule = staged(run, args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    run.protect(model=model, optimizer=optimizer)
    drawn = torch.Generator().manual_seed(3)
    inputs = torch.randn(256, WIDTH, generator=drawn)
    data = torch.utils.data.TensorDataset(inputs, torch.randint(0, CLASSES, (256,), generator=drawn))
    for step in run.steps(
        data, global_batch=8 * MICRO, micro_batch=MICRO, until=args.steps, reduction=args.reduction
    ):
        with step:
            for x, y in step:
                if schedule is None:
                    step.backward(summed(model(x), y), weight=len(y))
                else:
                    step.pipeline(schedule, x, target=y, weight=len(y))
            step.apply(optimizer, max_grad_norm=0.5)
        if step.committed:
            print(f"norm: {step.index} {step.grad_norm!r} {step.loss!r}", flush=True)


if __name__ == "__main__":
    hf.start(main)
