"""torchft: a replica group per process, its own lighthouse, a supervisor that starts a dead group again at once."""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from bench.recovery.environments import TORCHFT_ENVIRONMENT
from bench.recovery.systems.base import SCRIPTS, Job, System, free_port


@dataclass(frozen=True)
class Timeouts:
    """What decides how long torchft waits after a death."""

    heartbeat_ms: int
    join_ms: int
    tick_ms: int
    gloo_s: float

    def __str__(self) -> str:
        return f"heartbeat time-out {self.heartbeat_ms / 1e3:g} s, join {self.join_ms / 1e3:g} s, gloo {self.gloo_s:g} s"


DEFAULT = Timeouts(heartbeat_ms=5_000, join_ms=10_000, tick_ms=100, gloo_s=5.0)
"""The lighthouse flags of torchft's README, the default heartbeat time-out, the gloo time-out of its example."""
TUNED = Timeouts(heartbeat_ms=300, join_ms=300, tick_ms=10, gloo_s=1.0)
"""The shortest that declared no living group dead with 3 replicas on two cores, with as many other busy processes
again. A heartbeat time-out of 200 ms did, even with heartbeats sent twice as often as by default (100 ms)."""
TUNED_CROWD = Timeouts(heartbeat_ms=1_000, join_ms=1_000, tick_ms=10, gloo_s=2.0)
"""With 8 replicas on two cores the job never settles at 300 ms."""
CROWD = 5
"""From so many replicas on the second set is used."""


class Torchft(System):
    """`spare`: one group more than take part in the gradient (FIXED_WITH_SPARES), which trains along."""

    packages = TORCHFT_ENVIRONMENT.packages
    python = TORCHFT_ENVIRONMENT.python

    def __init__(self, name: str, *, tuned: bool, spare: bool = False) -> None:
        self.name = name
        self.title = "torchft, " + ("tuned + spare" if spare else "tuned" if tuned else "defaults")
        self.workers_beside = int(spare)
        self._tuned = tuned
        self.note = (
            f"{TUNED} ({CROWD} replicas or more: {TUNED_CROWD})" if tuned else f"{DEFAULT} (its README)"
        )
        self.note += ("; one spare group that trains along" if spare else "") + "; restarted at once"

    def trouble(self) -> str | None:
        return TORCHFT_ENVIRONMENT.trouble()

    def start(self, job: Job) -> None:
        timeouts = self._timeouts(job.settings.replicas)
        lighthouse = start_lighthouse(job, self.python, timeouts)
        for group in range(job.settings.replicas + self.workers_beside):
            script = [self.python, SCRIPTS / "train_torchft.py", "--group", group]
            script += ["--gloo-timeout-s", timeouts.gloo_s]
            if self.workers_beside:
                script.append("--spare")
            supervised = [sys.executable, "-m", "bench.recovery.supervise", *map(str, script)]
            job.spawn(f"group-{group}", supervised, lighthouse)

    def _timeouts(self, replicas: int) -> Timeouts:
        if not self._tuned:
            return DEFAULT
        return TUNED if replicas < CROWD else TUNED_CROWD


def start_lighthouse(job: Job, python: Path, timeouts: Timeouts) -> dict[str, str]:
    """Start torchft's lighthouse and wait until it listens. Returns what tells its address to the groups."""
    port = free_port()
    job.spawn(
        "lighthouse",
        [
            *(python.parent / "torchft_lighthouse", "--bind", f"127.0.0.1:{port}"),
            *("--min_replicas", "1", "--join_timeout_ms", str(timeouts.join_ms)),
            *("--quorum_tick_ms", str(timeouts.tick_ms)),
            *("--heartbeat_timeout_ms", str(timeouts.heartbeat_ms)),
        ],
    )
    _wait_for_port(port)
    return {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}"}


def _wait_for_port(port: int, limit_s: float = 20.0) -> None:
    """Wait until the lighthouse listens. Raises TimeoutError."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.2):
            return
        time.sleep(0.05)
    raise TimeoutError("the lighthouse does not listen")
