"""The floor: what a recovery cannot cost less than with gloo on this machine.

Measured, in the same run as everything else: survivors notice a SIGKILL inside an all-reduce of all gradients, tear
the group down, build one without the dead rank, and finish a first all-reduce. To that come the bytes of the
state at the speed of one loopback connection, and one plain step.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.recovery.analyse import Spread, spread
from bench.recovery.environments import ROOT
from bench.recovery.harness import POLL_S, Bench, Failed, Plan
from bench.recovery.systems.base import SCRIPTS, free_port, worker_environment

PARAMETERS = 9_837_568
"""Of the model; parameters and AdamW's two moments are the state, in float32."""
STATE_BYTES = 3 * 4 * PARAMETERS


@dataclass(frozen=True, kw_only=True)
class Floor:
    """Seconds, with the spread of the measured parts."""

    noticed_s: Spread
    """From the SIGKILL until the last survivor's all-reduce has raised."""
    going_s: Spread
    """From the SIGKILL until the last survivor has finished an all-reduce in the new group."""
    transfer_s: float
    """The state over one loopback connection."""
    state_bytes: int
    step_s: float
    """One step of plain DDP."""

    @property
    def stall_s(self) -> float:
        """Detection, abort, a new group, and one step."""
        return self.going_s.median + self.step_s

    @property
    def full_s(self) -> float:
        """The same, and the state sent to the replacement."""
        return self.stall_s + self.transfer_s


def measure(plan: Plan, step_s: float, bench: Bench) -> Floor:
    """Measure the floor with `plan.faults` kills. Raises Failed."""
    choose = random.Random(plan.seed)
    times = [_one_kill(plan, choose, bench) for _ in range(plan.faults)]
    noticed, going = (spread(column) for column in zip(*times, strict=True))
    assert noticed is not None
    assert going is not None
    state = STATE_BYTES + int(plan.state_mb * 1e6)
    return Floor(
        noticed_s=noticed,
        going_s=going,
        transfer_s=state / loopback_bytes_per_s(),
        state_bytes=state,
        step_s=step_s,
    )


def _one_kill(plan: Plan, choose: random.Random, bench: Bench) -> tuple[float, float]:
    """Seconds from one SIGKILL to when the last survivor noticed, and to when the last one was going again."""
    port, victim = free_port(), choose.randrange(plan.replicas)
    folder = ROOT / "out" / "recovery" / "floor"
    folder.mkdir(parents=True, exist_ok=True)
    worker, env = [sys.executable, SCRIPTS / "floor_worker.py"], worker_environment(sys.executable)
    with tempfile.NamedTemporaryFile() as events, bench.children.group() as processes:
        processes.spawn([*worker, "store", str(port)], env, folder / "store.log")
        pids = [
            processes.spawn(
                [*worker, "rank", str(rank), str(plan.replicas), str(port), str(victim), events.name],
                env,
                folder / f"rank-{rank}.log",
            ).pid
            for rank in range(plan.replicas)
        ]

        def last(kind: str, count: int, ranks: int) -> float | None:
            return last_of(_lines(Path(events.name)), kind, count, ranks)

        def wait(kind: str, count: int, ranks: int) -> float:
            deadline = time.monotonic() + plan.timeout_s
            while (t := last(kind, count, ranks)) is None:
                if time.monotonic() > deadline:
                    raise Failed(f"the floor: not {kind} within {plan.timeout_s:.0f} s")
                bench.progress("the floor: a kill in an all-reduce")
                time.sleep(POLL_S)
            return t

        wait("reduced", 10, plan.replicas)
        time.sleep(choose.uniform(0.0, 0.5))
        struck = time.monotonic()
        os.kill(pids[victim], signal.SIGKILL)
        survivors = plan.replicas - 1
        return wait("noticed", 1, survivors) - struck, wait("going", 1, survivors) - struck


def _lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def last_of(lines: Iterable[Mapping[str, object]], kind: str, count: int, ranks: int) -> float | None:
    """When the last of `ranks` ranks had logged `kind` for the `count`-th time; None if they have not."""
    times: dict[object, list[float]] = {}
    for line in lines:
        if line["kind"] == kind:
            times.setdefault(line["rank"], []).append(float(str(line["t"])))
    reached = [mine[count - 1] for mine in times.values() if len(mine) >= count]
    return max(reached) if len(reached) >= ranks else None


def loopback_bytes_per_s(size: int = 256_000_000, repetitions: int = 3) -> float:
    """The best speed of one TCP connection over the loopback interface, into memory that is already mapped."""
    chunk = memoryview(bytearray(size))
    target = memoryview(bytearray(size))
    best = 0.0
    with socket.create_server(("127.0.0.1", 0)) as server:
        for _ in range(repetitions):
            with socket.create_connection(server.getsockname()) as sender:
                receiver, _address = server.accept()
                with receiver:
                    began = time.monotonic()
                    thread = threading.Thread(target=sender.sendall, args=(chunk,))
                    thread.start()
                    done = 0
                    while done < size:
                        done += receiver.recv_into(target[done:])
                    thread.join()
            best = max(best, size / (time.monotonic() - began))
    return best
