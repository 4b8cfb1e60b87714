"""What `holdfast plan simulate --page` costs, without browsers: virtual seconds for each second of processor, what a strike takes,
how long one event holds the loop that serves the page, and memory.

.venv/bin/python -m bench.simulated [--nodes 2000] [--hours 24]
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import time
from pathlib import Path

from rich.console import Console

from bench.machine import ForeignCpu, conclude, introduce
from bench.recovery.environments import versions
from holdfast.tools.simulate.live import LiveCluster
from holdfast.tools.simulate.scenario import read

PIECE_S = 10.0
"""Virtual seconds between two looks: at the speed of 100 the page takes ten looks a second."""
STRIKES = (("rank-17", "kill-worker"), ("rank-100", "kill-node"), ("rank-200", "xid-79"), ("rank-300", "stop-worker"), ("rack-21", "power-off"), ("switch-3", "cut"))  # fmt: skip

LEAST = 512


class Measured(LiveCluster):
    """Notes how long each event took, in processor time."""

    def __init__(self, nodes: int) -> None:
        self.took_ms: list[float] = []
        asked = {"nodes": nodes, "days": 365, "spares": 48, "rate": "0.0161%", "min_nodes": int(0.8 * nodes), "max_restarts": 10000}  # fmt: skip
        super().__init__(read(asked), 0, "bench", lambda t_s, event: None)

    def happen(self) -> None:
        """See `Cluster.happen`."""
        before = time.process_time()
        super().happen()
        self.took_ms.append(1000 * (time.process_time() - before))

    def go(self, seconds: float) -> float:
        """Seconds of processor."""
        before, end_s = time.process_time(), self.now + seconds
        while self.now < end_s:
            self.advance(min(end_s, self.now + PIECE_S))
            self.report()
            self.committed.clear()
        return time.process_time() - before


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=2000)
    parser.add_argument("--hours", type=float, default=24)
    given = parser.parse_args()
    if given.nodes < LEAST:
        parser.error(
            f"--nodes must be at least {LEAST} (got {given.nodes}): rank 300 and switch 3 are struck"
        )
    console = Console(highlight=False, soft_wrap=True)
    what = f"{given.nodes} simulated nodes, once; processor time"
    introduce(console, versions(Path(sys.executable), ["msgspec"]), what)
    with ForeignCpu() as cpu:
        measure(given.nodes, given.hours)
    conclude(console, cpu)


def measure(nodes: int, hours: float) -> None:
    """Prints the figures, each as it is there."""
    before = time.process_time()
    cluster = Measured(nodes)
    cluster.begin()
    print(f"{nodes} nodes; start to the first step: {time.process_time() - before:.2f} s of processor")
    quiet = [600 / cluster.go(600) for _ in range(5)]
    print(
        f"nothing happens: {statistics.median(quiet):.0f} virtual seconds a second ({min(quiet):.0f}-{max(quiet):.0f}, 5 times)"
    )
    for target, kind in STRIKES:
        cluster.took_ms.clear()
        cluster.strike(target, kind)
        took_s = cluster.go(120)
        print(
            f"{kind} {target}, and 120 s: {took_s:.2f} s of processor, longest event {max(cluster.took_ms):.0f} ms"
        )
        cluster.go(3600)
    for _ in range(4):
        cluster.took_ms.clear()
        passed_s = hours * 900
        took_s = cluster.go(passed_s)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"{passed_s / 3600:.0f} hours with {sum(cluster.failures.values())} failures so far: {passed_s / took_s:.0f} virtual "
            f"seconds a second, longest event {max(cluster.took_ms, default=0.0):.0f} ms, {memory:.0f} MB at most, {len(cluster.heap)} planned events"
        )


if __name__ == "__main__":
    main()
