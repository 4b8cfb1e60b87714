"""Trains a small language model on text, and keeps training when workers fail, leave or join.

python examples/text/train.py --steps 100                                # alone
holdfast run --nproc-per-node 2 examples/text/train.py --steps 100       # two workers, same loss curve
holdfast run --nnodes 2:4 examples/text/train.py --parallel hsdp         # replicas of two workers each
holdfast run --nnodes 4 examples/text/train.py --parallel fsdp           # one replica of all four
"""

import argparse
from pathlib import Path

import torch
from corpus import build_corpus, corpus_path
from model import ModelConfig, Transformer
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import holdfast


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small byte-level transformer on text.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps to train")
    parser.add_argument(
        "--text", type=Path, help="folder of text files; without it, Python's standard library"
    )
    parser.add_argument("--dim", type=int, default=192, help="channels of the model")
    parser.add_argument("--layers", type=int, default=4, help="transformer blocks")
    parser.add_argument("--heads", type=int, default=6, help="attention heads")
    parser.add_argument("--seq-len", type=int, default=128, help="tokens per sample")
    parser.add_argument(
        "--global-batch", type=int, default=32, help="samples per step, whatever the world size"
    )
    parser.add_argument("--micro-batch", type=int, default=4, help="samples per forward and backward pass")
    parser.add_argument("--average", type=float, help="keep an average of the weights, with this decay")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate")
    parser.add_argument(
        "--parallel",
        choices=("ddp", "hsdp", "fsdp"),
        default="ddp",
        help="what a replica is: one worker, --shard workers with a part of the model each, or all workers together",
    )
    parser.add_argument("--shard", type=int, default=2, help="workers of a replica under --parallel hsdp")
    parser.add_argument(
        "--reduction",
        choices=("fast", "exact"),
        default="fast",
        help="exact: the same bits in every world size",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and of the sample order")
    parser.add_argument("--cache", type=Path, default=Path("out/text"), help="folder for the prepared corpus")
    return parser.parse_args()


def main(run: holdfast.Run) -> None:
    corpus = build_corpus(args.text, corpus_path(args.text, args.cache))
    config = ModelConfig(dim=args.dim, layers=args.layers, heads=args.heads, seq_len=args.seq_len)

    torch.manual_seed(args.seed)
    model = Transformer(config).to(run.device)
    if args.parallel != "ddp":
        shard_model(run, model, args.shard if args.parallel == "hsdp" else run.full_world_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    data = holdfast.data.TokenDataset(corpus, seq_len=args.seq_len)
    run.protect(model=model, optimizer=optimizer)  # the state that must survive
    also = []  # what else changes with every step
    if args.average is not None:
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(args.average)).requires_grad_(False)
        run.protect(average=average)
        also.append(lambda: average.update_parameters(model))
    steps = run.steps(
        data,
        global_batch=args.global_batch,
        micro_batch=args.micro_batch,
        until=args.steps,
        seed=args.seed,
        reduction=args.reduction,
    )
    for step in steps:
        with step:  # a fault inside is swallowed: the step is retried
            for tokens, labels in step:  # this worker's micro-batches of the global batch
                logits = model(tokens)
                loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
                step.backward(loss, weight=labels.numel())
            step.apply(optimizer, max_grad_norm=1.0, also=also)  # reduce, agree, update, commit
        run.log(loss=step.loss)


def shard_model(run: holdfast.Run, model: Transformer, workers: int) -> None:
    """Gives each of the workers of a replica a part of every parameter. A block is whole only while it computes."""
    mesh = run.mesh(shard=workers)["shard"]
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    run.replicate(model)  # gradients are summed over the replicas


if __name__ == "__main__":
    args = parse_args()
    holdfast.start(main)
