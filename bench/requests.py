"""`python -m bench.requests`: how long each request of a large job's coordinator holds its event loop.

The coordinator is the real one, in a process of its own, over a made-up state and ledger (see `bench.page`): 2,000 nodes,
16,000 ranks, a million steps and 10,000 incidents. No agents are connected. Before each request the ledger gets an entry, so no
answer comes from a cache. What is counted is the processor time of each callback on the loop's thread, not its wall time: on a
busy machine that says more of the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import multiprocessing
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
from rich.console import Console

from bench.machine import ForeignCpu, conclude, introduce
from bench.page import PER_NODE, SLOW_MS, add_sizes, made_up_state, make_ledger, time_callbacks
from bench.progress import Progress
from bench.recovery.environments import versions
from holdfast.coordinator.service.garbage import short_searches
from holdfast.coordinator.service.server import Coordinator
from holdfast.coordinator.service.store import Store
from holdfast.protocol import ledger
from holdfast.protocol.job import JobSpec, Resume
from holdfast.ui.server import loopback
from holdfast.web.application import routes
from holdfast.web.sessions import CODE_PATH

SILENT_S = 1.0
"""A stream has said what it had to when nothing came for so long."""
STAYS_S = 100_000.0
"""Of the failure detection: nodes without agents stay as they are while this measures."""


class Asked(NamedTuple):
    """A request."""

    method: str
    route: str
    """As the coordinator names it."""
    address: str
    body: str = ""


def requests(nodes: int, steps: int, incidents: int) -> list[Asked]:
    """One or more of each route."""
    panels = (
        "now", "incidents", "incidents?count=200", f"incident?id={incidents - 5}", "timeline", "decisions?count=200", "strip",
        "ranks", "ranks?q=waits&first=9000", "stall", "launches", "cost", "series", f"series?from=0&to={steps // 3}",
        "checkpoints", "samples", "log?worker=node1.0%239", "lines",
    )  # fmt: skip
    panel, act = "/api/v1/{name}", "/api/v1/act/{name}"
    return [
        *(Asked("GET", path, path) for path in ("/status", "/report", "/metrics", "/ledger", "/orders", "/description")),
        Asked("GET", "/news", "/news?seq=0&place=0"),
        Asked("GET", "/news", f"/news?seq={nodes + 2 * incidents}&place={steps}"),
        Asked("GET", "/watch", "/watch"),
        Asked("GET", r"/watch/{after:\d{1,18}}", f"/watch/{nodes + 2 * incidents}"),
        *(Asked("GET", path, path) for path in ("/", "/api/v1/jobs", "/api/v1/session")),
        Asked("GET", "/static/{path:.+}", "/static/vendor/uplot-1.6.32/uPlot.iife.min.js"),
        Asked("GET", "/api/v1/stream", "/api/v1/stream?after=0"),
        Asked("GET", "/api/v1/stream", f"/api/v1/stream?after={nodes + 2 * incidents}"),
        *(Asked("GET", panel, f"/api/v1/{name}") for name in panels),
        Asked("POST", act, "/api/v1/act/drain?dry=1", '{"node": "node7"}'),
        Asked("POST", act, "/api/v1/act/resize?dry=1", f'{{"nodes": "{nodes // 2}"}}'),
        Asked("POST", act, "/api/v1/act/stop?dry=1", "{}"),
        Asked("POST", CODE_PATH, f"{CODE_PATH}?role=view"),
    ]  # fmt: skip


LEFT_OUT = {
    "/agent": "an agent's connection",
    "/presence": "says nothing, and stays open",
    r"/watch/{after:\d{1,18}}/keep/{keeper:[0-9a-f]{1,32}}": "as /watch, and /ledger at the end",
    "/enter": "needs a code; answers with a cookie",
    **dict.fromkeys(("/check",), "runs on nodes"),
    **dict.fromkeys(
        ("/stop", "/fault", "/resize", "/drain", "/engine", "/clear", "/node"),
        "an event for the core, whose time is a decision's: see `bench.coordinator`",
    ),
}


def main() -> int:
    """Makes the job, asks everything, and prints a row for each request."""
    parser = argparse.ArgumentParser(prog="bench.requests", description=__doc__)
    add_sizes(parser)
    parser.add_argument("--times", type=int, default=20, help="each request (default: 20)")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="START", help="requests whose address starts so"
    )
    given = parser.parse_args()
    console = Console(width=130)
    what = f"{given.nodes} nodes, {given.nodes * PER_NODE} ranks, {given.steps} steps, {given.incidents} incidents"
    introduce(console, versions(Path(sys.executable), ["aiohttp", "msgspec"]), what)
    with tempfile.TemporaryDirectory() as folder, ForeignCpu() as cpu:
        job_dir = Path(folder) / "jobs/large"
        make_job(job_dir, given.nodes, given.steps, given.incidents)
        ours, theirs = multiprocessing.Pipe()
        server = multiprocessing.get_context("spawn").Process(target=serve, args=(job_dir, theirs))
        server.start()
        try:
            port, there = ours.recv()
            asked = requests(given.nodes, given.steps, given.incidents)
            if missing := set(there) - {one.route for one in asked} - set(LEFT_OUT):
                raise SystemExit(f"no request is made of {', '.join(sorted(missing))}")
            asked = [one for one in asked if not given.only or one.address.startswith(tuple(given.only))]
            token = (job_dir / "token").read_text()
            for line in asyncio.run(ask_all(asked, port, token, ours, given.times)):
                console.print(line, highlight=False, markup=False)
        finally:
            server.terminate()
            server.join(10)
    for route, why in LEFT_OUT.items():
        console.print(f"not asked: {route}: {why}", highlight=False, markup=False)
    conclude(console, cpu)
    return 0


def make_job(job_dir: Path, nodes: int, steps: int, incidents: int) -> None:
    """A job's folder as a launcher and a coordinator would have left it."""
    job_dir.mkdir(parents=True)
    (job_dir / "logs").mkdir()
    make_ledger(job_dir / "job.sqlite", nodes, steps, incidents)
    state = made_up_state(nodes)
    timing = dataclasses.replace(state.spec.timing, detection_s=STAYS_S)
    state.spec = msgspec.structs.replace(state.spec, timing=timing)
    for number in range(1, PER_NODE * nodes, 97):
        worker = state.membership.workers[f"node{number // PER_NODE}.{number % PER_NODE}#{number + 1}"]
        worker.log = str(job_dir / "logs" / "one.log")
    (job_dir / "logs/one.log").write_text("a line of a worker's log\n" * 50_000)
    with closing(Store(job_dir / "job.sqlite")) as store:
        store.save(state)
    (job_dir / "spec.json").write_bytes(msgspec.json.encode(state.spec))
    (job_dir / "identity").write_text("0123abcd")
    (job_dir / "token").write_text(secrets.token_urlsafe(32))
    (job_dir / "token").chmod(0o600)


