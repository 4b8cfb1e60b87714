"""The control channel: TCP connections between the members of a generation, for messages of a few bytes.

It carries what must be quick and exact: the weights of the micro-batches, the vote that closes a step, and the addresses from
which gloo builds its own connections. A tiny all-reduce over gloo costs milliseconds when the ranks share few cores; a message
here costs one hop. Its addresses arrive with the generation, so there is no store server to lose and no key of another
generation to read.

Few members are a mesh, of one connection between every two (`MeshChannel`). Many are a tree (`tree_channel.TreeChannel`). A step
talks of rounds, in which all members say something and hear of all, and does not know which of the two carries them.
"""

from __future__ import annotations

import selectors
import socket
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import msgspec
import torch.distributed as dist

from holdfast.errors import CollectiveFault, ProtocolError, UsageError
from holdfast.protocol.messages import Generation, Member
from holdfast.protocol.network.listener import BACKLOG, AuthenticatingListener
from holdfast.protocol.network.proof import ANSWER_CHARS, Question, answer_to
from holdfast.protocol.network.sockets import listening
from holdfast.protocol.wire.frames import Codec, body_of, missing, pack, read_exactly
from holdfast.train.step_sum import Addends, ControlMessage, mismatch

CONNECT_S = 5.0
"""Never waited for in full: a break ends the wait. It bounds a break that comes in the very moment before it."""

_MESSAGE = struct.Struct("<Qddd")  # step, three numbers
OF_A_SUM = 1 << 63
"""Added to the step's number in a mesh's messages of `Step.sum`: a member that makes no sum must not take them for weights."""

_TAG_KEY, _TAG_END = 1, 2
_HEAD = struct.Struct("<BI")


class _Hello(msgspec.Struct, frozen=True):
    credential: str
    generation: int
    digest: str
    rank: int


_hellos: Codec[_Hello] = Codec(_Hello)
_HELLO_BYTES = 1024


def _server_name(worker: str) -> str:
    """For the proof: a worker's name is that of one process."""
    return f"channel {worker}"


class ChannelListener:
    """Accepts the connections of members with higher ranks. One for the life of the worker."""

    def __init__(self, host: str, token: str, worker: str) -> None:
        """worker: this one's name, by which the others know it."""
        self._token = token
        self._name = _server_name(worker)
        server = listening(host, backlog=BACKLOG)
        self.port: int = server.getsockname()[1]
        self._arrived: dict[tuple[int, str, int], socket.socket] = {}
        self._news = threading.Condition()
        self._broken = 0
        self._listener = AuthenticatingListener(
            server, "holdfast-channel", lambda received: missing(received, _HELLO_BYTES), self._accept
        )

    def _accept(self, sock: socket.socket, frame: bytes) -> bool:
        """A caller whose hello proves that it knows the token is a member, and gets our proof."""
        hello = _hellos.decode(body_of(frame))
        about = (str(hello.generation), hello.digest, str(hello.rank))
        answer = answer_to(hello.credential, self._token, self._name, *about)
        if answer is None:
            raise ProtocolError("a process that connected did not prove that it knows the job's token")
        with self._news:
            # A slow member may still call for a generation that is over. Its socket would never be taken, and
            # would stay open until the process ends.
            if hello.generation <= self._broken:
                return False
            sock.send(answer.encode())  # the first bytes of a connection: there is room for all of them
            sock.setblocking(True)
            # The newest connection counts: a caller that lost its answer calls again, and the first socket is
            # then dead at its other end.
            key = hello.generation, hello.digest, hello.rank
            if (older := self._arrived.pop(key, None)) is not None:
                older.close()
            self._arrived[key] = sock
            self._news.notify_all()
        return True

    def take(self, generation: Generation, rank: int) -> socket.socket:
        """The connection from a member. Raises CollectiveFault when the generation breaks first."""
        # By its digest as well: where a network is cut in two, two coordinators may each form one of this number, and the
        # workers of both may still reach each other. Whoever was told of the other one is never taken.
        number, key = generation.number, (generation.number, generation.digest, rank)
        with self._news:
            self._news.wait_for(lambda: key in self._arrived or self._broken >= number)
            # The break is looked at before the connection. When both are there, going on would only connect
            # to members that have left already.
            if self._broken >= number:
                raise CollectiveFault("the generation broke while its members connected")
            return self._arrived.pop(key)

    def close(self) -> None:
        """Accepts no more connections."""
        self._listener.close()

    def release(self, generation: int) -> None:
        """Stops waiting for members of this generation and of older ones."""
        with self._news:
            self._broken = max(self._broken, generation)
            for key in [k for k in self._arrived if k[0] <= generation]:
                self._arrived.pop(key).close()
            self._news.notify_all()


