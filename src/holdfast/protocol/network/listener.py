"""A listening socket that authenticates its callers, and an HTTP server on one.

Connections are accepted immediately and wait, bounded in number, bytes and time, until they authenticate. One thread reads from
all of them in turn, so a caller that says nothing, or something endless, keeps nobody else waiting. Only where callers
outnumber the bound do the later ones wait for their turn, and then all have the time to begin to speak.

`http.server` gives every connection a thread and waits for its words there, without a bound in time or number. Here a request
has a thread only when its head is complete.
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

HEARD_S = 2.0
"""A caller has so long for all of its first words, however it spreads them."""
BACKLOG = 4096
"""Connections that the kernel holds for a thread that has not got its turn; it allows `net.core.somaxconn` at most."""
SPEAK_S = 0.1
"""After its connection a caller has at least so long to begin, however many others there are: it may lose its processor before it
has sent anything. The door is shut for as long when nobody may be sent away, or there is nobody who could make room."""
BATCH = 64
"""So many are let in before those who are in are heard again."""
READ_BYTES = 4096
_log = logging.getLogger(__name__)
EXPECTED = (OSError, ProtocolError)
"""What strangers' words, and callers that leave, bring about."""

Missing = Callable[[bytearray], int]
"""How many bytes may be read on to the end of the first words; 0: they are whole. Raises when they can be none."""
Enter = Callable[[socket.socket, bytes], bool]
"""Takes a connection, which does not block, with its first words, and must not wait. False, or an error: it is closed."""


@dataclass
class _Caller:
    """One who has not proven itself yet."""

    until_s: float
    """When it is sent away."""
    safe_until_s: float
    """Until then it is not sent away for another one."""
    received: bytearray = field(default_factory=bytearray)


class Door:
    """Accepts the connections of a listening socket until it is closed.

    A thread of its own survives whatever callers do, and a process without room for descriptors. An error that leaves it no
    way to go on ends the process: a process that nobody can reach any more must not look healthy.
    """

    def __init__(self, server: socket.socket, name: str, missing: Missing, enter: Enter) -> None:
        """server: listening; the door owns it. name: of the thread. missing, enter: called from that thread."""
        # The thread must never wait in accept: a connection may be gone between the report of select and the
        # call.
        server.setblocking(False)
        self._server = server
        self._missing, self._enter = missing, enter
        self._most = most_unproven()
        # A dict keeps the order of arrival, and all callers have the same time, so the first one is always
        # the next to be sent away. No heap is needed.
        self._hall: dict[socket.socket, _Caller] = {}
        self._shut_until_s: float | None = None
        self._waited = 0
        """Of the callers in the kernel's queue, so many had SPEAK_S there: those who came before the door was shut."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)
        # A socket and not a flag: the thread sleeps in select, and has to be woken from there.
        self._wake, woken = socket.socketpair()
        self._selector.register(woken, selectors.EVENT_READ)
        self._woken = woken
        self._blamed: set[type[Exception]] = set()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Lets nobody in any more. Returns when the port is free."""
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
        for sock in [*self._hall, self._server, self._woken]:
            sock.close()
        self._selector.close()

    def _round(self) -> bool:
        """Waits for news and sees to it; False when the door is to close."""
        for key, _ in self._selector.select(self._quiet_s()):
            if key.fileobj is self._woken:
                return False
            if key.fileobj is self._server:
                self._let_in()
            # The check against the hall is needed: letting somebody in may have sent this caller away earlier
            # in the same round, and its socket is closed.
            elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._hall:
                self._hear(key.fileobj)
        now = time.monotonic()
        # Deadlines after events: a caller whose last bytes have just arrived is heard before it is sent away.
        while self._hall and next(iter(self._hall.values())).until_s <= now:
            self._send_away(next(iter(self._hall)))
        if self._shut_until_s is not None and now >= self._shut_until_s:
            self._shut_until_s = None
            self._selector.register(self._server, selectors.EVENT_READ)
        return True

    def _quiet_s(self) -> float | None:
        """Until the next deadline."""
        until_s = [next(iter(self._hall.values())).until_s] if self._hall else []
        until_s += [self._shut_until_s] if self._shut_until_s is not None else []
        return max(0.0, min(until_s) - time.monotonic()) if until_s else None

    def _let_in(self) -> None:
        # Bounded, or a flood of new callers would keep the thread here, and those who are in the hall would
        # never be heard.
        for _ in range(BATCH):
            if len(self._hall) >= self._most and not self._may_make_room():
                return self._shut()
            try:
                sock, _ = self._server.accept()
            except BlockingIOError:
                self._waited = 0
                return None
            except ConnectionAbortedError:
                continue
            except OSError:
                # No descriptor or no memory is left, and select would report the same caller again and again. One that
                # has said nothing makes room: a member of the job speaks at once, so it is a stranger in all likelihood.
                if not self._may_make_room():
                    return self._shut()
                self._send_away(next(iter(self._hall)))
                continue
            sock.setblocking(False)
            now = time.monotonic()
            self._hall[sock] = _Caller(now + HEARD_S, now if self._waited else now + SPEAK_S)
            self._waited = max(0, self._waited - 1)
            # Members send their first words with the connection, so they are served in this very call. A
            # crowd that says nothing cannot push them out.
            self._hear(sock)
            if sock in self._hall:
                self._selector.register(sock, selectors.EVENT_READ)
            if len(self._hall) > self._most:
                self._send_away(next(iter(self._hall)))
        return None

    def _may_make_room(self) -> bool:
        """Whether the one who has been in the hall for longest has had the time to speak."""
        return bool(self._hall) and next(iter(self._hall.values())).safe_until_s <= time.monotonic()

    def _shut(self) -> None:
        """Leaves callers in the kernel's queue for SPEAK_S.

        Afterwards all who are in the hall, and in the queue now, have had that time. So they are let in one after the
        other without another pause, and a crowd of thousands delays a member by two pauses and not by one for each hall
        that it fills.
        """
        self._waited = _queued(self._server)
        self._selector.unregister(self._server)
        self._shut_until_s = time.monotonic() + SPEAK_S

    def _hear(self, sock: socket.socket) -> None:
        received = self._hall[sock].received
        try:
            while (most := self._missing(received)) > 0:
                data = sock.recv(min(most, READ_BYTES))
                if not data:
                    break
                received += data
            else:
                # Out of the hall before it is handed over: from here on the socket belongs to another thread,
                # and this one must not read from it.
                self._leave_hall(sock)
                if not self._enter(sock, bytes(received)):
                    sock.close()
                return
        except BlockingIOError:
            return
        # A parser that fails on a stranger's bytes costs that stranger its connection, and nobody else
        # anything.
        except Exception as error:  # noqa: BLE001 - whatever a stranger's words bring about is at its own cost
            self._blame(error)
        self._send_away(sock)

    def _send_away(self, sock: socket.socket) -> None:
        self._leave_hall(sock)
        sock.close()

    def _leave_hall(self, sock: socket.socket) -> None:
        self._hall.pop(sock, None)
        with suppress(KeyError):  # it had spoken before anybody waited for that
            self._selector.unregister(sock)

    def _blame(self, error: Exception) -> None:
        """What no caller should bring about is a mistake of ours; it is said once, not for every packet of a flood."""
        if not isinstance(error, EXPECTED) and type(error) not in self._blamed:
            self._blamed.add(type(error))
            _log.error("%s: a caller was sent away: %r", self._thread.name, error)


