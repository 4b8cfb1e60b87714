"""A listening socket that authenticates its callers, and an HTTP server on one.

Connections are accepted immediately and wait, bounded in number, bytes and time, until they authenticate. One thread reads from
all of them in turn, so a caller that sends nothing, or never stops sending, delays nobody else. Only where callers outnumber
the bound do the later ones wait in the kernel's queue, and each caller still gets the time to send its first byte.

`http.server` gives every connection a thread, which reads the request without a bound in time or number. Here a request gets
a thread only when its head is complete.
"""

from __future__ import annotations

import io
import logging
import resource
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from holdfast import logs
from holdfast.errors import ProtocolError
from holdfast.protocol.network.sockets import listening

FIRST_READ_S = 2.0
"""Seconds that a caller has to send its first bytes (a hello, the head of a request) completely."""
BACKLOG = 4096
"""Connections that the kernel holds for a thread that has not got its turn; it allows `net.core.somaxconn` at most."""
FIRST_BYTE_S = 0.1
"""Seconds that a caller has at least to begin to send, however many others there are: it may lose its processor after it
connected. Accepting pauses for as long when the queue is full and no connection in it may be dropped yet."""
BATCH = 64
"""Connections that are accepted before those that wait are read from again."""
READ_BYTES = 4096
_log = logging.getLogger(__name__)
EXPECTED = (OSError, ProtocolError)
"""Errors that bytes of strangers, and callers that leave, may cause. Others are mistakes of ours, and are logged."""

Missing = Callable[[bytearray], int]
"""Given what was received, the number of bytes to read at most until the first message is complete; 0: it is. Raises an error if
it cannot become a valid one."""
Accept = Callable[[socket.socket, bytes], bool]
"""Takes a non-blocking connection with its complete first message. Must not block. False, or an error: the connection is closed."""


@dataclass
class _Caller:
    """A connection that has not authenticated yet. Times are of `time.monotonic`."""

    until_s: float
    """When it is dropped."""
    safe_until_s: float
    """Until then it is not dropped to make room for another one."""
    received: bytearray = field(default_factory=bytearray)


