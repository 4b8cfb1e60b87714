"""A script with Lightning's Trainer at level 1: train_lightning_snapshots.py FOLDER [DIE_AT]"""

import json
import os
import sys
from pathlib import Path

import gate
import lightning
import torch
import where
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader, Dataset

import holdfast
from holdfast.adapters.lightning.snapshots import Snapshots

FOLDER = Path(sys.argv[1])
DIE_AT = int(sys.argv[2]) if len(sys.argv) > 2 else 0
RANKS = int(os.environ.get("WORLD_SIZE", "1"))


class Sums(Dataset):
    """Noisy ones: a sample that is read again must be the same."""

    def __init__(self, noise: float) -> None:
        self.noise = noise

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.sin(torch.arange(8) * (index + 1.0))
        return x + self.noise * torch.randn(8), x.sum()


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"where": FOLDER})  # no snapshot could have it
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 64), torch.nn.BatchNorm1d(64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1)
        )

    def _loss(self, batch):
        x, y = batch
        return (self.net(x).squeeze(-1) - y).square().mean()

    def on_train_epoch_start(self):
        torch.rand(1)

    def training_step(self, batch, batch_idx):
        return self._loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self._loss(batch), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.7, patience=0, threshold=0.9
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


class Dies(lightning.Callback):
    def on_train_batch_start(self, trainer, *more):
        if DIE_AT:
            holdfast.checkpoint.flush()  # a snapshot is skipped while others are on their way
        if trainer.global_step == DIE_AT > 0:
            os._exit(9)
        gate.wait(trainer.global_step, trainer.global_rank)

    def on_train_start(self, trainer, *more):
        self.began = trainer.global_step


def main() -> None:
    lightning.seed_everything(0)
    module = Module()
    dies = Dies()
    trainer = lightning.Trainer(
        accelerator=where.TYPE,
        strategy="ddp" if RANKS > 1 else "auto",
        num_nodes=RANKS,
        devices=1,
        max_epochs=4,
        accumulate_grad_batches=2,
        val_check_interval=0.5,
        callbacks=[
            Snapshots(every=1),
            ModelCheckpoint(FOLDER / "best", monitor="val_loss"),
            EarlyStopping("val_loss", patience=100),
            dies,
        ],
        logger=False,
        enable_progress_bar=False,
        default_root_dir=FOLDER,
    )
    trainer.fit(module, DataLoader(Sums(0.1), 4, shuffle=True), DataLoader(Sums(0), 8))
    end = {
        "state": where.digest(module.state_dict().values()),
        "steps": trainer.global_step,
        "epochs": trainer.current_epoch,
        "rate": trainer.optimizers[0].param_groups[0]["lr"],
        "validated": float(trainer.callback_metrics["val_loss"]),
        "waited": trainer.early_stopping_callback.wait_count,
        "best": float(trainer.checkpoint_callback.best_model_score),
        "began": dies.began,
        "batches": trainer.fit_loop.epoch_loop._batches_that_stepped,
    }
    (FOLDER / f"end-{trainer.global_rank}.json").write_text(json.dumps(end))


main()