def not_all_in_sum(rank: int, other: int) -> UsageError:
    """The error of all workers when one rank is in a `Step.sum` and another one is not."""
    return UsageError(
        f"rank {rank} is in step.sum(), and rank {other} is not: call it on every worker in the same steps, equally often "
        "and in the same order; not on one rank only"
    )


class ControlChannel(ABC):
    """The connections of one generation.

    Every member calls the same methods in the same order: a round is begun by its `send_` and ended by its `receive_`, or is one
    call, before the next begins. A peer that is gone raises CollectiveFault in whoever waits for it; `abort` (from another thread)
    raises it at once.

    Attributes:
        waits: called with the rank that is waited for, and with -1 when nobody is. While members connect, those of lower
            rank are called, and of higher rank awaited.
        late: called at the end of a vote with the rank whose word came last, where that is known of all members.
        reached: called when one more member is connected.
        fails_on_receive: what cannot be said raises nothing; hearing from that peer will.
    """

    def __init__(
        self, generation: Generation, rank: int, called: Sequence[int], awaited: Sequence[int]
    ) -> None:
        """called: the members of lower ranks that this one connects to. awaited: those of higher ranks that connect to it."""
        self._generation = generation
        self.rank = rank
        self.size = len(generation.members)
        self.waits: Callable[[int], None] = lambda rank: None
        self.late: Callable[[int], None] = lambda rank: None
        self.reached: Callable[[], None] = lambda: None
        self._called, self._awaited = called, awaited
        self._peers: dict[int, socket.socket] = {}
        self._aborted = False
        self.fails_on_receive = False

    @abstractmethod
    def store(self, labels: Callable[[Member], Sequence[str]]) -> ChannelStore:
        """The store in which the generation's process groups find their members; once, after `connect`.

        labels: the groups of a member. The keys of a group begin with its label and a slash, and only its members need them.
        """

    @abstractmethod
    def send_weights(self, step: int, /, *messages: ControlMessage) -> None:
        """Says to all members what this one's micro-batches weigh, their losses, and something that is to be the same everywhere."""

    @abstractmethod
    def receive_weights(
        self, step: int, own: Sequence[ControlMessage], counts: Sequence[int] | None, /
    ) -> Sequence[ControlMessage]:
        """Messages of which `math.fsum` of the first numbers, and of the second ones, is that over all members' messages. The
        third ones are more than one, if those of the members are.

        Args:
            own: what this member sent.
            counts: number of messages of each member; None: one.
        """

    @abstractmethod
    def exchange(self, step: int, message: ControlMessage, counts: bool) -> Sequence[ControlMessage]:
        """The messages of all members by rank. counts: this one's is needed; of a member whose is not, it may be zeros."""

    @abstractmethod
    def sum(self, step: int, own: Addends, counts: bool) -> dict[str, Any]:
        """The sums over all members. counts: this one's numbers are added; it says them in any case.

        Raises:
            UsageError: a member sums other names or shapes, or nothing.
        """

    @abstractmethod
    def send_vote(self, step: int, message: ControlMessage, /) -> None:
        """Says that this member holds the complete gradient: it is PREPARED. message: a one, and each not zero: whether the
        generation is to end at this commit, and whether its state is to be saved."""

    @abstractmethod
    def receive_vote(self, step: int, own: Sequence[ControlMessage], /) -> Sequence[ControlMessage]:
        """Returns when every member has voted. A number of the messages is not zero where any member's is not. own: what
        this member sent."""

    def connect(self, listener: ChannelListener, token: str) -> None:
        """Connects to its members of lower ranks and waits for those of higher ones.

        Raises:
            CollectiveFault: one cannot be reached, or does not prove that it is this member.
        """
        generation = self._generation
        about = (str(generation.number), generation.digest, str(self.rank))
        # All of lower ranks are called before any answer is awaited. Proofs are computed in the peers' listening
        # threads, in parallel; one after the other would cost a round trip for each member, at every
        # generation.
        asked = []
        for lower in self._called:
            member = generation.members[lower]
            question = Question(token, _server_name(member.worker), *about)
            with self._calling(member):
                sock = self._call(member)
                hello = _Hello(question.credential, generation.number, generation.digest, self.rank)
                sock.sendall(pack(hello))
            asked.append((member, sock, question))
        for member, sock, question in asked:  # all are at work on their answers by now
            with self._calling(member):
                answer = read_exactly(sock, ANSWER_CHARS, CONNECT_S)
                # The address came from the coordinator, and the port may have been given to another process
                # since. Words and votes go to nobody who does not know the token: a stranger's vote would
                # commit a step.
                if answer is None or not question.proves(answer.decode("latin-1")):
                    sock.close()
                    who = f"{member.host} port {member.vote_port}, where {member.worker} listened,"
                    raise OSError(
                        f"{who} did not prove that it is this worker; does another process listen there?"
                    )
                sock.settimeout(None)
            self.reached()
        # Lower ranks are called and higher ranks are awaited, so two members have at most one connection and
        # nobody waits in a circle: rank 0 awaits only, and each rank's calls lead to ranks that already
        # listen.
        for rank in self._awaited:
            self.waits(rank)
            self._add(rank, listener.take(generation, rank))
            self.reached()
        self.waits(-1)

    @contextmanager
    def _calling(self, member: Member) -> Iterator[None]:
        self.waits(member.rank)
        try:
            yield
        except OSError as error:
            raise CollectiveFault(f"cannot reach rank {member.rank} on {member.node}: {error}") from error

    def _call(self, member: Member) -> socket.socket:
        address = (member.host, member.vote_port)
        family, kind, protocol, _, target = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        # A member that is gone without a sign (a lost node) answers no SYN. Without the socket in the list
        # `abort` could not end this call, and the worker would be away for CONNECT_S at every fault.
        self._add(member.rank, sock)  # before it is connected: `abort` frees a call to a silent node
        sock.settimeout(CONNECT_S)
        sock.connect(target)
        return sock

    def _add(self, rank: int, sock: socket.socket) -> None:
        # A vote is 32 bytes and closes a step. Nagle's algorithm would hold it until the peer has
        # acknowledged the message before, up to 40 ms.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The same order as everywhere here: first in the list, then the flag. `abort` sets the flag and then
        # walks over the list, so one of the two sees the other.
        self._peers[rank] = sock
        if self._aborted:
            raise CollectiveFault("the generation broke while its members connected")

    def sockets(self) -> list[socket.socket]:
        """Every connection of the control channel."""
        return list(self._peers.values())

    def abort(self) -> None:
        """Ends every wait for a peer. Nothing can be sent afterwards. Safe from any thread."""
        # `shutdown` and not `close`: it wakes a thread that is inside `recv` on the socket, and the
        # descriptor stays taken. A closed number could be given to another file while the main thread still
        # reads from it.
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