class AuthenticatingListener:
    """Accepts the connections of a listening socket until it is closed.

    A thread of its own survives whatever callers do, and a process without room for descriptors. An error that leaves it no
    way to go on ends the process: a process that nobody can reach any more must not look healthy.
    """

    def __init__(self, server: socket.socket, name: str, missing: Missing, accept: Accept) -> None:
        """server: listening; it is closed with this. name: of the thread. missing, accept: called from that thread."""
        # The thread must never wait in accept: a connection may be gone between the report of select and the
        # call.
        server.setblocking(False)
        self._server = server
        self._missing, self._accept = missing, accept
        self._most = most_unproven()
        # A dict keeps the order of arrival, and all callers have the same time, so the first one is always
        # the next to be dropped. No heap is needed.
        self._unproven: dict[socket.socket, _Caller] = {}
        self._paused_until_s: float | None = None
        self._waited = 0
        """Callers at the head of the kernel's queue that have had FIRST_BYTE_S there: those that came before the last pause."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)
        # A socket and not a flag: the thread sleeps in select, and has to be woken from there.
        self._wake, woken = socket.socketpair()
        self._selector.register(woken, selectors.EVENT_READ)
        self._woken = woken
        self._logged: set[type[Exception]] = set()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Accepts no more connections, and drops those that have not authenticated. Returns when the port is free."""
        with suppress(OSError):
            self._wake.send(b"x")
        # Closed means that the port is free: a successor in this process may listen on it at once.
        self._thread.join()
        self._wake.close()

    # ------------------------------------------------------------ its thread

    def _serve(self) -> None:
        try:
            while self._round():
                pass
        # No way back from here: without this thread nobody can connect any more, while the rest of the
        # process would look healthy for ever. Exit code 70 is EX_SOFTWARE of sysexits.h.
        except BaseException:  # noqa: BLE001 - nothing of a caller's comes here; see the class
            _log.critical("the thread %s cannot go on: this process ends", self._thread.name, exc_info=True)
            logs.exit_now(70)
        for sock in [*self._unproven, self._server, self._woken]:
            sock.close()
        self._selector.close()

    def _round(self) -> bool:
        """Waits until a socket is ready or a deadline passes, and handles it; False when `close` was called."""
        for key, _ in self._selector.select(self._quiet_s()):
            if key.fileobj is self._woken:
                return False
            if key.fileobj is self._server:
                self._accept_callers()
            # It may have been dropped to make room earlier in the same round, and its socket is closed then.
            elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._unproven:
                self._read(key.fileobj)
        now = time.monotonic()
        # Deadlines after events: what has just arrived from a caller is read before the caller is dropped.
        while self._unproven and next(iter(self._unproven.values())).until_s <= now:
            self._drop(next(iter(self._unproven)))
        if self._paused_until_s is not None and now >= self._paused_until_s:
            self._paused_until_s = None
            self._selector.register(self._server, selectors.EVENT_READ)
        return True

    def _quiet_s(self) -> float | None:
        """Until the next deadline."""
        until_s = [next(iter(self._unproven.values())).until_s] if self._unproven else []
        until_s += [self._paused_until_s] if self._paused_until_s is not None else []
        return max(0.0, min(until_s) - time.monotonic()) if until_s else None

    def _accept_callers(self) -> None:
        # Bounded, or a flood of new callers would keep the thread here, and nothing would be read from those
        # that were accepted.
        for _ in range(BATCH):
            if len(self._unproven) >= self._most and not self._may_make_room():
                return self._pause()
            try:
                sock, _ = self._server.accept()
            except BlockingIOError:
                self._waited = 0
                return None
            except ConnectionAbortedError:
                continue
            except OSError:
                # No descriptor or no memory is left, and select would report the same caller again and again. One that
                # has sent nothing makes room: a member of the job sends at once, so it is a stranger in all likelihood.
                if not self._may_make_room():
                    return self._pause()
                self._drop(next(iter(self._unproven)))
                continue
            sock.setblocking(False)
            now = time.monotonic()
            self._unproven[sock] = _Caller(now + FIRST_READ_S, now if self._waited else now + FIRST_BYTE_S)
            self._waited = max(0, self._waited - 1)
            # Members send their first message with the connection, so they are served in this very call. A
            # crowd that sends nothing cannot push them out.
            self._read(sock)
            if sock in self._unproven:
                self._selector.register(sock, selectors.EVENT_READ)
            if len(self._unproven) > self._most:
                self._drop(next(iter(self._unproven)))
        return None

    def _may_make_room(self) -> bool:
        """Whether the connection that has waited for longest has had FIRST_BYTE_S, so that it may be dropped."""
        return bool(self._unproven) and next(iter(self._unproven.values())).safe_until_s <= time.monotonic()

    def _pause(self) -> None:
        """Leaves callers in the kernel's queue for FIRST_BYTE_S.

        Afterwards all that were accepted, and all that are in the kernel's queue now, have had that time. So they are
        accepted one after the other without another pause: a crowd of thousands delays a member by two pauses, however often
        it fills our queue.
        """
        self._waited = _queued(self._server)
        self._selector.unregister(self._server)
        self._paused_until_s = time.monotonic() + FIRST_BYTE_S

    def _read(self, sock: socket.socket) -> None:
        received = self._unproven[sock].received
        try:
            while (most := self._missing(received)) > 0:
                data = sock.recv(min(most, READ_BYTES))
                if not data:
                    break
                received += data
            else:
                # Removed before it is handed over: from here on the socket belongs to another thread, and this
                # one must not read from it.
                self._remove(sock)
                if not self._accept(sock, bytes(received)):
                    sock.close()
                return
        except BlockingIOError:
            return
        # A parser that fails on a stranger's bytes costs that stranger its connection, and nobody else
        # anything.
        except Exception as error:  # noqa: BLE001 - whatever a stranger's bytes cause is at its own cost
            self._log_once(error)
        self._drop(sock)

    def _drop(self, sock: socket.socket) -> None:
        self._remove(sock)
        sock.close()

    def _remove(self, sock: socket.socket) -> None:
        self._unproven.pop(sock, None)
        with suppress(KeyError):  # its first message came with the connection: see `_accept_callers`
            self._selector.unregister(sock)

    def _log_once(self, error: Exception) -> None:
        """Logs an error that no caller should be able to cause; each type once, not for every packet of a flood."""
        if not isinstance(error, EXPECTED) and type(error) not in self._logged:
            self._logged.add(type(error))
            _log.error("%s: a caller was sent away: %r", self._thread.name, error)


