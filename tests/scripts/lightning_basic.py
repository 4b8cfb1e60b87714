"""Lightning's basic kind of script: a module, a Trainer with strategy="ddp", checkpoints, a test after fit."""

import hashlib
import os
import sys

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset


class Encoder(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = torch.nn.Sequential(torch.nn.Linear(12, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3))
        self.decoder = torch.nn.Sequential(torch.nn.Linear(3, 6), torch.nn.ReLU(), torch.nn.Linear(6, 12))

    def training_step(self, batch, batch_idx):
        (x,) = batch
        loss = torch.nn.functional.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("train_loss", loss)
        print(f"[{self.global_rank}] step {self.global_step} loss {loss.item():.9f}", flush=True)
        return loss

    def validation_step(self, batch, batch_idx):
        (x,) = batch
        self.log("val_loss", torch.nn.functional.mse_loss(self.decoder(self.encoder(x)), x), sync_dist=True)

    def on_validation_epoch_end(self):
        print(f"[{self.global_rank}] val {self.trainer.callback_metrics['val_loss'].item():.9f}", flush=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def main(folder):
    L.seed_everything(11)
    data = TensorDataset(torch.randn(64, 12))
    held_out = TensorDataset(torch.randn(16, 12))
    model = Encoder()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy="ddp",
        max_epochs=2,
        logger=CSVLogger(folder),
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=2,
    )
    trainer.fit(model, DataLoader(data, batch_size=8, shuffle=True), DataLoader(held_out, batch_size=8))
    state = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    print(f"[{trainer.global_rank}] {trainer.global_step} {hashlib.sha256(state).hexdigest()}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
