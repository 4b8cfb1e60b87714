"""`python -m bench.collectives`: what a sharded replica's collectives take on the CPU, and connections within a machine.

Gloo's own all-gather and reduce-scatter, and those that are put together from its broadcasts and exchanges
(`holdfast.train.gloo_group`), in turns in the same processes; then the bandwidth of two loopback connections under each way of
congestion control that this system has.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from bench.machine import ForeignCpu, conclude, introduce
from bench.recovery.environments import versions
from holdfast.train.gloo_group import BufferPool, GlooGroup

BLOCK_BYTES = 4 << 20
STREAMS = 2
STREAM_BYTES = 1 << 29
CONTROLS = ("bbr", "cubic", "reno")

Times = dict[str, list[float]]


def main() -> int:
    """Measures both and prints medians with their spread."""
    parser = argparse.ArgumentParser(prog="bench.collectives", description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument(
        "--mib", type=int, default=25, help="MiB of bfloat16 values of each worker (default: 25)"
    )
    parser.add_argument("--reps", type=int, default=15)
    given = parser.parse_args()
    console = Console(width=100)
    what = f"{given.mib} MiB of each worker, {given.reps} repetitions"
    introduce(console, versions(Path(sys.executable), ["torch"]), what)
    table = Table("workers", "collective", "gloo's own, ms", "ours, ms", "times as fast")
    with ForeignCpu() as cpu:
        for workers in given.workers:
            times = _collectives(workers, given.mib << 20, given.reps)
            for name in ("all-gather", "reduce-scatter"):
                theirs, ours = times[f"gloo {name}"], times[f"our {name}"]
                ratio = statistics.median(theirs) / statistics.median(ours)
                table.add_row(str(workers), name, _shown(theirs, 1e3), _shown(ours, 1e3), f"{ratio:.1f}")
        console.print(table)
        table = Table("congestion control", "loopback, GB/s")
        for name, rates in _connections(given.reps).items():
            table.add_row(name, _shown(rates, 1e-9))
        console.print(table)
    conclude(console, cpu)
    return 0


def _shown(values: list[float], scale: float) -> str:
    low, middle, high = (scale * f(values) for f in (min, statistics.median, max))
    return f"{middle:.3g} ({low:.3g}-{high:.3g})"


# ---------------------------------------------------------------- collectives


def _collectives(workers: int, nbytes: int, reps: int) -> Times:
    """Seconds of the slowest worker, for each collective."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(workers, mp_context=spawn) as pool:
        given = (workers, nbytes, reps, f"{folder}/store")
        jobs = [pool.submit(_work, rank, *given) for rank in range(workers)]
        times = [job.result() for job in jobs]
    return {name: [max(each) for each in zip(*(t[name] for t in times), strict=True)] for name in times[0]}


def _work(rank: int, size: int, nbytes: int, reps: int, path: str) -> Times:
    torch.set_num_threads(1)
    gloo = GlooGroup(rank, size, "127.0.0.1")
    gloo.connect(dist.FileStore(path, size))  # type: ignore[attr-defined, unused-ignore]
    count = nbytes // torch.bfloat16.itemsize
    mine = torch.full((count,), rank + 1.0, dtype=torch.bfloat16)
    everybody = torch.ones(size * count, dtype=torch.bfloat16)
    scratch = BufferPool()
    calls: dict[str, Callable[[], object]] = {
        "gloo all-gather": lambda: gloo.wait(gloo.start(lambda g: g._allgather_base(everybody, mine))),
        "our all-gather": lambda: gloo.gather(everybody, mine),
        "gloo reduce-scatter": lambda: gloo.wait(
            gloo.start(lambda g: g._reduce_scatter_base(mine, everybody))
        ),
        "our reduce-scatter": lambda: gloo.scatter_sum(mine, everybody, scratch),
    }
    times: Times = {name: [] for name in calls}
    for nth in range(reps + 1):  # the first brings the memory in
        for name, call in calls.items():
            gloo.wait(gloo.start(lambda g: g.barrier()))
            began = time.perf_counter()
            call()
            if nth:
                times[name].append(time.perf_counter() - began)
            mine.fill_(rank + 1.0)
    gloo.wait(gloo.start(lambda g: g.barrier()))
    gloo.close()
    return times


# ---------------------------------------------------------------- connections


def _connections(reps: int) -> dict[str, list[float]]:
    """Bytes per second of two connections together, for every congestion control that may be chosen, in turns."""
    there = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    rates: dict[str, list[float]] = {name: [] for name in CONTROLS if name in there}
    for _ in range(reps):
        for name, found in rates.items():
            found.append(_streams(name))
    return rates


def _streams(control: str) -> float:
    fork = multiprocessing.get_context("fork")  # it has nothing to import, and this process no other thread
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = fork.Process(target=_send_all, args=(control, server.getsockname()[1]))
        sender.start()
        connections = [server.accept()[0] for _ in range(STREAMS)]
        began = time.perf_counter()
        _side_by_side([functools.partial(_receive, each) for each in connections])
        took_s = time.perf_counter() - began
        sender.join()
    return STREAMS * STREAM_BYTES / took_s


def _side_by_side(calls: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _receive(connection: socket.socket) -> None:
    into = memoryview(bytearray(BLOCK_BYTES))
    with connection:
        while connection.recv_into(into):
            pass


def _send_all(control: str, port: int) -> None:
    _side_by_side([functools.partial(_send, control, port)] * STREAMS)


def _send(control: str, port: int) -> None:
    block = bytes(BLOCK_BYTES)
    with socket.socket() as sender:
        sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, control.encode())
        sender.connect(("127.0.0.1", port))
        for _ in range(STREAM_BYTES // BLOCK_BYTES):
            sender.sendall(block)


if __name__ == "__main__":
    sys.exit(main())
