"""`python -m bench.scale`: what a large job costs its coordinator, by phase, over real sockets.

The coordinator is the real service in a process of its own; agents are simulated in others, over real WebSockets. A step takes a
second, and every worker tells of it, and of where the time went once a minute. Somebody watches, as `holdfast status` does.
Workers answer at once, and compute nothing. What the steady load costs in the same time is subtracted from the events.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from bench import machine
from bench.scale import agents
from bench.scale.agents import Seen, Shape
from bench.scale.service import Cost, Service

PROCESSES = 2
"""That simulate agents. They take as much of the processor as the coordinator, or more."""
LIMIT_S = 600.0
WIDTH = 100


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One phase."""

    phase: str
    cpu_s: float
    """Of the coordinator; of a steady load per second, and of an event beyond the steady load."""
    core_s: float
    ledger_s: float
    wall_s: float
    sent_mb: float
    frames: int
    lag_ms: tuple[float, float, float]
    disk_mb: float
    members: int
    """Of the generation that it ended with."""


class Run:
    """One coordinator and its agents."""

    def __init__(self, shape: Shape, spares: int) -> None:
        self.shape, self.spares = shape, spares
        self.service = Service(shape, spares)
        self.begun = self.cost()
        """Before the first agent."""
        url = f"http://127.0.0.1:{self.service.port}/agent"
        numbers = [list(range(k, shape.nodes, PROCESSES)) for k in range(PROCESSES)]
        self.clients = [agents.start(url, mine, shape) for mine in numbers if mine]
        for _, conn in self.clients:
            conn.recv()

    def cost(self) -> Cost:
        """Of the coordinator until now."""
        self.service.conn.send("cost")
        found: Cost = self.service.conn.recv()
        return found

    def seen(self) -> Seen:
        """By all agents until now."""
        total = Seen()
        for _, conn in self.clients:
            conn.send(("seen",))
        for _, conn in self.clients:
            one: Seen = conn.recv()
            total.nbytes, total.frames = total.nbytes + one.nbytes, total.frames + one.frames
            total.members = Counter(total.members) + Counter(one.members)
            total.last_s, total.closed = max(total.last_s, one.last_s), total.closed + one.closed
        return total

    def inside(self) -> list[str]:
        """Nodes that train, the last one first."""
        self.tell("inside")
        return sorted((name for _, conn in self.clients for name in conn.recv()), reverse=True)

    def tell(self, *words: object) -> None:
        """All processes of agents."""
        for _, conn in self.clients:
            conn.send(words)

    def until_formed(self, after: int, members: int) -> None:
        """Until so many workers have a generation later than this one. Raises TimeoutError."""
        limit_s = time.monotonic() + LIMIT_S
        while time.monotonic() < limit_s:
            cost, seen = self.cost(), self.seen()
            if cost.generation > after and seen.members[cost.generation] >= members == cost.members:
                return
            time.sleep(0.05)
        raise TimeoutError(f"{cost} and {seen} after {LIMIT_S:g} s")

    def until_connected(self, nodes: int) -> None:
        """Until the coordinator has heard hello of so many. Raises TimeoutError."""
        limit_s = time.monotonic() + LIMIT_S
        while (cost := self.cost()).connected < nodes:
            if time.monotonic() > limit_s:
                raise TimeoutError(f"{cost} after {LIMIT_S:g} s")
            time.sleep(0.05)

    def close(self) -> None:
        """Ends all processes."""
        self.service.close()
        for process, conn in self.clients:
            conn.send(("end",))
            process.join(5.0)
            process.kill()


def _between(
    phase: str,
    before: tuple[Cost, Seen],
    after: tuple[Cost, Seen],
    steady: Measured | None,
    until_s: float = 0.0,
) -> Measured:
    (a, x), (b, y) = before, after
    length_s = b.at_s - a.at_s
    beside = length_s if steady is not None else 0.0
    rate = steady.cpu_s if steady is not None else 0.0
    return Measured(
        phase=phase,
        cpu_s=b.cpu_s - a.cpu_s - rate * beside,
        core_s=b.core_s - a.core_s - (steady.core_s if steady else 0.0) * beside,
        ledger_s=b.ledger_s - a.ledger_s - (steady.ledger_s if steady else 0.0) * beside,
        wall_s=(until_s or b.at_s) - a.at_s,
        sent_mb=(y.nbytes - x.nbytes) / 1e6,
        frames=y.frames - x.frames,
        lag_ms=(1e3 * b.lags_s[0], 1e3 * b.lags_s[1], 1e3 * b.lags_s[2]),
        disk_mb=(b.disk_bytes - a.disk_bytes) / 1e6,
        members=b.members,
    )


