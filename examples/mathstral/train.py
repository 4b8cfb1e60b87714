"""Continued pre-training of a Mistral model: Hugging Face's modelling code, FSDP2, replicas that come and go.

holdfast run --nnodes 2:4 examples/mathstral/train.py examples/mathstral/tiny.toml train.steps=100
"""

import argparse
import math
from pathlib import Path

import torch
from config import Config, check_data, read
from mistral import empty_model, give_memory, shard
from torch.nn.functional import cross_entropy
from weights import Weights

import holdfast


def main(run: holdfast.Run) -> None:
    train = config.train
    model = build(run)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=train.lr, betas=train.betas, weight_decay=train.weight_decay
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: share_of_lr(config, run.samples))
    run.protect(model=model, optimizer=optimizer, scheduler=scheduler)
    steps = run.steps(
        holdfast.data.TokenDataset(config.data.tokens, config.data.seq_len),
        global_batch=train.global_batch,
        micro_batch=train.micro_batch,
        until=train.steps,
        seed=train.seed,
        reduction=train.reduction,
    )
    for step in steps:
        with step:
            for tokens, labels in step:
                logits = model(input_ids=tokens, use_cache=False).logits
                loss = cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")
                step.backward(loss, weight=labels.numel())
            step.apply(optimizer, max_grad_norm=train.max_grad_norm, scheduler=scheduler)
        run.log(loss=step.loss, lr=scheduler.get_last_lr()[0])


def build(run: holdfast.Run) -> torch.nn.Module:
    """The model of the folder, of which this worker holds one shard."""
    folder, parallel = Path(config.model.folder), config.parallel
    model = empty_model(folder, config.model.attention, parallel.checkpoint_activations)
    check_data(config.data, model.config.vocab_size, model.config.max_position_embeddings)
    with Weights(folder) as weights:
        weights.check(model)
        shard(model, run.mesh(shard=parallel.shard)["shard"], parallel.precision)
        run.replicate(model)
        give_memory(model, run.device)
        weights.load(model)
    return model


def share_of_lr(config: Config, samples: int) -> float:
    """Of the highest learning rate, after so many samples: a linear warm-up, then half a cosine."""
    train = config.train
    done = samples / (train.steps * train.global_batch)
    if done < train.warmup_share:
        return (samples + train.global_batch) / (train.warmup_share * train.steps * train.global_batch)
    falling = min(1.0, (done - train.warmup_share) / max(1e-9, 1 - train.warmup_share))
    return train.final_share + (1 - train.final_share) * (1 + math.cos(math.pi * falling)) / 2


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Continue the pre-training of a Mistral model.")
    parser.add_argument("config", type=Path, help="a TOML file such as tiny.toml or 7b.toml")
    parser.add_argument(
        "changes", nargs="*", metavar="TABLE.NAME=VALUE", help="instead of what is in the file"
    )
    args = parser.parse_args()
    try:
        config = read(args.config, args.changes)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    holdfast.start(main)
