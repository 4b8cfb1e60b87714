"""What every server of ranges of bytes shares: who may connect, who may read, for how long, and how it ends.

A subclass says in `answer` what a path means, and sends it with the methods of `RangeRequest`.
"""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterable
from http import HTTPStatus

from holdfast.protocol.network.listener import Handler, HttpListener
from holdfast.protocol.network.proof import ANSWER_HEADER, REFUSAL, admit
from holdfast.protocol.network.sockets import shut, unpace

IDLE_S = 20.0
"""A connection on which nothing moves for so long, neither a request nor an answer, is closed. A reader that hangs
must not hold a thread and what it reads, a slot or a state, for ever."""


class RangeServer:
    """Serves from construction until it is closed, a thread for every connection. Owns its threads.

    Attributes:
        name: by which `protocol.network.proof` knows this server; it names one process and no other, now or later.
        port: where it listens.
    """

    def __init__(self, host: str, token: str, name: str, thread: str, port: int = 0) -> None:
        """Ready for `answer` from the first moment: a subclass sets its own fields before it calls this.

        thread: the name of the thread that accepts. port: 0 is one that is free.
        """
        self.name = name
        self._token = token
        self._open: set[socket.socket] = set()
        # Guards `_open` and `_closed`, which the connections' threads and whoever closes the server both
        # touch.
        self._lock = threading.Lock()
        self._closed = False
        self._listener = HttpListener(host, thread, self._serve, port)
        self.port = self._listener.port

    def answer(self, request: RangeRequest) -> None:
        """Answers one request of somebody who has proved to know the token. Runs in the connection's thread."""
        raise NotImplementedError

    def refuse_new(self) -> None:
        """Takes no new connection. Requests that are being answered go on."""
        self._listener.close()

    def close(self) -> None:
        """Takes no new connection and ends every transfer."""
        with self._lock:
            # The flag and the loop under one lock: a connection that was accepted just now is either in the set
            # already, or sees the flag when it enters. Otherwise it would be served after the close.
            self._closed = True
            for connection in self._open:
                shut(connection)
        self.refuse_new()

    def _serve(self, sock: socket.socket, head: bytes) -> None:
        RangeRequest(sock, head, self)

    def _enter(self, sock: socket.socket) -> None:
        with self._lock:
            self._open.add(sock)
            if self._closed:
                shut(sock)

    def _leave(self, sock: socket.socket) -> None:
        # Before the descriptor is closed, or `close` could shut down a number that is another connection's by then.
        with self._lock:
            self._open.discard(sock)

    def _proof_for(self, headers: Iterable[tuple[str, str]], path: str) -> str | None:
        return admit(headers, self._token, self.name, "GET", path)


class RangeRequest(Handler):
    """One connection, and the request that it made last."""

    timeout = IDLE_S

    def __init__(self, sock: socket.socket, head: bytes, range_server: RangeServer) -> None:
        self._range_server = range_server
        self._proof: str | None = None
        super().__init__(sock, head)

    def setup(self) -> None:
        """Both ends wait for each other's last, small packet: it must not wait for a full one (TCP_NODELAY)."""
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        unpace(self.connection)
        self._range_server._enter(self.connection)

    def finish(self) -> None:
        """The connection ends."""
        self._range_server._leave(self.connection)
        super().finish()

    def do_GET(self) -> None:
        """Nothing is looked at, not even the path, before the caller has proved that it knows the token."""
        # Computed anew for every request on a connection: the code covers this path, so the proof of an earlier
        # request, or of another server's, is worth nothing here.
        self._proof = self._range_server._proof_for(self.headers.items(), self.path)
        if self._proof is None:
            self.send_error(401, REFUSAL)
            return
        self._range_server.answer(self)

    def send(self, body: bytes) -> None:
        """Answers with a small body."""
        self.begin(HTTPStatus.OK, {"Content-Length": len(body)})
        self.write(memoryview(body))

    def begin(self, status: HTTPStatus, headers: dict[str, object]) -> None:
        """Sends the head of an answer; the body follows with `write`, or by the connection itself."""
        self.send_response(status)
        for header, value in headers.items():
            self.send_header(header, str(value))
        self.end_headers()
        self.wfile.flush()

    def write(self, data: memoryview) -> None:
        """Sends bytes. Unlike sendall, whose limit is for all of `data`, this gives every advance IDLE_S: a slow reader is
        no reader that hangs."""
        while data:
            data = data[self.connection.send(data) :]

    def span(self, nbytes: int) -> tuple[int, int] | None:
        """The bytes [low, high) of `nbytes` that are asked for: all without a Range. None: it was refused with 416."""
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        # HTTP's ranges include their last byte; ours are half open, like Python's.
        low, high = (int(wanted[1]), int(wanted[2]) + 1) if wanted else (0, nbytes)
        if 0 <= low < high <= nbytes:
            return low, high
        self.send_error(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
        return None

    def end_headers(self) -> None:
        """Every answer, a refusal too, carries the server's own proof to a caller who gave one."""
        if self._proof:
            self.send_header(ANSWER_HEADER, self._proof)
        super().end_headers()
