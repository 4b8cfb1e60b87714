"""torchft: a replica group per process, its own lighthouse, a supervisor that starts a dead group again at once."""

from __future__ import annotations

import contextlib
import socket
import sys
import time

from bench.recovery.environments import TORCHFT_ENVIRONMENT
from bench.recovery.systems.base import SCRIPTS, Job, System, free_port

DEFAULT = {"join_timeout_ms": 10_000, "quorum_tick_ms": 100, "heartbeat_timeout_ms": 5_000}
"""The flags in torchft's README; the heartbeat timeout is its default."""
TUNED = {"join_timeout_ms": 300, "quorum_tick_ms": 10, "heartbeat_timeout_ms": 300}
"""The shortest that never declared a living group dead here, also with twice as many busy processes as cores.
200 ms did, even with heartbeats sent twice as often as by default (every 100 ms)."""


class Torchft(System):
    """`spare`: one group more than take part in the gradient (FIXED_WITH_SPARES), which trains along."""

    packages = TORCHFT_ENVIRONMENT.packages
    python = TORCHFT_ENVIRONMENT.python

    def __init__(self, name: str, *, tuned: bool, spare: bool = False) -> None:
        self.name = name
        self.title = "torchft, " + ("tuned + spare" if spare else "tuned" if tuned else "defaults")
        self._flags = TUNED if tuned else DEFAULT
        self.workers_beside = int(spare)
        flags = ", ".join(f"{key[:-3]} {value} ms" for key, value in self._flags.items())
        self.note = flags + (", one spare group that trains along" if spare else "") + "; restarted at once"

    def trouble(self) -> str | None:
        return TORCHFT_ENVIRONMENT.trouble()

    def start(self, job: Job) -> None:
        port = free_port()
        flags = [word for key, value in self._flags.items() for word in (f"--{key}", str(value))]
        job.spawn(
            "lighthouse",
            [
                *(self.python.parent / "torchft_lighthouse", "--bind", f"127.0.0.1:{port}"),
                *("--min_replicas", "1", *flags),
            ],
        )
        _wait_for_port(port)
        for group in range(job.settings.replicas + self.workers_beside):
            script = [self.python, SCRIPTS / "train_torchft.py", "--group", str(group)]
            if self.workers_beside:
                script.append("--spare")
            supervised = [sys.executable, "-m", "bench.recovery.supervise", *map(str, script)]
            job.spawn(f"group-{group}", supervised, {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}"})


def _wait_for_port(port: int, limit_s: float = 20.0) -> None:
    """Wait until the lighthouse listens. Raises TimeoutError."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.2):
            return
        time.sleep(0.05)
    raise TimeoutError("the lighthouse does not listen")
