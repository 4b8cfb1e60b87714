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
CROWD = 4
"""Up to so many replicas the shorter time-outs hold on this project's machine of two cores."""


TUNED_GLOO_TIMEOUT_S = 2.0
"""With many replicas not every survivor sees the broken connection: some wait for gloo's time-out."""


def tuned_flags(replicas: int) -> dict[str, int]:
    """The shortest time-outs that did not declare living groups dead.

    With 3 replicas 300 ms held, with twice as many busy processes as cores too. 200 ms did not, even with
    heartbeats twice as often as torchft sends them (every 100 ms). With 8 replicas on two cores the job never
    settles at 300 ms.
    """
    timeout_ms = 300 if replicas <= CROWD else 1_000
    return {"join_timeout_ms": timeout_ms, "quorum_tick_ms": 10, "heartbeat_timeout_ms": timeout_ms}


class Torchft(System):
    """`spare`: one group more than take part in the gradient (FIXED_WITH_SPARES), which trains along."""

    packages = TORCHFT_ENVIRONMENT.packages
    python = TORCHFT_ENVIRONMENT.python

    def __init__(self, name: str, *, tuned: bool, spare: bool = False) -> None:
        self.name = name
        self.title = "torchft, " + ("tuned + spare" if spare else "tuned" if tuned else "defaults")
        self._tuned = tuned
        self.workers_beside = int(spare)
        few, many = tuned_flags(CROWD)["join_timeout_ms"], tuned_flags(CROWD + 1)["join_timeout_ms"]
        self.note = (
            f"heartbeat and join time-outs {few} ms ({many} ms with more than {CROWD} replicas), "
            f"gloo time-out {TUNED_GLOO_TIMEOUT_S:.0f} s"
            if tuned
            else "the flags of its README: heartbeat time-out 5 s, join time-out 10 s, gloo time-out 5 s"
        )
        self.note += ("; one spare group that trains along" if spare else "") + "; restarted at once"

    def trouble(self) -> str | None:
        return TORCHFT_ENVIRONMENT.trouble()

    def start(self, job: Job) -> None:
        port = free_port()
        chosen = tuned_flags(job.settings.replicas) if self._tuned else DEFAULT
        flags = [word for key, value in chosen.items() for word in (f"--{key}", str(value))]
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
            if self._tuned:
                script += ["--gloo-timeout-s", str(TUNED_GLOO_TIMEOUT_S)]
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