# ---------------------------------------------------------------- the coordinator's process


def serve(job_dir: Path, pipe: Any) -> None:
    """Serves the job, and answers on the pipe. news: an entry is written; held: milliseconds of the callbacks since."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(_serve(job_dir, pipe))


async def _serve(job_dir: Path, pipe: Any) -> None:
    loop = asyncio.get_running_loop()
    spec = msgspec.json.decode((job_dir / "spec.json").read_bytes(), type=JobSpec)
    coordinator = Coordinator(job_dir, spec, Resume())
    listener = loopback(0)
    held: list[float] = []
    slow: list[str] = []
    time_callbacks(held, slow)
    with short_searches():  # as in the coordinator's own process
        serving = asyncio.create_task(coordinator.serve(listener, "127.0.0.1"))
        there = [r.path for r in (*coordinator._routes.all(), *routes(None, None))]  # type: ignore[arg-type]
        pipe.send((listener.getsockname()[1], [*there, "/agent", CODE_PATH]))
        while not serving.done():
            asked = await loop.run_in_executor(None, pipe.recv)
            if asked == "news":
                coordinator._loop.note(ledger.History(reason="a measurement"))
                await coordinator._ledger.written(60)
                held.clear()
                slow.clear()
                pipe.send(None)
            else:
                pipe.send((list(held), list(slow)))
        serving.result()


# ---------------------------------------------------------------- who asks


async def ask_all(asked: Sequence[Asked], port: int, token: str, pipe: Any, times: int) -> list[str]:
    """A row for each request, the worst first."""
    headers = {"Authorization": f"Bearer {token}"}
    url, rows = f"http://127.0.0.1:{port}", []
    limits, progress = aiohttp.ClientTimeout(total=None), Progress()
    async with aiohttp.ClientSession(headers=headers, timeout=limits) as client:
        # The first look takes the whole ledger in. It is a row of its own.
        for what, turns in (("nothing: the job by itself", times), ("the first look of all", 1)):
            row = _Row(what, [], [], [])
            for _ in range(turns):
                timeline = Asked("GET", "", "/api/v1/timeline")
                await _one(pipe, row, _nothing() if turns > 1 else _get(client, url, timeline, row.nbytes))
            rows.append(row)
        for one in asked:
            progress(f"asks for {one.address}")
            row = _Row(f"{one.method} {one.address}", [], [], [])
            for _ in range(times):
                await _one(pipe, row, _get(client, url, one, row.nbytes))
            rows.append(row)
    first, measured = rows[:2], sorted(rows[2:], key=lambda row: -max(row.held))
    slow = sum(h > SLOW_MS for row in measured for h in row.held)
    every = [h for row in measured for h in row.held]
    head = f"{'request':<60}{'kB':>9}{'callbacks':>11}{'longest':>11}{'p99':>11}"
    last = (
        f"{slow} of {len(every)} callbacks held the loop for more than {SLOW_MS:g} ms of processor; the longest "
        f"{max(every):.1f} ms, p99 {_percentile(every, 99):.2f} ms"
    )
    why = [f"  {row.what}: {line}" for row in measured for line in row.slow]
    return [head, *(row.line() for row in (*first, *measured)), last, *why]


class _Row(NamedTuple):
    what: str
    nbytes: list[int]
    held: list[float]
    slow: list[str]

    def line(self) -> str:
        longest, most = max(self.held, default=0.0), _percentile(self.held, 99)
        return f"{self.what[:58]:<60}{max(self.nbytes, default=0) / 1e3:>9,.0f}{len(self.held):>11,}{longest:>8.2f} ms{most:>8.2f} ms"


def _percentile(values: Sequence[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else 0.0


async def _one(pipe: Any, row: _Row, request: Any) -> None:
    """Adds the milliseconds of each callback while this was asked, and what the slow ones were."""
    await asyncio.to_thread(_say, pipe, "news")
    await request
    held, slow = await asyncio.to_thread(_say, pipe, "held")
    row.held.extend(held)
    row.slow.extend(slow)


def _say(pipe: Any, what: str) -> Any:
    pipe.send(what)
    return pipe.recv()


async def _nothing() -> None:
    await asyncio.sleep(0.1)


async def _get(client: aiohttp.ClientSession, url: str, one: Asked, nbytes: list[int]) -> None:
    address, count = f"{url}{one.address}", 0
    if one.address.startswith("/watch"):
        async with client.ws_connect(address, max_msg_size=0) as socket:
            while (message := await _within(socket.receive())) is not None:
                count += len(message.data or b"") if isinstance(message.data, bytes | str) else 0
    else:
        async with client.request(one.method, address, data=one.body or None) as answer:
            if answer.status != 200:
                raise SystemExit(f"{one.address}: {answer.status} {await answer.text()}")
            endless = "/stream" in one.address
            while chunk := await (_within(answer.content.readany()) if endless else answer.content.readany()):
                count += len(chunk)
    nbytes.append(count)


async def _within(coming: Any) -> Any:
    """What comes; None: it has become silent."""
    try:
        return await asyncio.wait_for(coming, SILENT_S)
    except TimeoutError:
        return None


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
