"""The network: to this machine itself, and to one other node. Plain TCP, one connection, both directions, with a
checksum of all bytes.

It measures the sockets that a training job uses, not the capability of the card: for RDMA see `rdma_pair`.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import statistics
import struct
import threading
import time
from collections.abc import Iterator

import xxhash

from holdfast.health.checks.check import CannotCheck, Task
from holdfast.health.checks.pairs import Measured
from holdfast.protocol.health import CheckResult, Condition
from holdfast.protocol.network.proof import is_same
from holdfast.protocol.network.sockets import host_and_port, listening

BLOCK_BYTES = 1 << 20
ROUNDS = 3
ECHOES = 200
ECHO_BYTES = 64
NONCE_BYTES = 16
MEET_S = 20.0
"""How long one end waits for the other, in seconds: both are asked at about the same time."""

RETRY_S = 0.05
SILENT_S = 10.0
_LENGTH = struct.Struct("!I")
_END = struct.Struct("!QQ")


def check_loopback(task: Task) -> Iterator[CheckResult]:
    """Through this machine's own address and back, the best of three."""
    # The best of three, because a machine that trains at the same time is not slow for that. Load never
    # changes bytes, so bytes that came back changed are a fault the first time.
    rounds = [_to_itself(task.host, task.seconds / 4 / ROUNDS) for _ in range(ROUNDS)]
    damaged = next((one for one in rounds if one.damaged), None)
    yield _result("loopback", damaged or max(rounds, key=lambda one: one.bytes_per_s or 0.0), "")


def _to_itself(host: str, seconds: float) -> Measured:
    token = secrets.token_hex(8)
    with listening(host) as server:
        port = server.getsockname()[1]
        serving = threading.Thread(target=_serve_quietly, args=(server, token, seconds), daemon=True)
        serving.start()
        measured = connect_and_measure(host, port, token, seconds)
        serving.join(SILENT_S)
    return measured


def check_pair(task: Task) -> Iterator[CheckResult]:
    """With the one other node of the task: the end with a port listens, the other one connects and reports."""
    (peer,) = task.peers
    if task.port:
        with listening(task.host, task.port) as server:
            server.settimeout(MEET_S)
            try:
                serve(server, task.token, task.seconds / 2)
            except OSError as error:
                raise CannotCheck(f"{peer.node} did not connect: {error}") from None
        return
    try:
        measured = connect_and_measure(peer.host, peer.port, task.token, task.seconds / 2)
    except OSError as error:
        where = f"{peer.node} at {host_and_port(peer.host, peer.port)}"
        yield CheckResult(
            name="pair",
            condition=Condition.FAULTY,
            detail=f"{where}: {error}",
            value=0.0,
            unit="GB/s",
            with_node=peer.node,
        )
        return
    yield _result("pair", measured, peer.node)
    yield CheckResult(
        name="pair-latency",
        condition=Condition.HEALTHY,
        detail="there and back",
        value=measured.latency_s,
        unit="s",
        lower=True,
        with_node=peer.node,
    )


def _result(name: str, measured: Measured, other: str) -> CheckResult:
    rate = (measured.bytes_per_s or 0.0) / 1e9
    latency = f"{measured.latency_s * 1e6:.0f} µs there and back"
    condition = Condition.FAULTY if measured.damaged else Condition.HEALTHY
    detail = "bytes came back changed" if measured.damaged else latency
    return CheckResult(
        name=name, condition=condition, detail=detail, value=round(rate, 4), unit="GB/s", with_node=other
    )


# ---------------------------------------------------------------- the two ends


def _serve_quietly(server: socket.socket, token: str, seconds: float) -> None:
    """For a thread: errors are reported by the other end."""
    server.settimeout(SILENT_S)
    try:
        serve(server, token, seconds)
    except OSError:
        return


def serve(server: socket.socket, token: str, seconds: float) -> None:
    """Waits for a peer that knows the token; echoes, receives, then sends for `seconds`."""
    with accept(server, token) as connection:
        # Latency first, on an idle connection; after the bulk transfers the buffers would still be draining.
        for _ in range(ECHOES):
            connection.sendall(_exactly(connection, ECHO_BYTES))
        _receive(connection)
        _send(connection, seconds)


