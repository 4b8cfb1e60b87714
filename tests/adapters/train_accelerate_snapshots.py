"""A script with Accelerate at level 1: train_accelerate_snapshots.py FOLDER [DIE_AT [SEEDABLE]]"""

import json
import os
import sys
from pathlib import Path

import gate
import torch
import where
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader, Dataset

import holdfast
from holdfast.adapters.accelerate.snapshots import Snapshots

FOLDER = Path(sys.argv[1])
DIE_AT, SEEDABLE = (int(sys.argv[i]) if len(sys.argv) > i else 0 for i in (2, 3))


class Sums(Dataset):
    """Noisy ones: a sample that is read again must be the same."""

    def __init__(self, noise: float) -> None:
        self.noise = noise

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.sin(torch.arange(8) * (index + 1.0))
        return x + self.noise * torch.randn(8), x.sum()


class Seen:
    """The user's own, registered."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def state_dict(self) -> dict:
        return {"losses": self.losses}

    def load_state_dict(self, saved: dict) -> None:
        self.losses = saved["losses"]


def main() -> None:
    set_seed(0)
    accelerator = Accelerator(
        cpu=not where.GPU,
        gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=bool(SEEDABLE)),
    )
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 64), torch.nn.BatchNorm1d(64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.7)
    loader, tests = DataLoader(Sums(0.1), 4, shuffle=True), DataLoader(Sums(0), 8)
    model, optimizer, scheduler, loader, tests = accelerator.prepare(
        model, optimizer, scheduler, loader, tests
    )
    seen = Seen()
    accelerator.register_for_checkpointing(seen)
    snapshots = Snapshots(accelerator, every=1)
    step = begin = snapshots.newest() or 0
    for _ in range(loader.iteration, 4):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = (model(x).squeeze(-1) - y).square().mean()
                where.check(model)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                step += 1
                seen.losses.append(float(loss.detach()))
                snapshots.save(step)
                if DIE_AT:
                    holdfast.checkpoint.flush()  # a snapshot is skipped while others are on their way
                if step == DIE_AT > 0:
                    os._exit(9)
                gate.wait(step, accelerator.process_index)
        model.eval()
        with torch.no_grad():
            seen.losses.append(sum(float((model(x).squeeze(-1) - y).square().sum()) for x, y in tests))
        model.train()
    end = {
        "state": where.digest(accelerator.unwrap_model(model).state_dict().values()),
        "steps": step,
        "losses": seen.losses,
        "resumed": begin,
    }
    end["rate"] = scheduler.get_last_lr()[0]
    (FOLDER / f"end-{accelerator.process_index}.json").write_text(json.dumps(end))
    accelerator.end_training()


main()
