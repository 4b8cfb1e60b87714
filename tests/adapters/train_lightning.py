"""A script with Lightning's Trainer, as people write it: what it ends with goes into a file of each worker.

train_lightning.py FOLDER ACCUMULATE [PATIENCE [BROKEN [half]]]: the update of step BROKEN fails on rank 1; half: fp16
"""

import json
import os
import sys
from pathlib import Path

import between
import half
import torch
import where
from broken import break_update
from torch.utils.data import DataLoader, Dataset

from holdfast.lightning import HoldfastStrategy

import lightning  # isort: skip
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint  # isort: skip
from lightning.pytorch.plugins import MixedPrecision, Precision  # isort: skip

FOLDER, ACCUMULATE = Path(sys.argv[1]), int(sys.argv[2])
PATIENCE, BROKEN = (int(sys.argv[i]) if len(sys.argv) > i else 0 for i in (3, 4))
PRECISION = MixedPrecision("16-mixed", where.TYPE, half.scaler()) if "half" in sys.argv else Precision()


class Sums(Dataset):
    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.sin(torch.arange(8) * (index + 1.0))
        return x, x.sum()


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
        self.register_buffer("seen", torch.zeros(1, dtype=torch.int64))
        self.ended: list[int] = []
        self.batches: list[tuple[int, int]] = []
        self.validated: list[tuple[int, float]] = []

    def _loss(self, batch):
        x, y = batch
        self.seen += len(x)  # as modules count the loads of their experts; a validation counts, too
        return (self.net(x).squeeze(-1) - y).square().mean()

    def training_step(self, batch, batch_idx):
        where.check(self)
        loss = self._loss(batch)
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self._loss(batch))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.batches.append((self.trainer.current_epoch, batch_idx))
        if (batch_idx + 1) % ACCUMULATE == 0:
            self.ended.append(self.trainer.global_step)
            between.wait(self.trainer.global_step)

    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking:
            self.validated.append(
                (self.trainer.global_step, float(self.trainer.callback_metrics["val_loss"]))
            )

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        break_update(optimizer, BROKEN, lambda: self.trainer.global_rank == 1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main() -> None:
    lightning.seed_everything(0)
    module, skipped = Module(), []
    callbacks = [ModelCheckpoint(FOLDER / "best", monitor="val_loss")]
    if PATIENCE:
        callbacks.append(EarlyStopping("val_loss", patience=PATIENCE, min_delta=2.0))
    trainer = lightning.Trainer(
        strategy=HoldfastStrategy(
            reduction="exact",
            buffers={"model.seen": "sum"},
            on_commit=lambda step: skipped.append(step.index) if step.skipped else None,
        ),
        plugins=[PRECISION],
        max_epochs=8 if PATIENCE else 3,
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=1.0,
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        default_root_dir=FOLDER,
    )
    trainer.fit(module, DataLoader(Sums(), 4, shuffle=True), DataLoader(Sums(), 8))
    end = {
        "parameters": where.digest(module.parameters()),
        "seen": int(module.seen),
        "steps": trainer.global_step,
        "epochs": trainer.current_epoch,
        "rate": trainer.optimizers[0].param_groups[0]["lr"],
        "ended": module.ended,
        "batches": module.batches,
        "validated": module.validated,
    }
    if "half" in sys.argv:
        end |= {"scaler": PRECISION.scaler.state_dict(), "skipped": skipped}
    (FOLDER / f"end-{os.getpid()}.json").write_text(json.dumps(end))


if __name__ == "__main__":
    main()
