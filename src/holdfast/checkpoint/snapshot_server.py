"""Snapshots over the network: every agent serves its slots, peers and workers read them.

Plain HTTP, straight out of the shared memory, for those who prove that they know the job's token; the server proves it
too, see `protocol.network.proof`. `curl` can read it with the token itself:

    GET /snapshots                                            what is held here, JSON
    GET /snapshots/STEP/GENERATION/RANK/WORLD/head            safetensors, see `layout.encode_head`
    GET /snapshots/STEP/GENERATION/RANK/WORLD/blob  Range: ... bytes
    GET /snapshots/STEP/GENERATION/RANK/WORLD/hold            the slot's file; it stays as it is until you close

The reader verifies the blob against the sums in the head, and the head against the digest that its agent reported.
"""

from __future__ import annotations

import http.client
import os
import re
import secrets
import select
import socket
import threading
from http import HTTPStatus

import msgspec

from holdfast.checkpoint.layout import Head, decode_head, digest
from holdfast.checkpoint.memory import PAGE, PooledSlot, SlotPool
from holdfast.errors import StateError, TierError
from holdfast.protocol.network.proof import ANSWER_HEADER, Question
from holdfast.protocol.network.range_server import RangeRequest, RangeServer
from holdfast.protocol.network.sockets import shut
from holdfast.protocol.snapshots import Holder, Key, Part

CONNECT_S = 5.0
STALL_S = 20.0
"""A peer that sends nothing for so long is given up; the next source is read."""


WAKE_BYTES = 1 << 20
"""A stream's reader is woken when so much has come: woken for every packet, two ends that share a machine's processors
spend a sixth of their time on changing places."""

SEND_BYTES = 4 << 20
"""Given to the kernel at once. Out of the mapped slot: sendfile from tmpfs saves a copy, and is slower all the same,
because it hands over one page of 4 KiB after the other."""


class SnapshotServer(RangeServer):
    """Serves a pool's sealed slots. Connections are kept for the next request."""

    def __init__(self, pool: SlotPool, host: str, token: str) -> None:
        self._pool = pool
        super().__init__(host, token, f"snapshots {secrets.token_hex(8)}", "holdfast-snapshots")

    def answer(self, request: RangeRequest) -> None:
        """The paths of the module's docstring."""
        if request.path == "/snapshots":
            request.send(msgspec.json.encode([s.key for s in self._pool.held()]))
            return
        wanted = re.fullmatch(r"/snapshots/(\d+)/(-?\d+)/(\d+)/(\d+)/(head|blob|hold)", request.path)
        if not wanted:
            request.send_error(404)
            return
        key = Key(*(int(wanted[i]) for i in range(1, 5)))
        try:
            # The pool reuses no slot that has a reader, so what is sent is one snapshot from its first byte to its last.
            with self._pool.reading(key) as slot:
                if wanted[5] == "head":
                    request.send(slot.head)
                elif wanted[5] == "hold":
                    request.send(str(slot.path).encode())
                    _wait_for_close(request)
                else:
                    _send_blob(request, slot)
        except StateError as error:
            request.send_error(410, str(error))


def _wait_for_close(request: RangeRequest) -> None:
    """A worker of this node reads the slot's file by itself for as long as it keeps the connection: without a limit of
    time, because it may restore for longer than any reader may be idle. Its end closes the connection too."""
    request.close_connection = True
    request.connection.settimeout(None)
    request.connection.recv(1)


def _send_blob(request: RangeRequest, slot: PooledSlot) -> None:
    if (span := request.span(slot.blob_bytes)) is None:
        return
    low, high = span
    content_range = f"bytes {low}-{high - 1}/{slot.blob_bytes}"
    request.begin(HTTPStatus.PARTIAL_CONTENT, {"Content-Length": high - low, "Content-Range": content_range})
    with slot.blob as blob:
        while low < high:
            low += _send(request.connection, blob, low, high)


def _is_readable(connection: socket.socket) -> bool:
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    return bool(poll.poll(0))


def _send(connection: socket.socket, blob: memoryview, start: int, stop: int) -> int:
    """Sends what the kernel takes now of the bytes from `start` on; waits until it takes something."""
    return connection.send(blob[start : min(start + SEND_BYTES, stop)])


