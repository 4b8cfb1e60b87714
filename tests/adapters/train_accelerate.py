"""A script with an Accelerator at level 2: what it ends with goes into a file of each worker.

train_accelerate.py FOLDER ACCUMULATE [half]: with fp16
"""

import json
import os
import sys
from pathlib import Path

import between
import half
import torch
import where
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

from holdfast.accelerate import Accelerator

folder, accumulate, until = Path(sys.argv[1]), int(sys.argv[2]), 18


def main() -> None:
    set_seed(0)
    precision = "fp16" if "half" in sys.argv else "bf16"
    accelerator = Accelerator(gradient_accumulation_steps=accumulate, mixed_precision=precision)
    if precision == "fp16":
        half.set_up(accelerator)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, until)
    samples = torch.randn(96, 8)
    loader = DataLoader(samples, batch_size=4, shuffle=True)
    held_out = DataLoader(torch.randn(10, 8), batch_size=4)
    model, optimizer, loader, held_out, scheduler = accelerator.prepare(
        model, optimizer, loader, held_out, scheduler
    )
    losses, evaluated, committed, skipped = {}, {}, [], []
    accelerator.run.on_commit(lambda step: committed.append(step.index))
    for step in accelerator.steps(loader, until=until, reduction="exact"):
        with step:
            for batch in step:
                loss = (model(batch).sum(1) - batch.sum(1)).square().mean()
                where.check(model)
                accelerator.backward(loss)
            step.apply(optimizer, max_grad_norm=0.5, scheduler=scheduler)
        if step.committed:
            losses[step.index] = step.loss
            if accelerator.optimizer_step_was_skipped:
                skipped.append(step.index)
            if step.index % 6 == 5:
                with accelerator.run.relaxed_watchdog(), torch.no_grad():
                    model.eval()
                    evaluated[step.index] = float(sum(model(batch).sum() for batch in held_out))
                    model.train()
        between.wait(step.index + 1)
    end = {
        "state": where.digest(accelerator.unwrap_model(model).state_dict().values()),
        "rate": scheduler.get_last_lr()[0],
        "losses": losses,
        "evaluated": evaluated,
        "committed": committed,
        "main": accelerator.is_main_process,
    }
    if accelerator.scaler is not None:
        end |= {"scaler": accelerator.scaler.state_dict(), "skipped": skipped}
    folder.mkdir(exist_ok=True)
    (folder / f"end-{os.getpid()}.json").write_text(json.dumps(end))


if __name__ == "__main__":
    main()