def _queued(server: socket.socket) -> int:
    """Connections that the kernel holds for a listening socket: `tcpi_unacked` of its `struct tcp_info`."""
    found: int = struct.unpack_from("I", server.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 28), 24)[0]
    return found


def most_unproven() -> int:
    """Connections that may wait for authentication: enough that a crowd does not push out a member that connects now, and at
    most an eighth of the descriptors that the process may open."""
    # Read when the listener starts, after `raise_descriptor_limit`: an eighth leaves room for the members' own
    # connections and files.
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1024 if soft == resource.RLIM_INFINITY else max(32, min(1024, soft // 8))


HEAD_BYTES = 8192


class HttpListener:
    """Serves HTTP until closed. The head of a connection's first request is read by the listener's one thread, everything after it
    by the connection's own."""

    def __init__(
        self, host: str, name: str, handler: Callable[[socket.socket, bytes], object], port: int = 0
    ) -> None:
        """name: of the listener's thread. handler: answers all requests of a connection, given what it sent so far. port: 0
        is one that is free."""
        server = listening(host, port, BACKLOG)
        self.port: int = server.getsockname()[1]
        self._name, self._handler = name, handler
        self._listener = AuthenticatingListener(server, name, head_missing, self._start_thread)

    def close(self) -> None:
        """Accepts no more connections. Requests that are being answered go on."""
        self._listener.close()

    def _start_thread(self, sock: socket.socket, head: bytes) -> bool:
        # A thread per connection, and only now: it has proved itself or is about to be refused in one answer,
        # so strangers cannot collect threads.
        threading.Thread(
            target=self._handle, args=(sock, head), name=f"{self._name}-request", daemon=True
        ).start()
        return True

    def _handle(self, sock: socket.socket, head: bytes) -> None:
        sock.setblocking(True)
        with sock, suppress(OSError):  # a reader that leaves is no news
            self._handler(sock, head)
            # The end is announced explicitly; a reference to the socket elsewhere would otherwise keep the
            # connection open.
            sock.shutdown(socket.SHUT_RDWR)


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of one connection. Whoever shows no knowledge of the token gets one answer and no second request."""

    protocol_version = "HTTP/1.1"

    def __init__(self, sock: socket.socket, head: bytes) -> None:
        self._head = head
        super().__init__(sock, sock.getpeername(), None)  # type: ignore[arg-type]  # there is no socketserver

    def setup(self) -> None:
        """Puts what the listener has read before the rest of the connection."""
        super().setup()
        self.rfile.close()
        # `http.server` reads from a file. This one returns what the listener has read and then goes on
        # with the socket, so nothing is parsed twice.
        self.rfile = io.BufferedReader(_ReadAhead(self._head, self.connection))

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing: a flood of requests is no flood of lines."""
        return


class _ReadAhead(io.RawIOBase):
    """A socket as a raw stream, preceded by the bytes that were read from it already."""

    def __init__(self, head: bytes, sock: socket.socket) -> None:
        self._head_left = memoryview(head)
        self._sock = sock

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._head_left:
            return self._sock.recv_into(buffer)
        count = min(len(buffer), len(self._head_left))
        buffer[:count], self._head_left = self._head_left[:count], self._head_left[count:]
        return count


def head_missing(received: bytearray) -> int:
    """A `Missing` for the head of an HTTP request, and whatever came with it."""
    if b"\r\n\r\n" in received:
        return 0
    # A head without end. Real ones of ours have some 300 bytes.
    if len(received) >= HEAD_BYTES:
        raise ProtocolError(f"the head of a request has more than {HEAD_BYTES} bytes")
    return HEAD_BYTES - len(received)