class SnapshotPeer:
    """One agent's snapshot of one shard, read over one connection that is kept. Not thread-safe: one for every thread.

    Attributes:
        ahead: where a reader that goes on from byte to byte will end: so far is asked for at once.
    """

    def __init__(self, holder: Holder, token: str, key: Key) -> None:
        self.where = f"the memory of {holder.node}"
        self._server = holder.server
        self._path = f"/snapshots/{key.step}/{key.generation}/{key.rank}/{key.world}"
        self._token = token
        self._connection = http.client.HTTPConnection(holder.host, holder.port, timeout=CONNECT_S)
        self._coming: tuple[http.client.HTTPResponse, int, int] | None = None  # from byte to byte, exclusive
        self._aborted = False
        self._wakes_at = 1
        self.ahead = 0

    def head(self, part: Part | None = None) -> tuple[bytes, Head]:
        """The shard's head. part: what it must be.

        Raises:
            TierError: the peer does not answer, or does not hold it.
            ChecksumError: it is another.
        """
        try:
            data = self._answer("head", {}).read()
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise TierError(f"{self.where} does not answer: {error}") from error
        # Without an expected digest the head only vouches for itself. That is good enough for people who look
        # at a snapshot, and for nothing that is loaded: every loader passes what the agent reported.
        part = part or Part("", len(data), digest(data))
        return data, decode_head(data, part, self.where)

    def read_into(self, low: int, view: memoryview) -> None:
        """Fills `view` with the blob's bytes from `low` on.

        Raises:
            TierError: the peer does not answer, or does not hold it any more.
        """
        high = low + len(view)
        if not len(view):
            return
        try:
            # A response is kept open and read on as long as the reader goes on from byte to byte. Otherwise
            # each window would cost a request, with its proof and a round trip, and TCP would start again
            # from a small window.
            if self._coming is None or self._coming[1] != low or self._coming[2] < high:
                self._ask(low, max(high, self.ahead))
            assert self._coming is not None
            response, _, end = self._coming
            # The kernel wakes a reader only when that many bytes are there. Towards the end of a response so
            # many never come, and the reader would sleep until its time-out. So the last megabyte is read
            # with the usual mark of 1.
            self._wake_at(WAKE_BYTES if end - high >= WAKE_BYTES else 1)
            while view:
                got = response.readinto(view)
                if not got:
                    raise TierError(f"{self.where} closed the connection")
                view = view[got:]
            self._coming = (response, high, end) if high < end else None
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise TierError(f"{self.where} does not answer: {error}") from error
        except BaseException:
            self.close()
            raise

    def _ask(self, low: int, high: int) -> None:
        # HTTP cannot take a request back, and reading the rest of another range away could take gigabytes.
        if self._coming is not None:
            self.close()
        self._coming = self._answer("blob", {"Range": f"bytes={low}-{high - 1}"}), low, high

    def _wake_at(self, nbytes: int) -> None:
        """Sleep until so much has come. As much must be on its way beyond what is wanted, or nobody wakes us."""
        sock = self._connection.sock
        if sock is not None and nbytes != self._wakes_at:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
            self._wakes_at = nbytes

    def _answer(self, what: str, headers: dict[str, str]) -> http.client.HTTPResponse:
        path = f"{self._path}/{what}"
        question = Question(self._token, self._server, "GET", path)
        headers["Authorization"] = question.authorization
        self._connect()
        self._connection.request("GET", path, headers=headers)
        response = self._response()
        # Checked before the status and the body. Whoever listens in a dead agent's place may send anything,
        # and nothing of it may be parsed or believed, not even a refusal.
        if not question.proves(response.getheader(ANSWER_HEADER, "")):
            self.close()
            raise TierError(
                f"{self.where} answered {response.status} and did not prove that it belongs to this job"
            )
        if response.status not in (200, 206):
            response.read()
            raise TierError(f"{self.where} answered {response.status} {response.reason}")
        return response

    def _response(self) -> http.client.HTTPResponse:
        """The response's head, all of it within STALL_S."""
        # A socket's time-out counts anew with every byte, so a peer that sends one byte every few seconds
        # would hold this thread for ever. The timer bounds all of the head.
        limit = threading.Timer(STALL_S, shut, (self._connection.sock,))
        limit.daemon = True
        limit.start()
        try:
            return self._connection.getresponse()
        finally:
            limit.cancel()

    def _connect(self) -> None:
        """A connection that nothing was sent over for a while may have been closed at the other end."""
        # Between two requests a peer sends nothing. So a connection that is readable now has been closed, or
        # is out of step; using it would lose the next request.
        sock = self._connection.sock
        if sock is not None and _is_readable(sock):
            self.close()
            sock = None
        # Looked at both before and after connecting: `abort` finds no socket to shut while there is none, so
        # its mark must be seen here, or the transfer would go on after it.
        if sock is None and not self._aborted:
            self._connection.connect()
            self._connection.sock.settimeout(STALL_S)
            self._wakes_at = 1
        if self._aborted:
            raise TierError(f"the transfer from {self.where} was aborted")

    def abort(self) -> None:
        """Ends a read that another thread waits in, and every later one."""
        self._aborted = True
        sock = self._connection.sock
        if sock is not None:
            shut(sock)

    def close(self) -> None:
        """Closes the connection; the next read makes it anew."""
        self._coming = None
        self._connection.close()


class OwnNode(SnapshotPeer):
    """The agent of this node: it keeps the slot as it is while the connection is open, and its file is read instead."""

    _file: int | None = None
    _reachable = True

    def read_into(self, low: int, view: memoryview) -> None:
        """Fills `view` with the blob's bytes from `low` on."""
        if self._file is None and self._reachable:
            self._hold()
        if self._file is None:
            super().read_into(low, view)
            return
        if self._aborted:
            raise TierError(f"the transfer from {self.where} was aborted")
        while view:
            got = os.preadv(self._file, [view], PAGE + low)
            if not got:
                raise TierError(f"{self.where} is cut short")
            low, view = low + got, view[got:]

    def _hold(self) -> None:
        try:
            # The agent keeps the slot unchanged as long as this connection is open, so the file can be read
            # without a copy through a socket. If the worker dies the kernel closes the connection and the
            # slot is free again: nothing has to be timed out.
            path = self._answer("hold", {}).read().decode()
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise TierError(f"{self.where} does not answer: {error}") from error
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # a container may see another /dev/shm than its agent: over the network, then
            self._reachable = False
            self.close()

    def close(self) -> None:
        """Closes the connection and lets the slot go; the next read takes both anew."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        super().close()


def peer_of(holder: Holder, token: str, key: Key, own_node: str = "") -> SnapshotPeer:
    """The way to a holder's memory. own_node: the name of the reader's."""
    kind = OwnNode if holder.node == own_node else SnapshotPeer
    return kind(holder, token, key)