def measure(shape: Shape, spares: int, seconds: float, lost: int) -> tuple[list[Measured], float]:
    """The phases of one run, and the most memory that the coordinator took, in MB."""
    run = Run(shape, spares)
    try:
        workers = (shape.nodes - spares) * shape.per_node
        run.until_formed(0, workers)
        cost, seen = run.cost(), run.seen()
        found = [_between("formation", (run.begun, Seen()), (cost, seen), None, seen.last_s)]
        run.clients[0][1].send(("watch",))
        run.tell("train", True)
        time.sleep(5.0)
        before = run.cost(), run.seen()
        time.sleep(seconds)
        after = run.cost(), run.seen()
        whole = _between("steady, per second", before, after, None)
        per_s = {
            name: getattr(whole, name) / seconds
            for name in ("cpu_s", "core_s", "ledger_s", "sent_mb", "disk_mb")
        }
        steady = Measured(
            **{**asdict(whole), **per_s, "wall_s": seconds, "frames": round(whole.frames / seconds)}
        )
        found.append(steady)
        there = shape.nodes
        for phase, gone in (("one node lost", 1), (f"{lost} nodes lost at once", lost)):
            going = run.inside()[:gone]
            if gone >= there:
                continue
            there -= gone
            before = run.cost(), run.seen()
            run.tell("lose", going)
            left = min(there, shape.nodes - spares) * shape.per_node
            run.until_formed(before[0].generation, left // shape.shards * shape.shards)
            after = run.cost(), run.seen()
            found.append(_between(phase, before, after, steady, after[1].last_s))
        before = run.cost(), run.seen()
        run.tell("fail")
        run.until_formed(before[0].generation, before[0].members)
        after = run.cost(), run.seen()
        found.append(_between("NaN on all workers", before, after, steady, after[1].last_s))
        before = run.cost(), run.seen()
        run.tell("stall", run.inside()[0])
        run.until_formed(before[0].generation, before[0].members)
        after = run.cost(), run.seen()
        found.append(_between("a hang of all workers", before, after, steady, after[1].last_s))
        run.tell("another")
        seen = run.seen()
        run.service.kill()
        run.service.start()
        # What it imports it imports at any size.
        before = (
            replace(
                run.cost(),
                cpu_s=run.service.begun_s,
                core_s=0.0,
                ledger_s=0.0,
                disk_bytes=0,
                at_s=time.monotonic(),
            ),
            seen,
        )
        run.until_connected(there)
        back_s = time.monotonic()
        after_it = run.cost(), run.seen()
        found.append(_between("the coordinator killed", before, after_it, steady, back_s))
        assert after_it[0].generation == after[0].generation, "a job whose coordinator was killed goes on"
        closed = after_it[1].closed
        assert closed == 0, f"the coordinator cut off {closed} agents"
        return found, after[0].rss_mb
    finally:
        run.close()


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.scale", description=__doc__)
    parser.add_argument("sizes", nargs="*", default=["16x8", "64x8"], metavar="NODESxWORKERS")
    parser.add_argument("--shards", type=int, default=1, help="workers of a replica (default: 1)")
    parser.add_argument(
        "--spares", type=int, default=0, help="nodes that wait beside the others (default: 0)"
    )
    parser.add_argument("--lost", type=int, default=8, help="nodes that are lost at once (default: 8)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of steady load (default: 20)")
    parser.add_argument(
        "--detection", type=float, default=8.0, help="seconds, as of `holdfast run` (default: 8)"
    )
    parser.add_argument("--json", type=Path, help="write everything that was measured to this file")
    return parser.parse_args(arguments)


def main() -> None:
    """Prints a table for each size."""
    multiprocessing.set_start_method("spawn")
    chosen, console = options(), Console(width=WIDTH)
    machine.introduce(console, {}, "coordinator and agents on this machine, over loopback")
    results = {}
    for size in chosen.sizes:
        nodes, per_node = map(int, size.split("x"))
        shape = Shape(
            nodes=nodes + chosen.spares,
            per_node=per_node,
            shards=chosen.shards,
            detection_s=chosen.detection,
        )
        found, rss_mb = measure(shape, chosen.spares, chosen.seconds, chosen.lost)
        results[size] = [asdict(one) for one in found]
        about = (
            f"{size}, {chosen.shards} workers a replica, {chosen.spares} spare nodes: {rss_mb:.0f} MB at most"
        )
        table = Table(title=about, box=box.SIMPLE_HEAD, title_justify="left")
        table.add_column("phase")
        for name in (
            "CPU s",
            "core",
            "ledger",
            "wall s",
            "sent MB",
            "frames",
            "lag p99.9 ms",
            "disk MB",
            "members",
        ):
            table.add_column(name, justify="right")
        for one in found:
            figures = (
                f"{one.cpu_s:.3f}",
                f"{one.core_s:.3f}",
                f"{one.ledger_s:.3f}",
                f"{one.wall_s:.2f}",
                f"{one.sent_mb:.2f}",
            )
            table.add_row(
                one.phase,
                *figures,
                f"{one.frames:,}",
                f"{one.lag_ms[1]:.0f}",
                f"{one.disk_mb:.1f}",
                f"{one.members:,}",
            )
        console.print(table)
    console.print(f"Load average at the end: {machine.load():.1f}", highlight=False)
    if chosen.json is not None:
        chosen.json.write_text(
            json.dumps({"machine": asdict(machine.describe()), "sizes": results}, indent=1)
        )


if __name__ == "__main__":
    main()
