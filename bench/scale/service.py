"""The coordinator of the measured job, in a process of its own, with what it costs."""

from __future__ import annotations

import asyncio
import functools
import multiprocessing
import os
import resource
import shutil
import socket
import tempfile
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from bench.coordinator import job
from bench.scale.agents import TOKEN, Shape
from holdfast.coordinator.machine import Core
from holdfast.coordinator.service.server import Coordinator
from holdfast.protocol.job import Resume
from holdfast.protocol.job_options import Timing

LAG_EVERY_S = 0.01


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What the coordinator has used since it began, and where it stands."""

    at_s: float
    """On the machine's steady clock."""
    cpu_s: float
    """Of the whole process."""
    core_s: float
    """Of that, in `Core.handle_all`."""
    ledger_s: float
    """Of that, on the thread that writes the ledger."""
    disk_bytes: int
    """Written to files by the process."""
    lags_s: tuple[float, float, float]
    """How late the loop was since the last question: p50, p99.9 and the most."""
    rss_mb: float
    """The most so far."""
    nodes: int
    phase: str
    generation: int
    members: int
    connected: int
    """Nodes whose agents it has heard hello of."""


class _Meter:
    """Processor time within one function."""

    def __init__(self) -> None:
        self.spent_s = 0.0

    def around(self, function: Any) -> Any:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.spent_s += time.thread_time() - begun

        return timed


async def _run(conn: Connection, folder: Path, port: int, shape: Shape, spares: int) -> None:
    begun_s = time.process_time()
    meter = _Meter()
    Core.handle_all = meter.around(Core.handle_all)  # type: ignore[method-assign]
    spec = job(shape.nodes - spares, shape.per_node, spares)
    spec = msgspec.structs.replace(spec, timing=Timing(detection_s=shape.detection_s))
    coordinator = Coordinator(folder, spec, Resume(), copies=0)
    listener = socket.create_server(("127.0.0.1", port), backlog=4096)
    serving = asyncio.create_task(coordinator.serve(listener, "127.0.0.1"))
    lags: list[float] = []

    async def watch_lag() -> None:
        while True:
            begun = time.monotonic()
            await asyncio.sleep(LAG_EVERY_S)
            lags.append(time.monotonic() - begun - LAG_EVERY_S)

    watching = asyncio.create_task(watch_lag())
    conn.send((listener.getsockname()[1], begun_s))
    loop = asyncio.get_running_loop()
    while await loop.run_in_executor(None, conn.recv) != "end":
        ordered = sorted(lags) or [0.0]
        lags.clear()
        membership = coordinator._core.state.membership
        generation = membership.generation
        conn.send(
            Cost(
                at_s=time.monotonic(),
                cpu_s=time.process_time(),
                core_s=meter.spent_s,
                ledger_s=_thread_s("ledger"),
                disk_bytes=_written(),
                lags_s=(
                    ordered[len(ordered) // 2],
                    ordered[int(len(ordered) * 0.999)],
                    ordered[-1],
                ),
                rss_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
                nodes=len(membership.nodes),
                phase=membership.phase.value,
                generation=membership.number,
                members=len(generation.members) if generation is not None else 0,
                connected=sum(line.introduced for line in coordinator._lines.by_node.values()),
            )
        )
    watching.cancel()
    serving.cancel()
    os._exit(0)


def _thread_s(name: str) -> float:
    """Processor time of this process's threads whose name has this in it."""
    spent = 0.0
    for thread in threading.enumerate():
        if name in thread.name:
            text = Path(f"/proc/self/task/{thread.native_id}/stat").read_text()
            fields = text[text.rindex(")") + 2 :].split()
            spent += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return spent


def _written() -> int:
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("write_bytes"):
            return int(line.split()[1])
    return 0


class Service:
    """A coordinator that may be killed, and goes on with what it has written."""

    def __init__(self, shape: Shape, spares: int) -> None:
        self._root = Path(tempfile.mkdtemp(prefix="holdfast-scale-"))
        self._folder = self._root / "jobs" / "scale"
        self._folder.mkdir(parents=True)
        (self._folder / "token").write_text(TOKEN)
        self._shape, self._spares, self.port = shape, spares, 0
        self.start()

    def start(self) -> None:
        """A process, at the port of the one before."""
        self.conn, theirs = multiprocessing.Pipe()
        given = (theirs, self._folder, self.port, self._shape, self._spares)
        self.process = multiprocessing.Process(target=_main, args=given, daemon=True)
        self.process.start()
        # begun_s: the processor time that it had used when its modules were imported.
        self.port, self.begun_s = self.conn.recv()

    def kill(self) -> None:
        """As `kill -9`."""
        self.process.kill()
        self.process.join()

    def close(self) -> None:
        """Ends it."""
        self.conn.send("end")
        self.process.join(5.0)
        self.kill()
        shutil.rmtree(self._root, ignore_errors=True)


def _main(conn: Connection, folder: Path, port: int, shape: Shape, spares: int) -> None:
    asyncio.run(_run(conn, folder, port, shape, spares))
