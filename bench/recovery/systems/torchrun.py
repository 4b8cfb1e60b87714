"""torchrun with --max-restarts: on any death all workers are stopped, started again, and load the checkpoint."""

from __future__ import annotations

from pathlib import Path

from bench.recovery.systems.base import SCRIPTS, Job, System, free_port

MANY = "1000"
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Otherwise ranks that torchrun restarts read the dead addresses of the previous attempt from the shared store."""


def launcher_flags(workers: int, port: int) -> list[str]:
    """One node with all workers: the quickest way for torchrun and its relatives."""
    return [
        "--nnodes=1",
        f"--nproc-per-node={workers}",
        f"--max-restarts={MANY}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}",
    ]


class Torchrun(System):
    name = "torchrun"
    title = "torchrun --max-restarts"
    note = (
        "c10d with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 (without it torch 2.13 never recovers on gloo); "
        "one agent; checkpoint in tmpfs"
    )
    checkpoints = True
    script: str | Path = "train_ddp.py"
    """A name in the folder of the scripts, or a path."""
    arguments: tuple[str, ...] = ()

    def start(self, job: Job) -> None:
        flags = launcher_flags(job.settings.workers, free_port())
        argv = [self.python, "-m", "torch.distributed.run", *flags, SCRIPTS / self.script, *self.arguments]
        job.spawn("torchrun", argv, OWN_STORE)


class Plain(System):
    """DistributedDataParallel without anything around it: what the others' steps are compared with."""

    name = "plain"
    title = "plain DDP"
    note = ""

    def __init__(self, python: Path) -> None:
        self.python = python

    def start(self, job: Job) -> None:
        port, replicas = free_port(), job.settings.replicas
        for rank in range(replicas):
            extra = {
                "RANK": str(rank),
                "WORLD_SIZE": str(replicas),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            job.spawn(f"plain-{rank}", [self.python, SCRIPTS / "train_ddp.py"], extra)


class TorchrunTrainer(Torchrun):
    name = "torchrun-trainer"
    script = "train_trainer.py"
