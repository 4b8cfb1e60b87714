"""Hugging Face's Trainer with arguments of the command line, the lines that find the last checkpoint, and its metrics."""

import hashlib
import os
from dataclasses import dataclass, field

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint


@dataclass
class ModelArguments:
    n_layer: int = field(default=1)
    n_embd: int = field(default=16)


@dataclass
class DataArguments:
    block_size: int = field(default=8)
    samples: int = field(default=64)


class Printed(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        shown = {k: v for k, v in logs.items() if "runtime" not in k and "per_second" not in k}
        print(f"[{args.process_index}] {state.global_step} {shown}", flush=True)


def main():
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)
    last_checkpoint = None
    if os.path.isdir(training_args.output_dir):
        last_checkpoint = get_last_checkpoint(training_args.output_dir)
    drawn = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 50, (data_args.samples, data_args.block_size), generator=drawn)
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    config = GPT2Config(
        vocab_size=50, n_positions=data_args.block_size, n_embd=model_args.n_embd, n_layer=model_args.n_layer,
        n_head=2, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    trainer = Trainer(
        model=GPT2LMHeadModel(config), args=training_args, train_dataset=rows[:-16], eval_dataset=rows[-16:],
        data_collator=default_data_collator, callbacks=[Printed()],
    )  # fmt: skip
    result = trainer.train(resume_from_checkpoint=last_checkpoint)
    trainer.save_model()
    trainer.log_metrics("train", result.metrics)
    trainer.save_metrics("train", result.metrics)
    trainer.save_state()
    metrics = trainer.evaluate()
    trainer.save_metrics("eval", metrics)
    state = b"".join(p.detach().numpy().tobytes() for p in trainer.model.parameters())
    rank = training_args.process_index
    print(f"[{rank}] done {metrics['eval_loss']:.9f} {hashlib.sha256(state).hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
