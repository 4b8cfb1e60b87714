"""What one event costs the coordinator's core, by the size of the job: `python -m bench.coordinator [NODESxWORKERS ...]`.

No sockets and no ledger: the processor time of `Core.handle`, the size of its state, and the bytes of one JoinGeneration. A
heartbeat and a progress message come from every node many times a second, so they must cost the same at any size.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable

import msgspec

from bench.machine import describe
from holdfast.coordinator.kernel import events as e
from holdfast.coordinator.kernel.state import JobPhase, Worker, WorkerPhase
from holdfast.coordinator.machine import Core
from holdfast.protocol import messages as m
from holdfast.protocol.job import JobSpec
from holdfast.protocol.job_options import SnapshotOptions
from holdfast.protocol.snapshots import Saving
from holdfast.protocol.wire.frames import encode

SIZES = ("16x8", "64x8", "256x8", "4096x1")
REPEATS = 51


def hello(number: int, slots: int) -> m.Hello:
    """Of one node among thousands."""
    name = f"node-{number:05d}"
    return m.Hello(
        version=m.PROTOCOL_VERSION,
        node=name,
        session=f"s{number}",
        host=f"{name}.cluster.local",
        slots=slots,
        pid=1,
        ports=(29500, 29501),
    )


def says(worker: Worker, message: m.WorkerMessage) -> e.WorkersSay:
    """A message of a worker, as its agent forwards it."""
    return e.WorkersSay(worker.node, (m.FromWorker(worker.name, message),))


def ready(worker: Worker, shards: int = 1) -> m.Ready:
    """Its model is built. shards: workers of a replica."""
    return m.Ready(
        digest="0123456789abcdef",
        host=f"{worker.node}.cluster.local",
        vote_port=34567,
        data_port=34568,
        shape=(shards, 1),
        shard_index=worker.shard_index % shards,
    )


def job(nodes: int, nproc: int, spares: int = 0, least: int = 1) -> JobSpec:
    """That may go on with `least` nodes of them, and saves nothing."""
    saving = Saving(SnapshotOptions("0"))
    return JobSpec(
        name="job",
        script="train.py",
        min_nodes=least,
        max_nodes=nodes,
        nproc=nproc,
        spares=spares,
        saving=saving,
    )


class Job:
    """A core in the middle of a job of this size; `now` is its clock."""

    def __init__(self, nodes: int, nproc: int, shards: int = 1, spares: int = 0, least: int = 1) -> None:
        """shards: workers of a replica. spares: nodes beside the others, whose workers wait. least: nodes with which it goes on."""
        self.core, self.now = Core(job(nodes, nproc, spares, least)), 1000.0
        self.do(e.Tick(), *(e.NodeJoined(hello(i, nproc)) for i in range(nodes + spares)))
        there = list(self.core.state.membership.workers.values())
        self.do(*(says(w, x) for w in there for x in (m.Attached(), ready(w, shards))))
        membership = self.core.state.membership
        assert membership.phase is JobPhase.RUNNING, membership.phase
        assert membership.generation is not None
        workers = [membership.workers[x.worker] for x in membership.generation.members]
        number = self.core.state.membership.number
        self.do(
            *(
                says(w, x)
                for w in workers
                for x in (m.Joined(number, 0.01), m.Progress(generation=number, committed=1, median_s=0.5))
            )
        )

    def do(self, *events: e.Event) -> list[e.Action]:
        """Hands an event to the core, a little after the one before."""
        self.now += 1e-4
        return self.core.handle_all(events, self.now)


def measure(nodes: int, nproc: int) -> list[str]:
    """One line of the table."""
    job = Job(nodes, nproc)
    state = job.core.state
    workers, number = list(state.membership.workers.values()), state.membership.number
    gc.collect()
    gc.freeze()
    beat = _median_us(job, lambda i: e.NodeSays(workers[i % len(workers)].node, m.Heartbeat()))
    same = _median_us(
        job,
        lambda i: says(workers[i % len(workers)], m.Progress(generation=number, committed=1, median_s=0.5)),
    )
    step = _median_us(
        job,
        lambda i: says(
            workers[0],
            m.Progress(
                generation=number, committed=i + 2, median_s=0.5, losses=(m.ReportedStep(i + 1, 1.0, 0.5),)
            ),
        ),
    )
    tick = _median_us(job, lambda i: e.Tick())
    last = workers[-1]
    began = time.process_time()
    job.do(e.NodeLost(last.node, state.membership.nodes[last.node].session))
    left = [w for w in workers if w.phase is WorkerPhase.MEMBER]
    told = job.do(*(says(w, m.Parked(generation=number, committed=w.committed)) for w in left))
    formed_s = time.process_time() - began
    forms = [a.message for a in told if isinstance(a, e.Send) and isinstance(a.message, m.Relay)]
    gc.unfreeze()
    assert len(forms) == len(left), (len(forms), len(left))
    return [
        f"{nodes} x {nproc}",
        *(f"{x:.0f} us" for x in (beat, same, step)),
        f"{tick / 1e3:.1f} ms",
        f"{formed_s * 1e3:.0f} ms",
        f"{len(encode(forms[0])) / 1e3:.0f} kB",
        f"{len(msgspec.msgpack.encode(state)) / 1e6:.2f} MB",
    ]


def _median_us(job: Job, event: Callable[[int], e.Event]) -> float:
    took = []
    for i in range(REPEATS):
        said = event(i % 16)
        began = time.process_time()
        job.do(said)
        took.append(time.process_time() - began)
    return statistics.median(took) * 1e6


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="bench.coordinator", description=__doc__)
    parser.add_argument("sizes", nargs="*", default=SIZES, help="NODESxWORKERS, as in 64x8")
    sizes = [tuple(map(int, text.split("x"))) for text in parser.parse_args().sizes]
    print(describe().line())
    print(f"medians of {REPEATS}; a node is lost and all others park, in two batches: once\n")
    head = [
        "nodes x workers",
        "heartbeat",
        "progress",
        "new step",
        "tick",
        "lost to formed",
        "JoinGeneration",
        "state",
    ]
    rows = [head, *(measure(nodes, nproc) for nodes, nproc in sizes)]
    for row in rows:
        print("  ".join(cell.rjust(len(name)) for cell, name in zip(row, head, strict=True)))


if __name__ == "__main__":
    main()