def _queued(server: socket.socket) -> int:
    """Connections that the kernel holds for a listening socket: `tcpi_unacked` of its `struct tcp_info`."""
    found: int = struct.unpack_from("I", server.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 28), 24)[0]
    return found


def most_unproven() -> int:
    """Callers in the hall at a time: so many that a crowd does not push out who has connected this very moment, and no more
    than an eighth of what the process may open."""
    # Read when the door opens, after `raise_descriptor_limit`: an eighth leaves room for the members' own
    # connections and files.
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1024 if soft == resource.RLIM_INFINITY else max(32, min(1024, soft // 8))


HEAD_BYTES = 8192


class HttpDoor:
    """Serves HTTP until closed: the first request of a connection is heard at the door, the others where it is answered."""

    def __init__(
        self, host: str, name: str, handler: Callable[[socket.socket, bytes], object], port: int = 0
    ) -> None:
        """name: of the thread at the door. handler: answers all requests of a connection, given what it sent so far.
        port: 0 is one that is free."""
        server = listening(host, port, BACKLOG)
        self.port: int = server.getsockname()[1]
        self._name, self._handler = name, handler
        self._door = Door(server, name, head_missing, self._enter)

    def close(self) -> None:
        """Lets nobody in any more. Requests that are being answered go on."""
        self._door.close()

    def _enter(self, sock: socket.socket, head: bytes) -> bool:
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
        """Reads what was heard at the door first."""
        super().setup()
        self.rfile.close()
        # `http.server` reads from a file. This one returns what the door has read already and then goes on
        # with the socket, so nothing is parsed twice.
        self.rfile = io.BufferedReader(_HeardFirst(self._head, self.connection))

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing: a flood of requests is no flood of lines."""
        return


class _HeardFirst(io.RawIOBase):
    """What was read of a socket, then the rest of it."""

    def __init__(self, heard: bytes, sock: socket.socket) -> None:
        self._heard = memoryview(heard)
        self._sock = sock

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._heard:
            return self._sock.recv_into(buffer)
        count = min(len(buffer), len(self._heard))
        buffer[:count], self._heard = self._heard[:count], self._heard[count:]
        return count


def head_missing(received: bytearray) -> int:
    """See `authentication.Missing`: of the head of an HTTP request, with whatever came with it."""
    if b"\r\n\r\n" in received:
        return 0
    # A head without end. Real ones of ours have some 300 bytes.
    if len(received) >= HEAD_BYTES:
        raise ProtocolError(f"the head of a request has more than {HEAD_BYTES} bytes")
    return HEAD_BYTES - len(received)
