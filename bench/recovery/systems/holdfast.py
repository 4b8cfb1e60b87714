"""Holdfast: level 2 (the loop written with hf.Run) and level 0 (torchrun's script under `holdfast run`)."""

from __future__ import annotations

import sys
from pathlib import Path

from bench.recovery.systems.base import SCRIPTS, Job, System
from bench.recovery.systems.torchrun import MANY

_COMMAND = Path(sys.executable).with_name("holdfast")


class _Holdfast(System):
    packages = ("holdfast",)

    def trouble(self) -> str | None:
        return None if _COMMAND.exists() else f"{_COMMAND} is missing: run `make setup`"

    def _run(self, job: Job, *arguments: str | Path) -> None:
        argv = [
            # While plain DDP has its turn in the comparison of steps, this job stands still on purpose.
            *(_COMMAND, "run", "--job", "bench", "--no-ui", "--stall-factor", "1000"),
            *("--report", job.folder / "report.json", *arguments),
        ]
        # A home of its own: a job of the same name would go on from where the last one was.
        job.spawn("holdfast", argv, {"HOLDFAST_HOME": str(job.folder)})


class HoldfastWritten(_Holdfast):
    """Level 2: one node per replica and a spare node."""

    name = "holdfast-2"
    title = "Holdfast in process (level 2)"
    note = "a node per replica, one spare node"
    script: str | Path = "train_holdfast.py"
    """A name in the folder of the scripts, or a path."""
    arguments: tuple[str, ...] = ()

    def start(self, job: Job) -> None:
        nodes = job.settings.replicas
        self._run(
            job,
            *("--nnodes", f"{max(1, nodes - 1)}:{nodes}", "--nproc-per-node", "1", "--spares", "1"),
            SCRIPTS / self.script,
            *self.arguments,
        )


class HoldfastSharded(_Holdfast):
    """Level 2 with sharded replicas: a node for every worker, and a spare node."""

    name = "holdfast-sharded"
    title = "Holdfast"
    note = "FSDP2 in a replica, run.replicate across; a node per worker, one spare node"

    def start(self, job: Job) -> None:
        shards, nodes = job.settings.shards, job.settings.workers
        self._run(
            job,
            *("--nnodes", f"{shards}:{nodes}", "--nproc-per-node", "1", "--spares", "1"),
            SCRIPTS / "train_holdfast_sharded.py",
        )


class HoldfastLaunched(_Holdfast):
    """Level 0: the very script, flags and checkpoint of the torchrun row."""

    script = "train_ddp.py"

    name = "holdfast-0"
    title = "Holdfast restart (level 0)"
    note = "torchrun's script and flags; checkpoint in tmpfs"
    checkpoints = True

    def start(self, job: Job) -> None:
        replicas = job.settings.replicas
        self._run(
            job,
            *("--nnodes", "1", "--nproc-per-node", str(replicas), "--max-restarts", MANY),
            SCRIPTS / self.script,
        )


class HoldfastTrainer(HoldfastLaunched):
    """Level 0 with Hugging Face's Trainer, whose imports are most of a start."""

    name = "holdfast-trainer"
    script = "train_trainer.py"
