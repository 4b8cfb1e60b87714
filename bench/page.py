"""`python -m bench.page`: the page of a large job: first paint, processor time of viewers, and how long the loop is held.

The job is made up: a state and a ledger of 2,000 nodes, 16,000 ranks, a million steps and 10,000 incidents. It is served by
the page's own application from a process that does nothing else, and goes on with an event and a step twice a second.
Needs Chromium and the environment of `make look-test`: `.venv-look/bin/python -m bench.page`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import random
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.machine import ForeignCpu, conclude, introduce
from bench.recovery.environments import ROOT, versions
from holdfast.coordinator.kernel.index import PhaseIndex
from holdfast.coordinator.kernel.state import CoreState, JobPhase, Node, Worker, WorkerPhase
from holdfast.coordinator.service.ledger import SideThread
from holdfast.coordinator.service.page import PageSource, Wakeup
from holdfast.coordinator.service.store import LedgerBatch, LedgerEntry, ReportedSteps, Store
from holdfast.protocol.job import JobSpec
from holdfast.protocol.messages import Generation, Member, ReportedStep
from holdfast.ui.server import UiServer, loopback
from holdfast.web.sessions import Role, Sessions

PER_NODE = 8
NAMED = 100
"""Generations whose event names all workers, as the coordinator writes it: a quarter of a megabyte each. Of older ones the
ledger here has no such event, which saves two gigabytes."""
STEP_S = 1.0
SLOW_MS = 5.0
PAINTS = 5


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Options for how large the made-up job is."""
    parser.add_argument("--nodes", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--incidents", type=int, default=10_000)


def main() -> int:
    """Makes the job, serves it, and prints what it costs."""
    parser = argparse.ArgumentParser(prog="bench.page", description=__doc__)
    add_sizes(parser)
    parser.add_argument("--viewers", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=30.0, help="for which viewers look (default: 30)")
    given = parser.parse_args()
    console = Console(width=110)
    what = f"{given.nodes} nodes, {given.nodes * PER_NODE} ranks, {given.steps} steps, {given.incidents} incidents"
    introduce(console, versions(Path(sys.executable), ["aiohttp", "msgspec"]), what)
    with tempfile.TemporaryDirectory() as folder, ForeignCpu() as cpu:
        path = Path(folder) / "job.sqlite"
        began = time.perf_counter()
        make_ledger(path, given.nodes, given.steps, given.incidents)
        mb = path.stat().st_size / 1e6
        console.print(
            f"the ledger: {mb:,.0f} MB, made in {time.perf_counter() - began:.0f} s", highlight=False
        )
        ours, theirs = multiprocessing.Pipe()
        server = multiprocessing.get_context("spawn").Process(target=serve, args=(path, given.nodes, theirs))
        server.start()
        try:
            url, code = ours.recv()
            headline_s, whole_s = ours.recv()
            console.print(
                f"the first look after the start: headline after {headline_s:.2f} s, the whole ledger after {whole_s:.2f} s",
                highlight=False,
            )
            for line in viewers(url, code, given.viewers, given.seconds, ours):
                console.print(line, highlight=False)
            ours.send("code")
            for line in paints(url, ours.recv):
                console.print(line, highlight=False)
            ours.send("cpu")
            console.print(_loop_words("while the page was opened", ours.recv()[1]), highlight=False)
            ours.send("end")
        finally:
            server.join(10)
            if server.is_alive():
                server.terminate()
    conclude(console, cpu)
    return 0


# ---------------------------------------------------------------- the job


def make_ledger(path: Path, nodes: int, steps: int, incidents: int) -> None:
    """A ledger as a coordinator would have written it."""
    with closing(Store(path)):
        pass
    rng = random.Random(0)
    with closing(sqlite3.connect(path)) as db:
        rows = ((n, n * STEP_S, 2 + 8 / (1 + n / 5000) + rng.random() / 5, STEP_S, 1, nodes * PER_NODE, 1, 4e6, rng.random() + 1, 3e-4, n + 1) for n in range(steps))  # fmt: skip
        db.executemany(
            "insert into steps (step, t_s, loss, took_s, generation, world, made_in, weight, grad_norm, lr, place) "
            "values (?,?,?,?,?,?,?,?,?,?,?)",
            rows,
        )
        db.executemany("insert into events values (?,?,?,?,?)", events(nodes, steps, incidents, rng))
        db.commit()
    # Opening it summarizes the steps, as of a ledger that an older version wrote.
    with closing(Store(path)):
        pass


def events(nodes: int, steps: int, incidents: int, rng: random.Random) -> Any:
    """Rows of the table of events."""
    seq = 0

    def row(t_s: float, kind: str, /, **fields: Any) -> tuple[Any, ...]:
        nonlocal seq
        seq += 1
        return seq, t_s, "2026-01-01T00:00:00.000+00:00", kind, json.dumps(fields, separators=(",", ":"))

    for n in range(nodes):
        yield row(0.1, "node-joined", node=f"node{n}", host="h", slots=PER_NODE)
    for number in range(1, incidents + 1):
        t_s, node = number * steps * STEP_S / (incidents + 1), f"node{int(rng.paretovariate(0.4)) % nodes}"
        status = {
            "id": number, "fault": None, "injected": False, "node": node, "ranks": [rng.randrange(nodes * PER_NODE)],
            "at_step": int(t_s / STEP_S), "t_s": t_s, "detect_s": 0.2, "decide_s": 0.1, "replace_s": 0.1, "join_s": 0.3,
            "restore_s": 0.4, "first_step_s": 1.0, "stall_s": None, "earlier_stalls": 0, "earlier_stall_s": 0.0,
            "full_strength_s": None, "lost_steps": None, "rung": None, "cause": "killed by signal 9 (SIGKILL)",
            "cause_kind": rng.choice(["process", "hang", "raised", "node"]), "rule": None, "quiet": False, "verdict": None,
            "where": None,
        }  # fmt: skip
        yield row(t_s, "incident-opened", **status)
        if number > incidents - NAMED:
            names = [f"node{n // PER_NODE}.{n % PER_NODE}#{n + 1}" for n in range(nodes * PER_NODE)]
            names[status["ranks"][0]] += f"{number}"
            yield row(
                t_s + 0.5, "formed", generation=number, start=status["at_step"], world=len(names), workers=names, restore=[],
                applied=True, source="live",
            )  # fmt: skip
        done = {
            "stall_s": 2.0 + rng.random(),
            "full_strength_s": 3.0 + rng.random(),
            "lost_steps": 0,
            "rung": "spare",
        }
        yield row(t_s + 3.5, "incident-closed", **(status | done))


def made_up_state(nodes: int) -> CoreState:
    """The state of a job at full strength."""
    spec = JobSpec(name="large", script="train.py", min_nodes=1, max_nodes=nodes, nproc=PER_NODE)
    state = CoreState(spec=spec)
    membership, members = state.membership, []
    membership.phase, membership.level, membership.number = JobPhase.RUNNING, 2, 1
    for n in range(nodes):
        membership.nodes[f"node{n}"] = Node(
            name=f"node{n}", session="s", host="h", slots=PER_NODE, last_seen_s=0.0
        )
        for slot in range(PER_NODE):
            name, rank = f"node{n}.{slot}#{n * PER_NODE + slot + 1}", n * PER_NODE + slot
            membership.workers[name] = Worker(
                name=name,
                node=f"node{n}",
                slot=slot,
                started_s=0.0,
                awaited_s=0.0,
                phase=WorkerPhase.MEMBER,
                committed=1,
                median_s=1.0,
            )
            members.append(Member(rank=rank, worker=name, node=f"node{n}", slot=slot, replica=rank))
    membership.generation = Generation(number=1, members=tuple(members))
    membership.wall.since_s = 0.0
    return state


# ---------------------------------------------------------------- its process


class _Host:
    may_act = False
    more_jobs = 0

    def __init__(self, source: PageSource) -> None:
        self._source = source

    async def jobs(self) -> list[dict[str, Any]]:
        return []

    async def source(self, job: str) -> PageSource:
        return self._source

    def close(self) -> None:
        return


def serve(path: Path, nodes: int, pipe: Any) -> None:
    """A process that serves the page and answers on the pipe: code: a new one; cpu: processor seconds and slow callbacks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(_serve(path, nodes, pipe))


async def _serve(path: Path, nodes: int, pipe: Any) -> None:
    loop, ends, news = asyncio.get_running_loop(), asyncio.Event(), Wakeup()
    state, reader, began = made_up_state(nodes), SideThread("reader"), time.monotonic()
    with closing(Store(path)) as store:
        end_s = store.last_t_s()
        source = PageSource(
            read=lambda what: reader.do(_read, path, what), state=state, index=PhaseIndex(state.membership, PER_NODE),
            clock=lambda: end_s + time.monotonic() - began, news=news, job_dir=path.parent, live=True,
        )  # fmt: skip
        listener = loopback(0)
        port = listener.getsockname()[1]
        sessions = Sessions("key", port, time.time)
        writer = SideThread("writer")
        writing = asyncio.create_task(_go_on(store, writer, news))
        held: list[float] = []
        time_callbacks(held)
        first = time.perf_counter()

        def started() -> None:
            pipe.send((f"http://127.0.0.1:{port}", sessions.new_code(Role.VIEW)))

        serving = asyncio.create_task(UiServer(_Host(source), sessions, listener).serve(started, ends))
        await source.panel("now", {})
        now_s = time.perf_counter() - first
        await source.panel("timeline", {})
        pipe.send((now_s, time.perf_counter() - first))
        while (asked := await loop.run_in_executor(None, pipe.recv)) != "end":
            if asked == "code":
                pipe.send(sessions.new_code(Role.VIEW))
            else:
                pipe.send((time.process_time(), list(held)))
                held.clear()
        writing.cancel()
        ends.set()
        await serving
        reader.end()


def _read(path: Path, what: Callable[[Store], Any]) -> Any:
    with closing(Store(path, read_only=True)) as store:
        return what(store)


async def _go_on(store: Store, writer: SideThread, news: Wakeup) -> None:
    """Twice a second a step is committed, and something happens."""
    step, seq, t_s = store.last_step() or 0, store.last_seq(), store.last_t_s()
    while True:
        await asyncio.sleep(0.5)
        step, seq, t_s = step + 1, seq + 1, t_s + 0.5
        await writer.do(_write, store, step, seq, t_s)
        news.tell()


def _write(store: Store, step: int, seq: int, t_s: float) -> None:
    entry = LedgerEntry(seq=seq, t_s=t_s, utc="", kind="snapshot", fields={"step": step})
    told = ReportedStep(step, 2.5, 0.5, made_in=1, weight=4e6, grad_norm=1.0, lr=3e-4)
    store.write(
        LedgerBatch(
            entries=[entry], steps=[ReportedSteps(t_s=t_s, losses=(told,), generation=1, world=16000)]
        )
    )


def time_callbacks(held: list[float], slow: list[str] | None = None) -> None:
    """Notes the processor milliseconds of each callback of the loop. Not its wall time: on a busy machine that says more of
    the machine.

    slow: gets a line for each callback that held the loop for too long, with what the garbage collector had of that.
    """
    original = asyncio.Handle._run
    collecting = [0.0, 0.0]

    def collected(phase: str, info: dict[str, int]) -> None:
        if threading.current_thread() is not loop_thread:
            return
        if phase == "start":
            collecting[1] = time.thread_time()
        else:
            collecting[0] += time.thread_time() - collecting[1]

    def timed(handle: asyncio.Handle) -> None:
        collecting[0] = 0.0
        began = time.thread_time()
        original(handle)
        took_ms = (time.thread_time() - began) * 1e3
        held.append(took_ms)
        if slow is not None and took_ms > SLOW_MS:
            # A step of a task is known by the task.
            what = repr(getattr(handle._callback, "__self__", handle._callback))[:160]
            slow.append(f"{took_ms:.1f} ms, {collecting[0] * 1e3:.1f} of them the garbage collector: {what}")

    loop_thread = threading.current_thread()
    gc.callbacks.append(collected)
    asyncio.Handle._run = timed  # type: ignore[method-assign]


# ---------------------------------------------------------------- who looks


def viewers(url: str, code: str, count: int, seconds: float, pipe: Any) -> list[str]:
    """Processor time of the serving process with viewers, against without."""
    with tempfile.NamedTemporaryFile() as jar:
        subprocess.run(["curl", "-s", "-c", jar.name, f"{url}/enter?code={code}"], check=True)
        figures = {}
        for number in (0, count):
            streams = [
                subprocess.Popen(
                    ["curl", "-sN", "-b", jar.name, f"{url}/api/v1/stream?after=1000000"],
                    stdout=subprocess.DEVNULL,
                )
                for _ in range(number)
            ]
            time.sleep(2)
            pipe.send("cpu")
            before, _ = pipe.recv()
            time.sleep(seconds)
            pipe.send("cpu")
            after, held = pipe.recv()
            figures[number] = (after - before) / seconds, held
            for one in streams:
                one.terminate()
                one.wait()
    (alone, _), (watched, held) = figures[0], figures[count]
    return [
        f"processor of the process without viewers {alone:.2%} of a core, with {count} {watched:.2%}: the viewers {watched - alone:.2%}",
        _loop_words(f"with {count} viewers", held),
    ]


def _loop_words(when: str, held: list[float]) -> str:
    slow = sum(h > SLOW_MS for h in held)
    return f"{when} {slow} of {len(held)} callbacks held the loop for more than {SLOW_MS:g} ms of processor; the longest {max(held):.1f} ms"


def paints(url: str, code: Callable[[], str]) -> list[str]:
    """First paint, and until every panel of the first screen is there, in a browser with an empty cache."""
    sys.path.insert(0, str(ROOT / "tests" / "web"))
    from browser import Browser

    first, whole, training = [], [], []
    with closing(Browser()) as one:
        one.open(f"{url}/enter?code={code()}")
        for _ in range(PAINTS):
            one.driver.execute_cdp_cmd("Network.clearBrowserCache", {})
            one.open(f"{url}/")
            one.wait("return [...holdfast.wanted.keys()].every(k => k in holdfast.panels)")
            whole.append(one.run("return performance.now()"))
            first.append(
                one.run("return performance.getEntriesByName('first-contentful-paint')[0].startTime")
            )
            began = one.run("return performance.now()")
            one.view("#/training")
            training.append(one.run("return performance.now()") - began)
        sent = one.run(
            "return performance.getEntriesByType('resource').reduce((n, r) => n + r.encodedBodySize, 0)"
        )
    return [
        f"{name}: {statistics.median(times):.0f} ms ({min(times):.0f}-{max(times):.0f}, {PAINTS} times)"
        for name, times in (
            ("first contentful paint", first),
            ("every panel of the first screen (seen by a poll)", whole),
            ("curves and goodput after that", training),
        )
    ] + [f"bytes over the wire, both views: {sent:,.0f}"]


if __name__ == "__main__":
    sys.exit(main())
