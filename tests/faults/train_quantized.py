"""A level-2 job whose optimizer keeps its moments in 8 or 4 bits: one of torchao's, or `own`; `float8`: whose weights are
gathered in float8. It prints a digest of every
tensor that a step leaves, found without Holdfast. `--shard` makes replicas of that many workers."""

import argparse
import hashlib

import torch
from train_data import Blobs
from wrapped import MomentumIn8Bits, bits

import holdfast as hf

WIDTH, HIDDEN = 64, 256
"""Torchao quantizes moments of 4096 elements and more, of each shard."""


def optimizer_of(kind: str, parameters) -> torch.optim.Optimizer:
    if kind == "float8":
        return torch.optim.AdamW(parameters, lr=1e-2)
    if kind == "own":
        return MomentumIn8Bits(parameters)
    # Its update is compiled, which takes minutes on a processor, and computes the same without.
    torch.compiler.set_stance("force_eager")
    import torchao.optim

    return getattr(torchao.optim, kind)(parameters, lr=1e-2)


def convert(model: torch.nn.Module) -> None:
    """Weights that are gathered in float8: wrappers around the weights that are trained."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(
        model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    )


def main(run: hf.Run) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind")
    parser.add_argument("steps", type=int)
    parser.add_argument("--shard", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, WIDTH)
    )
    model.register_buffer("scale", torch.full((1, WIDTH), 0.5).expand(3, WIDTH))
    if args.kind == "float8":
        convert(model)
    if args.shard > 1:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=run.mesh(shard=args.shard)["shard"])
        run.replicate(model)
    optimizer = optimizer_of(args.kind, model.parameters())
    run.protect(model=model, optimizer=optimizer)
    for step in run.steps(
        Blobs(WIDTH), global_batch=48, micro_batch=4, until=args.steps, reduction="exact", seed=1
    ):
        with step:
            for inputs, labels in step:
                outputs = model(inputs) * model.scale[0]
                step.backward(
                    torch.nn.functional.cross_entropy(outputs, labels, reduction="sum"), len(labels)
                )
            step.apply(optimizer, max_grad_norm=1.0)
        if step.committed and args.shard == 1:
            kept = [{k: bits(v) for k, v in s.items()} for s in optimizer.state.values()]
            left = repr([*map(bits, model.state_dict().values()), kept])
            print(f"{step.index} left {hashlib.sha256(left.encode()).hexdigest()}", flush=True)


hf.start(main)
