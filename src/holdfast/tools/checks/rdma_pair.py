"""RDMA between this node and one other: `ib_write_bw` of perftest on every rail, one way and then the other.

The two ends first meet over TCP, where both prove to be of the same job. There they agree on rails (ports of the same
name, the fastest that both have), and in each turn one of them starts the tool as its server and sends its port.
"""

from __future__ import annotations

import math
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from holdfast.health.checks.check import CannotCheck, Task
from holdfast.protocol.health import CheckResult, Condition
from holdfast.protocol.network.sockets import host_and_port, listening
from holdfast.protocol.wire.decoding import decode
from holdfast.tools.checks.network import MEET_S, RETRY_S, accept, connect
from holdfast.tools.checks.rdma import Port, gid_index, read_ports

TOOL = "ib_write_bw"
EFA = "efa"
SPARE_S = 20.0
"""How much longer than its measurement the tool may take, in seconds: it registers memory and connects."""

LONGEST_BYTES = 1 << 20
_ROW = re.compile(r"^\s*\d+\s+\d+\s+[\d.]+\s+([\d.]+)(?:\s+[\d.]+)?\s*$", re.MULTILINE)
"""The columns of the result: message size, iterations, peak, mean (Gb/s), messages per second."""

_WAY_IS_BAD = re.compile(
    r"completion with error|failed status|retry.*exceeded|failed to modify QP|to RT[RS]\b|unable to connect the HCA",
    re.IGNORECASE,
)
"""The tool's messages when packets do not arrive. Any other failure proves nothing about the network."""

_NOBODY_THERE = re.compile(r"couldn't connect", re.IGNORECASE)


class Rail(msgspec.Struct, frozen=True):
    """A port that may be measured."""

    device: str
    port: int
    gbps: float
    """Speed of its link."""
    gid: int | None = None
    """Index of the address to use; None: the tool's own choice."""

    @property
    def name(self) -> str:
        """The name of the rail, which both ends use."""
        return f"{self.device} port {self.port}"


class Offer(msgspec.Struct, frozen=True):
    """What one end has for the measurement."""

    rails: tuple[Rail, ...] = ()
    why: str = ""
    """Why it cannot take part; empty: it can."""


class ServerReady(msgspec.Struct, frozen=True):
    """The tool runs as the server, on this TCP port."""

    port: int


class ClientResult(msgspec.Struct, frozen=True):
    """The measurement of the client in a turn."""

    bytes_per_s: float | None
    """0: nothing arrived; None: it could not be measured."""
    why: str = ""
    """Why it could not be measured; else empty."""


def check_rdma_pair(task: Task, root: Path = Path("/")) -> Iterator[CheckResult]:
    """With the one other node of the task: the end with a port listens, the other one connects and reports."""
    (peer,) = task.peers
    seconds = max(1, math.ceil(task.seconds / 2))
    if task.port:
        with listening(task.host, task.port) as server:
            server.settimeout(MEET_S)
            try:
                end = _End(accept(server, task.token), peer.host, seconds, root)
            except OSError as error:
                raise CannotCheck(f"{peer.node} did not connect: {error}") from None
        with end:
            end.measure(listener=True)
        return
    try:
        end = _End(connect(peer.host, peer.port, task.token), peer.host, seconds, root)
    except OSError as error:
        raise CannotCheck(f"{peer.node} at {host_and_port(peer.host, peer.port)}: {error}") from None
    with end:
        measured = end.measure(listener=False)
    yield judge_rails(measured, peer.node)


def judge_rails(measured: Sequence[tuple[Rail, ClientResult]], other: str) -> CheckResult:
    """The result of the slowest rail, in its slower direction."""
    failed = [f"{rail.name}: {o.why or 'not measured'}" for rail, o in measured if o.bytes_per_s is None]
    if failed:
        raise CannotCheck("; ".join(failed))
    rail, worst = min(measured, key=lambda x: x[1].bytes_per_s or 0.0)
    rate = worst.bytes_per_s or 0.0
    rails = len({rail.name for rail, _ in measured})
    speed = f"{rail.name}{f', the slowest of {rails}' if rails > 1 else ''}: {8 * rate / 1e9:.0f} of {rail.gbps:g} Gb/s"
    condition = Condition.HEALTHY if rate else Condition.FAULTY
    detail = "; ".join(filter(None, (speed, worst.why)))
    return CheckResult(
        name="rdma-pair",
        condition=condition,
        detail=detail,
        value=round(rate / 1e9, 4),
        unit="GB/s",
        with_node=other,
    )


def offer(ports: Sequence[Port]) -> Offer:
    """The fastest of the active ports: slower ones are for other traffic."""
    # EFA lacks the reliable queue pairs that the tool needs.
    active = [p for p in ports if p.active and p.driver != EFA]
    if not active:
        efa = any(p.driver == EFA for p in ports)
        return Offer(why=f"{TOOL} is not for EFA" if efa else f"no active port for {TOOL}")
    if shutil.which(TOOL) is None:
        return Offer(why=f"there is no {TOOL}: install perftest")
    fastest = max(p.rate_gbps for p in active)
    rails = [Rail(p.device, p.number, p.rate_gbps, gid_index(p)) for p in active if p.rate_gbps == fastest]
    return Offer(tuple(rails))