def connect_and_measure(host: str, port: int, token: str, seconds: float) -> Measured:
    """The other end of `serve`. The slower direction counts.

    Raises:
        OSError: the other end is not there, does not answer, or is another program.
    """
    with connect(host, port, token) as connection:
        times = []
        for _ in range(ECHOES):
            began_s = time.perf_counter()
            connection.sendall(bytes(ECHO_BYTES))
            _exactly(connection, ECHO_BYTES)
            times.append(time.perf_counter() - began_s)
        sent, whole_there = _send(connection, seconds)
        received, whole_back = _receive(connection)
    return Measured(min(sent, received), statistics.median(times), damaged=not (whole_there and whole_back))


def connect(host: str, port: int, token: str) -> socket.socket:
    """Connects to a peer that accepts. No event announces that another machine listens, so it tries until it succeeds."""
    until_s = time.monotonic() + MEET_S
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=SILENT_S)
        except ConnectionRefusedError:
            if time.monotonic() > until_s:
                raise
            time.sleep(RETRY_S)
            continue
        try:
            # Small echoes would otherwise wait for the delayed acknowledgement of the one before: 40 ms
            # instead of microseconds.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(_proof(token, _exactly(connection, NONCE_BYTES)))
        except BaseException:
            connection.close()
            raise
        return connection


def accept(server: socket.socket, token: str) -> socket.socket:
    """The first connection that proves to belong to the job; others are closed."""
    while True:
        connection, _ = server.accept()
        connection.settimeout(SILENT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        nonce = secrets.token_bytes(NONCE_BYTES)
        try:
            connection.sendall(nonce)
            given = _exactly(connection, hashlib.sha256().digest_size)
        except OSError:
            connection.close()
            continue
        # Proved before a byte is echoed: the port is open to everybody for twenty seconds, and echoing to
        # strangers would let them load this network.
        if is_same(given, _proof(token, nonce)):
            return connection
        connection.close()


def _proof(token: str, nonce: bytes) -> bytes:
    return hmac.digest(token.encode(), b"holdfast pair " + nonce, "sha256")


def _send(connection: socket.socket, seconds: float) -> tuple[float, bool]:
    """Sends for `seconds`; returns bytes per second, and whether the other end received what was sent."""
    block = secrets.token_bytes(BLOCK_BYTES)
    digest = xxhash.xxh3_64()
    nbytes, began_s = 0, time.perf_counter()
    while not nbytes or time.perf_counter() - began_s < seconds:
        connection.sendall(_LENGTH.pack(len(block)))
        connection.sendall(block)
        # TCP's own checksum has 16 bits and is often computed by the card that is in question; so all bytes
        # are summed up end to end.
        digest.update(block)
        nbytes += len(block)
    connection.sendall(_LENGTH.pack(0))
    # The time ends when the other side confirms that it has everything. Ended with the last send, it would
    # measure the socket's buffer.
    got_bytes, got_digest = _END.unpack(_exactly(connection, _END.size))
    took_s = time.perf_counter() - began_s
    return nbytes / took_s, (got_bytes, got_digest) == (nbytes, digest.intdigest())


def _receive(connection: socket.socket) -> tuple[float, bool]:
    """Receives what `_send` sends, and confirms it with its length and checksum. Lengths are bounded, because the other
    end may be any program."""
    digest = xxhash.xxh3_64()
    buffer = bytearray(BLOCK_BYTES)
    view = memoryview(buffer)
    nbytes, began_s = 0, time.perf_counter()
    while length := _LENGTH.unpack(_exactly(connection, _LENGTH.size))[0]:
        # Checked before anything is received: the length is only the peer's claim.
        if length > BLOCK_BYTES:
            raise ConnectionError("the data received is not a block of this check")
        _into(connection, view[:length])
        digest.update(view[:length])
        nbytes += length
    took_s = time.perf_counter() - began_s
    connection.sendall(_END.pack(nbytes, digest.intdigest()))
    return nbytes / took_s, True


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray(count)
    _into(connection, memoryview(data))
    return bytes(data)


def _into(connection: socket.socket, view: memoryview) -> None:
    while view:
        count = connection.recv_into(view)
        if not count:
            raise ConnectionError("the other end closed the connection")
        view = view[count:]
