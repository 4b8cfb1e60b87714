"""Pre-training and fine-tuning with Hugging Face's models, FSDP2, and replicas that come and go.

holdfast run --nnodes 2:4 recipes/train.py recipes/llama3-8b-pretrain/tiny.toml train.steps=100
"""

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import holdfast
from recipe import model as models
from recipe.checks import experts_of
from recipe.config import Config, read, resolved
from recipe.errors import Refused
from recipe.routers import Loads
from recipe.samples import IGNORED, Pairs


def main(run: holdfast.Run) -> None:
    train = config.train
    model = models.build(run, config)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=train.lr, betas=train.betas, weight_decay=train.weight_decay)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: share_of_lr(config, run.samples))
    run.protect(model=model, optimizer=optimizer, scheduler=scheduler)
    if config.lora.rank:
        run.constant(base=model)  # what is frozen: in no snapshot, and fetched by nobody who has it
    also = balance(run, model)
    steps = run.steps(
        data,
        global_batch=train.global_batch,
        micro_batch=train.micro_batch,
        until=train.steps,
        seed=train.seed,
        reduction=train.reduction,
    )
    for step in steps:
        with step:  # a fault inside is swallowed: the step is retried
            for tokens, labels in step:
                loss, weight = loss_of(model, tokens, labels)
                step.backward(loss, weight=weight)
            step.apply(optimizer, max_grad_norm=train.max_grad_norm, scheduler=scheduler, also=also)
        run.log(loss=step.loss, lr=scheduler.get_last_lr()[0])


def loss_of(model: Any, tokens: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The sum over the tokens that are learned, and how many these are."""
    share = config.experts.loss
    out = model(input_ids=tokens, use_cache=False, **({"output_router_logits": True} if share else {}))
    loss = cross_entropy(
        out.logits.float().flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=IGNORED
    )
    count = int((labels != IGNORED).sum())
    # The router's loss is a mean over tokens. As a part of the sum it counts in the global mean by its tokens, like the
    # rest, so it does not matter which worker computed it.
    return (loss + share * count * out.aux_loss if share else loss), count


def balance(run: holdfast.Run, model: Any) -> list[Any]:
    """What a commit does for the biases of the routers; nothing, if they stay."""
    rate = config.experts.bias_rate
    if not rate:
        return []
    loads = Loads(model, experts_of(model.config) or 0, model.config.num_experts_per_tok, run.device)
    run.protect(loads=loads)
    run.buffers("sum", "loads.tokens")
    return [lambda: loads.update(rate)]


def samples(config: Config) -> Any:
    """The data set of the file. Raises OSError or ValueError for one that is not there, or is none."""
    told = config.data
    if told.tokens is not None:
        return holdfast.data.TokenDataset(told.tokens, told.seq_len)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(config.model.folder, local_files_only=True)
    return Pairs(Path(str(told.pairs)), tokenizer, told.seq_len)


def share_of_lr(config: Config, samples: int) -> float:
    """Of the highest learning rate, after so many samples: a linear warm-up, then half a cosine."""
    train = config.train
    done = samples / (train.steps * train.global_batch)
    if done < train.warmup_share:
        return (samples + train.global_batch) / (train.warmup_share * train.steps * train.global_batch)
    falling = min(1.0, (done - train.warmup_share) / max(1e-9, 1 - train.warmup_share))
    return train.final_share + (1 - train.final_share) * (1 + math.cos(math.pi * falling)) / 2


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a model of Hugging Face's with a recipe.")
    parser.add_argument("config", type=Path, help="a TOML or YAML file, such as a recipe's tiny.toml")
    parser.add_argument(
        "changes", nargs="*", metavar="TABLE.NAME=VALUE", help="instead of what is in the file"
    )
    parser.add_argument(
        "--check", action="store_true", help="say what the run would be told, or what does not fit, and end"
    )
    args = parser.parse_args()
    try:
        config = read(args.config, args.changes)
        models.read_folder(config)
        data = samples(config)
    except (ImportError, OSError, ValueError) as error:
        if args.check:
            parser.error(str(error))
        raise Refused(str(error)) from None  # Holdfast ends the job with it at the first attempt
    if args.check:
        print(resolved(config), end="")
    else:
        holdfast.start(main)
