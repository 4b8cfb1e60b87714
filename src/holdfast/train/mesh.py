"""The mesh: one TCP connection between every two members of a generation, for messages of a few bytes.

It carries what must be quick and exact: the weights of the micro-batches, the vote that closes a step, and
the addresses from which gloo builds its own connections. A tiny all-reduce over gloo costs milliseconds when
the ranks share few cores; a message here costs one hop. Its addresses arrive with the generation, so there is
no store server to lose and no key of another generation to read.
"""

from __future__ import annotations

import hmac
import selectors
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

import msgspec
import torch.distributed as dist

from holdfast.errors import CollectiveFailed, ProtocolError
from holdfast.protocol.frames import Codec, pack, read_exactly
from holdfast.protocol.messages import Generation

CONNECT_S = 5.0
"""Never waited for in full: a break ends the wait. It bounds a break that comes in the very moment before it."""

Word = tuple[float, float, float]
_WORD = struct.Struct("<Qddd")  # step, three numbers
_TAG_KEY, _TAG_END = 1, 2
_HEAD = struct.Struct("<BI")


class _MeshHello(msgspec.Struct, frozen=True):
    token: str
    generation: int
    rank: int


_hellos: Codec[_MeshHello] = Codec(_MeshHello)


class MeshListener:
    """Accepts the connections of members with higher ranks. One for the life of the worker."""

    def __init__(self, host: str, token: str) -> None:
        self._token = token
        self._server = socket.create_server((host, 0), backlog=256)
        self.port: int = self._server.getsockname()[1]
        self._arrived: dict[tuple[int, int], socket.socket] = {}
        self._news = threading.Condition()
        self._broken = 0
        threading.Thread(target=self._accept, name="holdfast-mesh", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._server.accept()
            except OSError:
                return
            sock.settimeout(CONNECT_S)
            try:
                hello = _hellos.read(sock)
            except (OSError, ProtocolError):
                hello = None
            if hello is None or not hmac.compare_digest(hello.token, self._token):
                sock.close()
                continue
            sock.settimeout(None)
            with self._news:
                self._arrived[hello.generation, hello.rank] = sock
                self._news.notify_all()

    def take(self, generation: int, rank: int) -> socket.socket:
        """The connection from a member. Raises CollectiveFailed when the generation breaks first."""
        with self._news:
            self._news.wait_for(lambda: (generation, rank) in self._arrived or self._broken >= generation)
            if self._broken >= generation:
                raise CollectiveFailed("the generation broke while its members connected")
            return self._arrived.pop((generation, rank))

    def close(self) -> None:
        """Accepts nobody any more."""
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def release(self, generation: int) -> None:
        """Nobody waits for members of this or an older generation any more."""
        with self._news:
            self._broken = max(self._broken, generation)
            for key in [k for k in self._arrived if k[0] <= generation]:
                self._arrived.pop(key).close()
            self._news.notify_all()


class Mesh:
    """The connections of one generation.

    Every member calls the same methods in the same order. A peer that is gone raises CollectiveFailed in
    whoever waits for it; `abort` (from another thread) raises it at once.

    Attributes:
        waits: called with the rank that is waited for, and with -1 when nobody is.
        fails_late: what cannot be said raises nothing; hearing from that peer will.
    """

    def __init__(self, generation: Generation, rank: int) -> None:
        self._generation = generation
        self.rank = rank
        self.size = len(generation.members)
        self.waits: Callable[[int], None] = lambda rank: None
        self._peers: dict[int, socket.socket] = {}
        self._aborted = False
        self.fails_late = False

    def connect(self, listener: MeshListener, token: str) -> None:
        """Connects to the lower ranks and waits for the higher ones."""
        number = self._generation.number
        for member in self._generation.members[: self.rank]:
            try:
                address = (member.host, member.vote_port)
                family, kind, protocol, _, target = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
                sock = socket.socket(family, kind, protocol)
                self._add(member.rank, sock)  # before it is connected: `abort` frees a call to a silent node
                sock.settimeout(CONNECT_S)
                sock.connect(target)
                sock.settimeout(None)
                sock.sendall(pack(_MeshHello(token, number, self.rank)))
            except OSError as error:
                raise CollectiveFailed(
                    f"cannot reach rank {member.rank} on {member.node}: {error}"
                ) from error
        for rank in range(self.rank + 1, self.size):
            self._add(rank, listener.take(number, rank))

    def _add(self, rank: int, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._peers[rank] = sock
        if self._aborted:
            raise CollectiveFailed("the generation broke while its members connected")

    def sockets(self) -> list[socket.socket]:
        """Every connection of the mesh."""
        return list(self._peers.values())

    def abort(self) -> None:
        """Frees whoever waits for a peer; nothing can be sent afterwards. Safe from any thread."""
        self._aborted = True
        for sock in self.sockets():
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    def close(self) -> None:
        """Gives the descriptors back."""
        for sock in self.sockets():
            sock.close()

    # ------------------------------------------------------------ words

    def say(self, step: int, *words: Word) -> None:
        """Sends words of three numbers for this step to every peer."""
        data = b"".join(_WORD.pack(step, *word) for word in words)
        for rank, sock in self._peers.items():
            try:
                sock.sendall(data)
            except OSError as error:
                if not self.fails_late:
                    raise CollectiveFailed(f"lost rank {rank}: {error}") from error

    def hear(self, step: int, own: Sequence[Word], counts: Sequence[int] | None = None) -> list[Word]:
        """What every member said for this step, in the order of the ranks: so all add it up alike.

        Args:
            own: what this member said.
            counts: how many words each member said; one, if not given.
        """
        words: list[Word] = []
        for rank in range(self.size):
            if rank == self.rank:
                words += own
            else:
                self.waits(rank)
                words += [self._hear_one(rank, step) for _ in range(counts[rank] if counts else 1)]
        self.waits(-1)
        return words

    def _hear_one(self, rank: int, step: int) -> Word:
        try:
            word = self._peers[rank].recv(_WORD.size, socket.MSG_WAITALL)
        except OSError as error:
            raise CollectiveFailed(f"lost rank {rank}: {error}") from error
        if len(word) < _WORD.size:
            raise CollectiveFailed(f"lost rank {rank}: its connection closed")
        said, a, b, c = _WORD.unpack(word)
        if said != step:
            raise CollectiveFailed(f"rank {rank} is at step {said}, this rank at {step}")
        return a, b, c


class MeshStore(dist.Store):  # type: ignore[misc, name-defined, unused-ignore]
    """A torch.distributed Store whose keys travel over the mesh and live no longer than one generation.

    After `finish` the mesh carries words: a key that a process group sets later (NCCL's watchdog may) stays here.
    """

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self._mesh = mesh
        self._finished = False
        self._values: dict[str, bytes] = {}
        self._ended: set[int] = set()

    def set(self, key: str, value: bytes | str) -> None:
        """Sends the value to every peer."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._values[key] = data
        if self._finished:
            return
        name = key.encode()
        body = struct.pack("<H", len(name)) + name + data
        self._send(_HEAD.pack(_TAG_KEY, len(body)) + body)

    def get(self, key: str) -> bytes:
        """Waits for the value."""
        self._read_until(lambda: key in self._values)
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits for the keys. The timeout is not needed: a generation that breaks ends the wait."""
        self._read_until(lambda: all(k in self._values for k in keys))

    def check(self, keys: list[str]) -> bool:
        """Whether the keys have arrived."""
        return all(k in self._values for k in keys)

    def finish(self) -> None:
        """Tells the peers that no key follows, and waits until all have said so: the mesh is clear again."""
        self._finished = True
        self._send(_HEAD.pack(_TAG_END, 0))
        self._read_until(lambda: len(self._ended) == self._mesh.size - 1)

    def _send(self, data: bytes) -> None:
        for rank, sock in self._mesh._peers.items():
            try:
                sock.sendall(data)
            except OSError as error:
                raise CollectiveFailed(f"lost rank {rank}: {error}") from error

    def _read_until(self, done: Callable[[], bool]) -> None:
        if done():
            return
        if self._finished and len(self._ended) == self._mesh.size - 1:
            raise CollectiveFailed("a key was asked for that nobody has set")
        with selectors.DefaultSelector() as selector:
            for rank, sock in self._mesh._peers.items():
                if rank not in self._ended:
                    selector.register(sock, selectors.EVENT_READ, rank)
            while not done():
                for key, _ in selector.select():
                    if not self._read_one(key.data) and not done():
                        selector.unregister(key.fileobj)

    def _read_one(self, rank: int) -> bool:
        """One frame of a peer; False when it was its last."""
        sock = self._mesh._peers[rank]
        try:
            head = read_exactly(sock, _HEAD.size)
            if head is None:
                raise OSError("its connection closed")
            tag, size = _HEAD.unpack(head)
            body = read_exactly(sock, size)
            if body is None:
                raise OSError("its connection closed")
        except OSError as error:
            raise CollectiveFailed(f"lost rank {rank}: {error}") from error
        if tag == _TAG_END:
            self._ended.add(rank)
            return False
        length: int = struct.unpack_from("<H", body)[0]
        self._values[body[2 : 2 + length].decode()] = bytes(body[2 + length :])
        return True
