"""A script whose module and callbacks keep state of their own, with Lightning's default logger and checkpoints.

train_lightning_state.py FOLDER: what it ends with goes into a file of each worker.
"""

import json
import os
import sys
from pathlib import Path

import torch
import where
from torch.utils.data import DataLoader, TensorDataset

from holdfast.lightning import HoldfastStrategy

import lightning  # isort: skip
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, LearningRateMonitor  # isort: skip
from lightning.pytorch.loggers import CSVLogger  # isort: skip

FOLDER = Path(sys.argv[1])


class Module(lightning.LightningModule):
    """With a count and an average that only `on_save_checkpoint` knows of, and a schedule by the validation."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
        self.ended = 0
        self.average = torch.zeros(8, 4)

    def loss(self, batch):
        return (self.net(batch[0]).squeeze(-1) - batch[1]).square().mean()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.ended += 1
        self.average = self.average.lerp(self.net[0].weight.detach(), 0.2)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["mine"] = {"ended": self.ended, "average": self.average}

    def on_load_checkpoint(self, checkpoint):
        self.ended, self.average = checkpoint["mine"]["ended"], checkpoint["mine"]["average"]

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 0.05)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.3)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


class Counting(Callback):
    """Keeps how often its hooks came."""

    def __init__(self) -> None:
        self.counts = {"start": 0, "end": 0, "zero": 0, "validated": 0, "epochs": 0}

    def on_train_batch_start(self, *args):
        self.counts["start"] += 1

    def on_train_batch_end(self, *args):
        self.counts["end"] += 1

    def on_before_zero_grad(self, *args):
        self.counts["zero"] += 1

    def on_validation_end(self, *args):
        self.counts["validated"] += 1

    def on_train_epoch_end(self, *args):
        self.counts["epochs"] += 1

    def state_dict(self):
        return dict(self.counts)

    def load_state_dict(self, state):
        self.counts = dict(state)


def main() -> None:
    lightning.seed_everything(0)
    module, counting = Module(), Counting()
    x = torch.sin(torch.arange(104.0).reshape(26, 4))
    trainer = lightning.Trainer(
        strategy=HoldfastStrategy(reduction="exact"),
        # The default, in a folder that does not depend on whether TensorBoard is installed.
        logger=CSVLogger(FOLDER),
        callbacks=[counting, EMAWeightAveraging(decay=0.5), LearningRateMonitor()],
        max_epochs=6,
        accumulate_grad_batches=3,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        enable_progress_bar=False,
    )
    # Four batches in an epoch on each of two workers: an update of three, and one of the last.
    trainer.fit(
        module,
        DataLoader(TensorDataset(x, x.sum(1)), 4, shuffle=True),
        DataLoader(TensorDataset(x, x.sum(1)), 13),
    )
    end = {
        "parameters": where.digest(module.parameters()),
        "average": where.digest([module.average]),
        "ended": module.ended,
        "counts": counting.counts,
        "steps": trainer.global_step,
        "batches": trainer.fit_loop.total_batch_idx + 1,
        "rate": trainer.optimizers[0].param_groups[0]["lr"],
        "best": Path(trainer.checkpoint_callback.best_model_path).name,
        "val_loss": float(trainer.callback_metrics["val_loss"]),
    }
    (FOLDER / f"end-{os.getpid()}.json").write_text(json.dumps(end))


if __name__ == "__main__":
    main()