def common(here: Offer, there: Offer) -> list[Rail]:
    """This end's rails that the other end has as well, by their names; if no name is the same, by their order."""
    theirs = {rail.name for rail in there.rails}
    same = [rail for rail in here.rails if rail.name in theirs]
    # Names differ between generations of machines; then the order of the slots is the best guess of which
    # rails share a switch.
    return same or list(here.rails[: len(there.rails)])


T = TypeVar("T")


class _End:
    """One end of a pair. Both go through the same turns, so one waits while the other acts."""

    def __init__(self, connection: socket.socket, other: str, seconds: int, root: Path) -> None:
        self._connection, self._other, self._seconds, self._root = connection, other, seconds, root
        # As long as the other side's slowest turn may take: it answers nothing while its tool runs.
        connection.settimeout(MEET_S + SPARE_S + seconds)
        self._file: BinaryIO = connection.makefile("rb")

    def __enter__(self) -> _End:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()
        self._connection.close()

    def measure(self, listener: bool) -> list[tuple[Rail, ClientResult]]:
        """Every rail, both directions.

        Raises:
            CannotCheck: one end has nothing to measure with, or is lost.
        """
        mine = offer(read_ports(self._root))
        try:
            self._send(mine)
            theirs = self._hear(Offer)
            if why := mine.why or (f"the other end: {theirs.why}" if theirs.why else ""):
                raise CannotCheck(why)
            return self._turns(common(mine, theirs), listener)
        except (OSError, msgspec.DecodeError) as error:
            raise CannotCheck(f"the other end was lost: {error}") from None

    def _turns(self, rails: Sequence[Rail], listener: bool) -> list[tuple[Rail, ClientResult]]:
        """Runs the turns until one fails: that is sufficient as an answer, and the others might take as long to fail."""
        done: list[tuple[Rail, ClientResult]] = []
        for rail in rails:
            for serves in (listener, not listener):
                outcome = self._serve(rail) if serves else self._call(rail)
                done.append((rail, outcome))
                if not outcome.bytes_per_s:
                    return done
        return done

    def _serve(self, rail: Rail) -> ClientResult:
        """Runs the tool as the server. It exits when its client has; without a client it is ended."""
        # The tool cannot choose a free port and report it, so the kernel gives one, which is closed again
        # right before the tool binds it.
        with socket.create_server(("", 0)) as free:
            port = free.getsockname()[1]
        with subprocess.Popen(
            self._command(rail, port), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as tool:
            try:
                self._send(ServerReady(port))
                return self._hear(ClientResult)
            finally:
                tool.kill()

    def _call(self, rail: Rail) -> ClientResult:
        ready = self._hear(ServerReady)
        outcome = self._try(self._command(rail, ready.port, self._other))
        self._send(outcome)
        return outcome

    def _try(self, command: Sequence[str]) -> ClientResult:
        """Retries, because no event announces that the server listens."""
        until_s = time.monotonic() + MEET_S
        while True:
            try:
                ran = subprocess.run(
                    command,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                    timeout=self._seconds + SPARE_S,
                )
            except subprocess.TimeoutExpired:
                return ClientResult(0.0, f"{TOOL} did not end")
            # The peer says Ready before its tool listens, because the tool prints nothing when it does. So
            # the first attempts may come too early, and only they are repeated.
            if not _NOBODY_THERE.search(ran.stdout) or time.monotonic() > until_s:
                return read_outcome(ran.returncode, ran.stdout)
            time.sleep(RETRY_S)

    def _command(self, rail: Rail, port: int, host: str = "") -> list[str]:
        command = [TOOL, "-d", rail.device, "-i", str(rail.port), "-p", str(port), "-F", "--report_gbits"]
        command += ["-D", str(self._seconds)]
        if rail.gid is not None:
            command += ["-x", str(rail.gid)]
        return [*command, host] if host else command

    def _send(self, message: msgspec.Struct) -> None:
        self._connection.sendall(msgspec.json.encode(message) + b"\n")

    def _hear(self, kind: type[T]) -> T:
        line = self._file.readline(LONGEST_BYTES)
        if not line.endswith(b"\n"):
            raise ConnectionError("it closed the connection")
        read = partial(msgspec.json.decode, type=kind)
        received: T = decode(read, line, "what it says cannot be read", error=ConnectionError)
        return received


def read_outcome(code: int, text: str) -> ClientResult:
    """Parses the output of the tool's client."""
    rows = _ROW.findall(text)
    if code == 0 and rows:
        return ClientResult(float(rows[-1]) * 1e9 / 8)
    lines = [line.strip() for line in text.splitlines() if line.strip(" -*")]
    why = f"{TOOL} ended with exit code {code}: {lines[-1][:200] if lines else 'no output'}"
    # Zero is a fault of the link; None means that it could not be measured. A missing module or a full table
    # of registrations must not count as a broken network.
    return ClientResult(0.0 if _WAY_IS_BAD.search(text) else None, why)
