"""A script with Hugging Face's Trainer, as people write it: what it ends with goes into a file of each worker.

train_trainer.py FOLDER [--accumulate N] [--epochs N] [--patience N] [--own-loss] [--half] [--broken STEP] [--report-to TRACKER] [--noise]
"""

import argparse
import json
import os
from pathlib import Path

import between
import half
import torch
import transformers
import where
from broken import break_update
from torch.utils.data import Dataset
from transformers import (
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    TrainerCallback,
    TrainingArguments,
)

from holdfast.transformers import wrap

SAMPLES, LENGTH, WORDS = 96, 12, 64


class Sequences(Dataset):
    """Each token follows from the one before; a third of every label is not counted, another third in each sample."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.tensor([(index * 7 + place * (1 + index % 3)) % WORDS for place in range(LENGTH)])
        labels = tokens.clone()
        labels[: 1 + index % (LENGTH // 2)] = -100
        return {"input_ids": tokens, "labels": labels}


class Counting(TrainerCallback):
    """How often each event came, and for which steps."""

    def __init__(self) -> None:
        self.ended: list[int] = []
        self.epochs: list[float] = []

    def on_step_end(self, args, state, control, **more):
        self.ended.append(state.global_step)
        between.wait(state.global_step)

    def on_epoch_end(self, args, state, control, **more):
        self.epochs.append(state.epoch)


class Breaking(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_begin(self, args, state, control, optimizer=None, **more):
        break_update(optimizer.optimizer, self.step, lambda: args.process_index == 1)


class HalfLoss(transformers.Trainer):
    """A user's own loss: compute_loss is called as in any Trainer."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        return (loss / 2, outputs) if return_outputs else loss / 2


def count(model, arguments, named) -> None:
    """Before each forward pass: as modules count the loads of their experts. Evaluations count, too."""
    model.seen += len(named["input_ids"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--patience", type=int, default=0)
    parser.add_argument("--own-loss", action="store_true")
    parser.add_argument("--half", action="store_true", help="fp16")
    parser.add_argument("--broken", type=int, default=0, help="the update of this step fails on rank 1")
    parser.add_argument("--report-to", default="none")
    parser.add_argument(
        "--noise", action="store_true", help="label smoothing, and NEFTune's noise in the embeddings"
    )
    options = parser.parse_args()

    transformers.set_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        attention_dropout=0.1,
    )
    counting = Counting()
    callbacks = [counting, Breaking(options.broken)]
    if options.patience:
        callbacks.append(EarlyStoppingCallback(options.patience, early_stopping_threshold=0.5))
    model = LlamaForCausalLM(config)
    model.register_buffer("seen", torch.zeros(1, dtype=torch.int64))
    model.register_forward_pre_hook(count, with_kwargs=True)
    kind = HalfLoss if options.own_loss else transformers.Trainer
    skipped = []
    trainer = wrap(
        kind,
        reduction="exact",
        buffers={"model.seen": "sum"},
        on_commit=lambda step: skipped.append(step.index) if step.skipped else None,
    )(
        model=model,
        args=TrainingArguments(
            output_dir=str(options.folder),
            per_device_train_batch_size=4,
            gradient_accumulation_steps=options.accumulate,
            num_train_epochs=options.epochs,
            learning_rate=1e-2,
            warmup_steps=3,
            lr_scheduler_type="cosine",
            max_grad_norm=0.5,
            logging_steps=3,
            eval_strategy="epoch",
            save_strategy="steps",
            save_steps=9,
            metric_for_best_model="loss",
            report_to=options.report_to,
            label_smoothing_factor=0.1 if options.noise else 0.0,
            neftune_noise_alpha=5.0 if options.noise else None,
            use_cpu=not where.GPU,
            fp16=options.half,
        ),
        train_dataset=Sequences(),
        eval_dataset=Sequences(),
        callbacks=callbacks,
    )
    if options.half:
        half.set_up(trainer.accelerator)
    out = trainer.train()
    where.check(trainer.model)
    history = [
        {name: value for name, value in logs.items() if not name.endswith(("_runtime", "_per_second"))}
        for logs in trainer.state.log_history
    ]
    end = {
        "parameters": where.digest(trainer.model.parameters()),
        "seen": int(model.seen),
        "steps": out.global_step,
        "loss": out.training_loss,
        "history": history,
        "ended": counting.ended,
        "epochs": counting.epochs,
        "saves": trainer.args.should_save,
    }
    if options.half:
        end |= {"scaler": trainer.accelerator.scaler.state_dict(), "skipped": skipped}
    (options.folder / f"end-{os.getpid()}.json").write_text(json.dumps(end))


if __name__ == "__main__":
    main()