class MeshChannel(ControlChannel):
    """One connection between every two members: each message takes one hop."""

    def __init__(self, generation: Generation, rank: int) -> None:
        super().__init__(generation, rank, range(rank), range(rank + 1, len(generation.members)))

    def store(self, labels: Callable[[Member], Sequence[str]]) -> ChannelStore:
        """As in ControlChannel. All members get all keys, for each is one hop away."""
        return MeshStore(self)

    # ------------------------------------------------------------ rounds

    def exchange(self, step: int, message: ControlMessage, counts: bool) -> list[ControlMessage]:
        """As in ControlChannel."""
        self.send(step, message)
        return self.receive(step, [message])

    def sum(self, step: int, own: Addends, counts: bool) -> dict[str, Any]:
        """As in ControlChannel."""
        messages, tag = own.messages(), step | OF_A_SUM
        head = (own.fingerprint, float(len(messages)), float(counts))
        self.send(tag, head, *messages)
        heads = self.receive_heads(tag, head, messages)
        # Compared before anything is added: with other names on one worker, all would sum different things
        # and get the same bits.
        for rank, (theirs, _) in enumerate(heads):
            if theirs[0] != own.fingerprint:
                raise mismatch(own.shapes, step, rank, self.rank)
        return own.total(own.columns_of(said for theirs, said in heads if theirs[2]))

    # ------------------------------------------------------------ messages

    def send(self, step: int, *messages: ControlMessage) -> None:
        """Sends messages of three numbers for this step to every peer."""
        # One write for all messages: with the exact reduction there is one for each micro-batch. It cannot block
        # for long, because a peer's socket buffer is larger than all messages of one step, which it reads before
        # the next.
        data = b"".join(_MESSAGE.pack(step, *message) for message in messages)
        for rank, sock in self._peers.items():
            try:
                sock.sendall(data)
            except OSError as error:
                if not self.fails_on_receive:
                    raise CollectiveFault(f"lost rank {rank}: {error}") from error

    def receive(
        self, step: int, own: Sequence[ControlMessage], counts: Sequence[int] | None = None
    ) -> list[ControlMessage]:
        """The messages of all members for this step, in the order of the ranks, so that all members add them up alike.

        Args:
            own: what this member sent.
            counts: number of messages of each member; one, if not given.
        """
        messages: list[ControlMessage] = []
        for rank in range(self.size):
            # Everybody adds up in the order of the ranks, its own message in its place. Floating point addition
            # depends on the order: any other one would give each replica another scale, and the replicas
            # would drift apart.
            if rank == self.rank:
                messages += own
            else:
                self.waits(rank)
                messages += [self._receive_one(rank, step) for _ in range(counts[rank] if counts else 1)]
        self.waits(-1)
        return messages

    def receive_heads(
        self, step: int, head: ControlMessage, own: Sequence[ControlMessage]
    ) -> list[tuple[ControlMessage, list[ControlMessage]]]:
        """For each member, in the order of the ranks: its first message for this step, whose second number says how many
        messages follow, and those messages."""
        reports: list[tuple[ControlMessage, list[ControlMessage]]] = []
        for rank in range(self.size):
            if rank == self.rank:
                reports.append((head, list(own)))
            else:
                self.waits(rank)
                theirs = self._receive_one(rank, step)
                reports.append((theirs, [self._receive_one(rank, step) for _ in range(int(theirs[1]))]))
        self.waits(-1)
        return reports

    def _receive_one(self, rank: int, step: int) -> ControlMessage:
        try:
            # No time limit. How long a peer may take is the coordinator's decision, because it alone sees all
            # of them; `abort` ends the wait.
            message = self._peers[rank].recv(_MESSAGE.size, socket.MSG_WAITALL)
        except OSError as error:
            raise CollectiveFault(f"lost rank {rank}: {error}") from error
        if len(message) < _MESSAGE.size:
            raise CollectiveFault(f"lost rank {rank}: its connection closed")
        their_step, a, b, c = _MESSAGE.unpack(message)
        if (their_step ^ step) & OF_A_SUM:
            raise not_all_in_sum(*((self.rank, rank) if step & OF_A_SUM else (rank, self.rank)))
        # The stream has no other frame than the step's number. If two members are at different steps, one has
        # committed what the other has not, and adding their messages up would hide it.
        if their_step != step:
            raise CollectiveFault(f"rank {rank} is at step {their_step}, this rank at {step}")
        return a, b, c

    # These rounds are messages and nothing else, so they cost no call more.
    send_weights = send_vote = send
    receive_weights = receive_vote = receive


