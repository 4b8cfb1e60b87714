"""Hugging Face's Trainer with a model that transformers shards over the workers of a replica, as people write it.

train_sharded_trainer.py FOLDER SHARDS [--experts N] [--tensor N]
"""

import argparse
import json
import os
from pathlib import Path

import torch
import transformers
import where
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM, TrainingArguments
from transformers.distributed import DistributedConfig

import holdfast
from holdfast.transformers import wrap

SAMPLES, LENGTH, WORDS = 96, 12, 64
SMALL = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


class Sequences(Dataset):
    """Each token follows from the one before; a part of every label is not counted."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.tensor([(index * 7 + place * (1 + index % 3)) % WORDS for place in range(LENGTH)])
        labels = tokens.clone()
        labels[: 1 + index % (LENGTH // 2)] = -100
        return {"input_ids": tokens, "labels": labels}


def pretrained(folder: Path, experts: int) -> Path:
    """What a script begins with. Here every worker writes the same model into a folder of its own."""
    transformers.set_seed(0)
    if experts:
        config = Qwen3MoeConfig(
            **SMALL, num_experts=experts, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8
        )
        model = Qwen3MoeForCausalLM(config)
    else:
        model = LlamaForCausalLM(LlamaConfig(**SMALL))
    model.save_pretrained(where := folder / f"base-{os.getpid()}")
    return where


parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("shards", type=int)
parser.add_argument("--experts", type=int, default=0)
parser.add_argument("--tensor", type=int, default=1)
options = parser.parse_args()
base = pretrained(options.folder, options.experts)


def main(run: holdfast.Run) -> None:
    workers = options.shards * options.tensor
    if workers > 1:
        run.mesh(shard=options.shards, tensor=options.tensor)
    transformers.set_seed(0)
    dealt = options.shards if options.experts else None
    how = DistributedConfig(fsdp_size=options.shards, tp_size=options.tensor, ep_size=dealt)
    kind = Qwen3MoeForCausalLM if options.experts else LlamaForCausalLM
    model = kind.from_pretrained(base, distributed_config=how)
    trainer = wrap(transformers.Trainer, reduction="exact")(
        model=model,
        args=TrainingArguments(
            output_dir=str(options.folder),
            per_device_train_batch_size=4,
            gradient_accumulation_steps=4 * options.tensor // run.full_world_size,
            num_train_epochs=3,
            learning_rate=1e-2,
            warmup_steps=3,
            lr_scheduler_type="cosine",
            max_grad_norm=0.5,
            logging_steps=3,
            save_strategy="no",
            report_to="none",
            use_cpu=not where.GPU,
        ),
        train_dataset=Sequences(),
    )
    out = trainer.train()
    where.check(trainer.model)
    held = [p.to_local() if workers > 1 and hasattr(p, "to_local") else p for p in trainer.model.parameters()]
    end = {
        "parameters": where.digest(held),
        "steps": out.global_step,
        "loss": out.training_loss,
        "history": [
            {name: value for name, value in logs.items() if not name.endswith(("_runtime", "_per_second"))}
            for logs in trainer.state.log_history
        ],
        "shard": torch.distributed.get_rank() if workers > 1 else 0,
    }
    (options.folder / f"end-{os.getpid()}.json").write_text(json.dumps(end))


holdfast.start(main)
