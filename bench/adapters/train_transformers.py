"""The model of the other benchmarks, trained by Hugging Face's Trainer: train_transformers.py plain|holdfast

`plain` is for torchrun: it saves the Trainer's own checkpoints, and goes on from the newest one. `holdfast` differs in
the import of Trainer alone.
"""

import sys
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

if sys.argv[1] == "holdfast":
    from holdfast.transformers import Trainer
else:
    from transformers import Trainer
from transformers import TrainerCallback, TrainingArguments, set_seed

from bench.adapters import membership
from bench.recovery import model as job
from bench.recovery.events import CommitLog
from bench.recovery.gate import Gate
from bench.recovery.settings import Settings

WITH_HOLDFAST = sys.argv[1] == "holdfast"
SAMPLES = 1 << 20
"""Of an epoch: more than any run of the benchmark takes."""
FOR_EVER = 1 << 40


class Samples(job.Samples):
    """The samples as the Trainer wants them."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        inputs, labels = super().__getitem__(index)
        return {"inputs": inputs, "labels": labels}


class Classifier(torch.nn.Module):
    """The model as the Trainer wants it: it returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.network = job.build()

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": cross_entropy(self.network(inputs), labels)}


class Recorder(TrainerCallback):
    """Writes every committed step into the event log, and waits at the gate before a step."""

    def __init__(self, settings: Settings) -> None:
        self._gate, self._log = Gate(settings.gate), CommitLog(settings.events)
        self._now = membership.in_a_job if WITH_HOLDFAST else membership.under_torchrun
        self._computed: membership.Membership | None = None
        self._held_s = 0.0

    def on_step_begin(self, args, state, control, **more):
        self._held_s += self._gate.wait(state.global_step, self._now().rank)

    def on_pre_optimizer_step(self, args, state, control, **more):
        self._computed = self._now()

    def on_optimizer_step(self, args, state, control, **more):
        # Under Holdfast before anything else that follows a commit; the Trainer's own loop counts the step after it.
        by = self._computed
        if by is not None:  # a newcomer's first step came with the state, and others computed it
            step = state.global_step - 1 if WITH_HOLDFAST else state.global_step
            self._log.commit(rank=by.rank, step=step, world=by.world, gen=by.gen, held_s=self._held_s)
        self._held_s = 0.0


def newest_checkpoint(folder: Path) -> str | None:
    """The newest one that is whole. The Trainer writes trainer_state.json last, and takes any folder for a checkpoint."""
    whole = folder.glob("checkpoint-*/trainer_state.json")
    return max(
        (str(file.parent) for file in whole), key=lambda name: int(name.rpartition("-")[2]), default=None
    )


def main() -> None:
    settings = Settings.from_environment()
    job.prepare_process()
    set_seed(0)
    arguments = TrainingArguments(
        output_dir=settings.checkpoint,
        per_device_train_batch_size=job.BATCH,
        max_steps=FOR_EVER,
        learning_rate=job.LEARNING_RATE,
        lr_scheduler_type="constant",
        save_strategy="steps" if settings.checkpoint_every else "no",
        save_steps=settings.checkpoint_every or FOR_EVER,
        save_total_limit=1,
        disable_tqdm=True,
        report_to="none",
        use_cpu=True,
    )
    trainer = Trainer(
        model=Classifier(), args=arguments, train_dataset=Samples(SAMPLES), callbacks=[Recorder(settings)]
    )
    trainer.train(resume_from_checkpoint=newest_checkpoint(Path(settings.checkpoint)))


if __name__ == "__main__":
    main()
