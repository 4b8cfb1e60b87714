"""A script with Hugging Face's Trainer at level 1: train_snapshots.py FOLDER [DIE_AT]"""

import json
import os
import sys
from pathlib import Path

import gate
import torch
import transformers
import where
from torch.utils.data import Dataset

import holdfast
from holdfast.adapters.huggingface.snapshots import Snapshots

FOLDER = Path(sys.argv[1])
DIE_AT = int(sys.argv[2]) if len(sys.argv) > 2 else 0


class Sums(Dataset):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = torch.sin(torch.arange(8) * (index + 1.0))
        return {"x": x, "labels": x.sum()}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 64), torch.nn.BatchNorm1d(64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1)
        )

    def forward(self, x, labels):
        out = self.net(x).squeeze(-1)
        return {"loss": (out - labels).square().mean(), "logits": out}


class Dies(transformers.TrainerCallback):
    def on_step_begin(self, args, state, control, **more):
        gate.wait(state.global_step, args.process_index)

    def on_step_end(self, args, state, control, **more):
        if state.global_step == DIE_AT > 0:
            holdfast.checkpoint.flush()
            os._exit(9)


def main() -> None:
    transformers.set_seed(0)
    trainer = transformers.Trainer(
        model=Net(),
        args=transformers.TrainingArguments(
            output_dir=str(FOLDER),
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            num_train_epochs=3,
            learning_rate=1e-2,
            logging_steps=2,
            eval_strategy="epoch",
            save_strategy="no",
            report_to="none",
            use_cpu=not where.GPU,
            disable_tqdm=True,
        ),
        train_dataset=Sums(),
        eval_dataset=Sums(),
        callbacks=[Dies()],
    )
    newest = Snapshots(trainer, every=2).newest()
    trainer.train(resume_from_checkpoint=newest)
    where.check(trainer.model)
    logged = [logs["step"] for logs in trainer.state.log_history if "loss" in logs]
    end = {
        "state": where.digest(trainer.model.state_dict().values()),
        "steps": trainer.state.global_step,
        "logged": logged,
    }
    end["resumed"] = newest is not None
    (FOLDER / f"end-{trainer.args.process_index}.json").write_text(json.dumps(end))


main()