class ChannelStore(dist.Store):  # type: ignore[misc, name-defined, unused-ignore]
    """A torch.distributed Store whose keys travel over the control channel and live no longer than one generation.

    After `finish` the control channel carries messages: a key that a process group sets later (NCCL's watchdog may) stays here.
    """

    def __init__(self, channel: ControlChannel) -> None:
        super().__init__()
        self._channel = channel
        self._finished = False
        self._values: dict[str, bytes] = {}

    def check(self, keys: list[str]) -> bool:
        """Whether the keys have arrived."""
        return all(k in self._values for k in keys)

    def finish(self) -> None:
        """Tells the others that no key follows, and waits until all have done so: from then on the channel carries messages."""
        raise NotImplementedError

    def close(self) -> None:
        """No more is needed, whether or not it was finished."""


class MeshStore(ChannelStore):
    """Sends every key to every peer."""

    def __init__(self, channel: ControlChannel) -> None:
        super().__init__(channel)
        self._ended: set[int] = set()
        self._unsent: dict[int, memoryview] = {}
        self._unread: dict[int, bytearray] = {rank: bytearray() for rank in channel._peers}

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
        self._move_until(lambda: key in self._values)
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits for the keys. The timeout is not needed: a generation that breaks ends the wait."""
        self._move_until(lambda: all(k in self._values for k in keys))

    def finish(self) -> None:
        """As in ChannelStore."""
        self._finished = True
        self._send(_HEAD.pack(_TAG_END, 0))
        self._move_until(lambda: len(self._ended) == self._channel.size - 1)

    def _send(self, data: bytes) -> None:
        for rank in self._channel._peers:
            self._unsent[rank] = memoryview(data)
            self._write(rank)
        self._move_until(lambda: not self._unsent)

    def _move_until(self, done: Callable[[], bool]) -> None:
        """Sends and reads side by side: of two members that set large values, each would else wait until the other reads."""
        if done():
            return
        # Of two members that both write a large value first, each would fill the other's socket buffer and
        # wait for ever. So nobody writes without reading what comes meanwhile.
        with selectors.DefaultSelector() as selector:
            for rank, sock in self._channel._peers.items():
                if wants := self._wants(rank):
                    selector.register(sock, wants, rank)
            while not done():
                # All peers have ended and have nothing to send, so the key can never come. Without this the
                # `select` on nothing would wait for ever.
                if not selector.get_map():
                    raise CollectiveFault("a rank requested a key that no rank has set")
                for key, events in selector.select():
                    if events & selectors.EVENT_WRITE:
                        self._write(key.data)
                    if events & selectors.EVENT_READ:
                        self._read(key.data)
                    wants = self._wants(key.data)
                    if not wants:
                        selector.unregister(key.fileobj)
                    elif wants != key.events:
                        selector.modify(key.fileobj, wants, key.data)

    def _wants(self, rank: int) -> int:
        reads = selectors.EVENT_READ if rank not in self._ended else 0
        return reads | (selectors.EVENT_WRITE if rank in self._unsent else 0)

    def _write(self, rank: int) -> None:
        """As much as the connection takes now."""
        data = self._unsent[rank]
        try:
            data = data[self._channel._peers[rank].send(data, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            return
        except OSError as error:
            raise CollectiveFault(f"lost rank {rank}: {error}") from error
        if data:
            self._unsent[rank] = data
        else:
            del self._unsent[rank]

    def _read(self, rank: int) -> None:
        """What has come of a peer's next frame, and nothing behind it: after the last one the control channel's messages follow."""
        frame = self._unread[rank]
        size = _HEAD.unpack_from(frame)[1] if len(frame) >= _HEAD.size else 0
        try:
            # Exactly what is missing of one frame is read. A larger read would take messages that follow the
            # last frame, and the vote that they belong to would wait for ever.
            data = self._channel._peers[rank].recv(_HEAD.size + size - len(frame), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError as error:
            raise CollectiveFault(f"lost rank {rank}: {error}") from error
        if not data:
            raise CollectiveFault(f"lost rank {rank}: its connection closed")
        frame += data
        if len(frame) < _HEAD.size:
            return
        tag, size = _HEAD.unpack_from(frame)
        if len(frame) < _HEAD.size + size:
            return
        self._unread[rank] = bytearray()
        if tag == _TAG_END:
            self._ended.add(rank)
            return
        length: int = struct.unpack_from("<H", frame, _HEAD.size)[0]
        name = _HEAD.size + 2
        self._values[frame[name : name + length].decode()] = bytes(frame[name + length :])
