"""The model of the other benchmarks, trained by Lightning's Trainer: train_lightning.py plain|holdfast

`plain` is for torchrun: it saves Lightning's own checkpoints, and goes on from the newest one. `holdfast` differs in the
strategy and one import.
"""

import sys
from pathlib import Path

from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

if sys.argv[1] == "holdfast":
    import holdfast.lightning  # noqa: F401 - it makes strategy="holdfast" known
import lightning
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from bench.adapters import membership
from bench.recovery import model as job
from bench.recovery.events import CommitLog
from bench.recovery.gate import Gate
from bench.recovery.settings import Settings

WITH_HOLDFAST = sys.argv[1] == "holdfast"
SAMPLES = 1 << 20
"""Of an epoch: more than any run of the benchmark takes."""
FOR_EVER = 1 << 40


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = job.build()

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        return cross_entropy(self.network(inputs), labels)

    def configure_optimizers(self):
        return job.build_optimizer(self.parameters())


class Recorder(Callback):
    """Writes every committed step into the event log, and waits at the gate before a step."""

    def __init__(self, settings: Settings) -> None:
        self._gate, self._log = Gate(settings.gate), CommitLog(settings.events)
        self._now = membership.in_a_job if WITH_HOLDFAST else membership.under_torchrun
        self._computed: membership.Membership | None = None
        self._held_s = 0.0

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self._held_s += self._gate.wait(trainer.global_step, self._now().rank)

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self._computed = self._now()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        by = self._computed
        if by is not None:  # a newcomer's first step came with the state, and others computed it
            step = trainer.global_step - 1
            self._log.commit(rank=by.rank, step=step, world=by.world, gen=by.gen, held_s=self._held_s)
        self._held_s = 0.0


def newest_checkpoint(folder: Path) -> str | None:
    """Lightning puts a checkpoint in its place when it is whole."""
    return max(map(str, folder.glob("*.ckpt")), key=lambda name: Path(name).stat().st_mtime, default=None)


def main() -> None:
    settings = Settings.from_environment()
    job.prepare_process()
    lightning.seed_everything(0)
    folder, callbacks = Path(settings.checkpoint), [Recorder(settings)]
    if settings.checkpoint_every:
        callbacks.append(ModelCheckpoint(folder, every_n_train_steps=settings.checkpoint_every, save_top_k=1))
    trainer = lightning.Trainer(
        strategy="holdfast" if WITH_HOLDFAST else "ddp",
        devices=1 if WITH_HOLDFAST else settings.workers,
        accelerator="cpu",
        max_steps=FOR_EVER,
        callbacks=callbacks,
        enable_checkpointing=bool(settings.checkpoint_every),
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    data = DataLoader(job.Samples(SAMPLES), job.BATCH, shuffle=True)
    trainer.fit(Classifier(), data, ckpt_path=newest_checkpoint(folder))


if __name__ == "__main__":
    main()
