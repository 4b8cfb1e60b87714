"""A script around Hugging Face's Trainer as people write them: checkpoint now and then, resume from the last one.

Nothing in it knows who launched it. torchrun and Holdfast level 0 both run this file.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

from bench.recovery.events import CommitLog
from bench.recovery.settings import Settings

STEPS = 1_000_000
TOKENS = 64


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Samples of `TOKENS` token ids each."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(index, index + TOKENS) % 256
        return {"input_ids": ids, "labels": ids}


class Commits(TrainerCallback):
    """One line of the event log for every step."""

    def __init__(self, settings: Settings) -> None:
        self._log = CommitLog(settings.events)
        self._attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        rank, world = args.process_index, args.world_size
        self._log.commit(rank=rank, step=state.global_step - 1, world=world, gen=self._attempt)


def main() -> None:
    settings = Settings.from_environment()
    torch.set_num_threads(1)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=TOKENS, n_embd=128, n_layer=2, n_head=2))
    arguments = TrainingArguments(
        output_dir=settings.checkpoint,
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=8,
        save_steps=settings.checkpoint_every,
        save_total_limit=2,
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=Tokens(), callbacks=[Commits(settings)])
    folder = Path(settings.checkpoint)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(folder)) if folder.exists() else None)


if __name__ == "__main__":
    main()
