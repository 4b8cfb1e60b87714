"""HTTP behind a door: a request has a thread only when its head is complete, see `protocol.authentication`.

`http.server` gives every connection a thread and waits for its words there, without a bound in time or number.
"""

from __future__ import annotations

import io
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from typing import Any

from holdfast.errors import ProtocolError
from holdfast.protocol.authentication import BACKLOG, Door
from holdfast.protocol.sockets import listening

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
