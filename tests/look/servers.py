"""Real servers that look at a job: Prometheus and Alertmanager on ports of their own, and who they send to."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
LOOK_S = 0.3


def program(name: str) -> str:
    """A server's program, from the folder PROM_BIN if that has it, else as Debian's package has it."""
    own = Path(os.environ.get("PROM_BIN", "/nowhere")) / name
    found = str(own) if own.exists() else shutil.which(name)
    assert found, f"there is no {name}: `make look-test` installs it"
    return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def until(what: Callable[[], T | None], why: str, within_s: float = 90.0) -> T:
    """Asks another program's server until it has an answer: it tells of no change by itself."""
    ends_at = time.monotonic() + within_s
    while time.monotonic() < ends_at:
        try:
            if (found := what()) is not None:
                return found
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            pass
        time.sleep(LOOK_S)
    raise AssertionError(f"not within {within_s} s: {why}")


@contextmanager
def running(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)


class Prometheus:
    """Its HTTP interface."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def get(self, path: str, **query: str) -> Any:
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            if error.code == 503:  # it listens, and has not read its disk yet
                raise ConnectionError(f"{path}: not ready") from None
            raise AssertionError(f"{path} {query}: {error.read().decode()}") from None

    def rows(self, expr: str) -> list[dict[str, Any]]:
        return self.get("query", query=expr)["result"]


@contextmanager
def prometheus(folder: Path, config: str) -> Iterator[Prometheus]:
    port = free_port()
    (folder / "prometheus.yml").write_text(config)
    command = [
        program("prometheus"),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--enable-feature=exemplar-storage",
    ]
    with running(command, folder / "prometheus.log"):
        yield Prometheus(port)


@contextmanager
def alertmanager(folder: Path, webhook: str) -> Iterator[int]:
    """Sends every group of alerts to a webhook at once."""
    port = free_port()
    receiver = {"name": "hook", "webhook_configs": [{"url": webhook}]}
    route = {"receiver": "hook", "group_wait": "1s", "group_interval": "1s", "group_by": ["holdfast_job"]}
    (folder / "alertmanager.yml").write_text(json.dumps({"route": route, "receivers": [receiver]}))
    command = [
        program("prometheus-alertmanager"),
        f"--config.file={folder / 'alertmanager.yml'}",
        f"--storage.path={folder / 'alerts'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--cluster.listen-address=",
    ]
    with running(command, folder / "alertmanager.log"):
        yield port


class Heard:
    """What came to a server of the test: bodies of POSTs. A GET is answered with `page`."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.page = ""
        self.status = 200
        self.news = threading.Condition()
        heard = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                with heard.news:
                    heard.bodies.append(body)
                    heard.headers.append(dict(self.headers))
                    heard.news.notify_all()
                self.send_response(heard.status)
                self.end_headers()

            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.end_headers()
                self.wfile.write(heard.page.encode())

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def wait_for(self, what: Callable[[list[bytes]], bool], within_s: float = 60.0) -> None:
        with self.news:
            assert self.news.wait_for(lambda: what(self.bodies), within_s), self.bodies


@contextmanager
def listener() -> Iterator[Heard]:
    heard = Heard()
    serving = threading.Thread(target=heard.server.serve_forever)
    serving.start()
    try:
        yield heard
    finally:
        heard.server.shutdown()
        serving.join()
        heard.server.server_close()
