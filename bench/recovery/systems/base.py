"""What a system has to say for itself to take part in the comparison."""

from __future__ import annotations

import os
import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.processes import Group
from bench.recovery.environments import ROOT
from bench.recovery.settings import Settings

SCRIPTS = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Job:
    """One job about to be started: where it works, and the group that its processes belong to."""

    settings: Settings
    folder: Path
    """For the logs of its processes."""
    processes: Group

    def spawn(
        self, name: str, argv: Sequence[str | Path], extra: Mapping[str, str] | None = None, without: str = ""
    ) -> None:
        """Start `argv` with the job's environment plus `extra`, its output in `NAME.log`."""
        env = worker_environment(argv[0]) | self.settings.environment() | dict(extra or {})
        env.pop(without, None)
        self.processes.spawn(argv, env, self.folder / f"{name}.log")


def worker_environment(executable: str | Path) -> dict[str, str]:
    """The environment of every worker of every system: one thread each, gloo on the loopback interface."""
    env = {
        key: value for key, value in os.environ.items() if not key.startswith(("HOLDFAST_", "TORCHELASTIC_"))
    }
    env.update(
        PATH=f"{Path(executable).parent}:{env.get('PATH', '')}",
        PYTHONPATH=f"{ROOT}{os.pathsep}{ROOT / 'src'}",  # this checkout, wherever the installed package points
        PYTHONUNBUFFERED="1",
        OMP_NUM_THREADS="1",
        GLOO_SOCKET_IFNAME="lo",
        TORCH_CPP_LOG_LEVEL="ERROR",
    )
    return env


class System(ABC):
    """One row of the table."""

    name: str
    """For the command line and the JSON output."""
    title: str
    """For the table."""
    note: str
    """How it was set up, for the lines below the table."""
    python: Path = Path(sys.executable)
    packages: tuple[str, ...] = ()
    """Distributions whose versions are printed."""
    faults_per_job: int | None = None
    """After how many faults a new job is needed; None if one job takes them all."""
    workers_beside = 0
    """Workers that train along without taking part in the gradient."""
    checkpoints = False
    """Whether it writes checkpoints to a file."""

    def trouble(self) -> str | None:
        """Why it cannot be run here, or None."""
        return None

    @abstractmethod
    def start(self, job: Job) -> None:
        """Start the job. Returns at once or as soon as what the workers need is up."""

    def unprotected(self) -> System | None:
        """The same training without it, whose steps its own are compared with; None: plain DDP."""
        return None

    def may_kill(self, rank: int) -> bool:
        """Whether the worker of this rank may be the victim."""
        return True


def free_port() -> int:
    """A TCP port of the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
