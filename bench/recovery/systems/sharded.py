"""The peers with sharded replicas (HSDP): torchrun with a DCP checkpoint, torchft, NVIDIA's in-process wrapper."""

from __future__ import annotations

from bench.recovery.systems.base import SCRIPTS, Job, System
from bench.recovery.systems.nvrx import UNPACKED, InProcess
from bench.recovery.systems.torchft import TORCHFT_ENVIRONMENT, Timeouts, start_lighthouse
from bench.recovery.systems.torchrun import MANY, OWN_STORE, Torchrun

TORCHFT_DEFAULT = Timeouts(heartbeat_ms=5_000, join_ms=10_000, tick_ms=100, gloo_s=5.0)
"""As without shards: the flags of torchft's README, the gloo time-out of its example."""
TORCHFT_TUNED = Timeouts(heartbeat_ms=1_000, join_ms=1_000, tick_ms=10, gloo_s=5.0)
"""With a hundred million parameters on two cores a collective alone can take a second."""
NVRX_GLOO_S = 10.0
"""That of NVIDIA's CPU example."""
NVRX_TUNED_GLOO_S = 5.0


class TorchrunSharded(Torchrun):
    name = "torchrun-sharded"
    title = "torchrun, DCP checkpoint"
    note = "HSDP by fully_shard; dcp.save to tmpfs, dcp.load; one agent; c10d with a store for every attempt"
    script = "train_hsdp.py"


class TorchftSharded(System):
    """A replica group is two workers under a torchrun of its own, which starts both again when one dies."""

    packages = TORCHFT_ENVIRONMENT.packages
    python = TORCHFT_ENVIRONMENT.python

    def __init__(self, name: str, *, tuned: bool) -> None:
        self.name = name
        self.title = "torchft, " + ("tuned" if tuned else "defaults")
        self._timeouts = TORCHFT_TUNED if tuned else TORCHFT_DEFAULT
        self._transport = "pg" if tuned else "http"
        self.note = (
            f"{self._timeouts}; {self._transport} transport; FSDP2's all-reduce hook; torchrun for each group"
        )

    def trouble(self) -> str | None:
        return TORCHFT_ENVIRONMENT.trouble()

    def start(self, job: Job) -> None:
        lighthouse = start_lighthouse(job, self.python, self._timeouts)
        for group in range(job.settings.replicas):
            flags = [
                f"--nproc-per-node={job.settings.shards}",
                f"--max-restarts={MANY}",
                "--rdzv-backend=c10d",
            ]
            argv = [self.python, "-m", "torch.distributed.run", "--nnodes=1", *flags]
            argv += ["--rdzv-endpoint=127.0.0.1:0", SCRIPTS / "train_torchft_hsdp.py"]
            argv += ["--group", str(group), "--gloo-timeout-s", str(self._timeouts.gloo_s)]
            argv += ["--transport", self._transport]
            job.spawn(f"group-{group}", argv, lighthouse | OWN_STORE)


class InProcessSharded(InProcess):
    script = "train_nvrx_hsdp.py"

    def __init__(self, name: str, *, tuned: bool) -> None:
        super().__init__(name, tuned=tuned)
        gloo_s = NVRX_TUNED_GLOO_S if tuned else NVRX_GLOO_S
        self._arguments = ["--gloo-timeout-s", str(gloo_s), *(["--tuned"] if tuned else [])]
        intervals = ", intervals 0.1 s" if tuned else " as in its example"
        self.note = (
            f"gloo timeout {gloo_s:g} s{intervals}; local checkpoint in tmpfs, not replicated, its holder of tensors "
            f"ours (NVIDIA's insists on CUDA); one reserve process; rank 0 spared; {UNPACKED}"
        )
