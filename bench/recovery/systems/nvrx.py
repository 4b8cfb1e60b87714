"""NVIDIA's nvidia-resiliency-ext: the in-process wrapper, and ft_launcher."""

from __future__ import annotations

from bench.recovery.environments import NVRX_ENVIRONMENT
from bench.recovery.systems.base import SCRIPTS, Job, System, free_port
from bench.recovery.systems.torchrun import launcher_flags

UNPACKED = "0.6.0 unpacked from its wheel where glibc is older than 2.39"


class InProcess(System):
    """Survivors stay alive and call the training function again; one process in reserve takes the empty rank."""

    packages = NVRX_ENVIRONMENT.packages
    python = NVRX_ENVIRONMENT.python
    # Nobody can join a running job, so the reserve is used up by the first fault.
    faults_per_job = 1
    checkpoints = True
    script = "train_nvrx.py"

    def __init__(self, name: str, *, tuned: bool) -> None:
        self.name = name
        self.title = "NVRx in-process, " + ("tuned" if tuned else "defaults")
        self._arguments = ["--tuned", "--gloo-timeout-s", "2"] if tuned else ["--gloo-timeout-s", "10"]
        gloo = "gloo timeout 2 s, intervals 0.1 s" if tuned else "gloo timeout 10 s as in its example"
        self.note = f"{gloo}; one reserve process; rank 0 spared (its death ends the job); {UNPACKED}"

    def trouble(self) -> str | None:
        return NVRX_ENVIRONMENT.trouble()

    def start(self, job: Job) -> None:
        processes = job.settings.workers + 1
        ports = ["--store-port", str(free_port()), "--wrapper-port", str(free_port())]
        master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(processes)}
        for rank in range(processes):
            argv = [self.python, SCRIPTS / self.script, *ports, *self._arguments]
            # With LOCAL_RANK set, the wrapper insists on health checks of GPUs.
            job.spawn(f"rank-{rank}", argv, master | {"RANK": str(rank)}, without="LOCAL_RANK")

    def may_kill(self, rank: int) -> bool:
        return rank != 0


class FtLauncher(System):
    """torchrun's relative: stops and starts all workers, on a port of its own in each cycle."""

    name = "nvrx-ft-launcher"
    title = "NVRx ft_launcher"
    note = f"one agent, no health checks; checkpoint in tmpfs; {UNPACKED}"
    packages = NVRX_ENVIRONMENT.packages
    python = NVRX_ENVIRONMENT.python
    checkpoints = True

    def trouble(self) -> str | None:
        return NVRX_ENVIRONMENT.trouble()

    def start(self, job: Job) -> None:
        module = "nvidia_resiliency_ext.fault_tolerance.launcher"
        flags = launcher_flags(job.settings.workers, free_port())
        job.spawn("ft_launcher", [self.python, "-m", module, *flags, SCRIPTS / "train_ddp.py"])
