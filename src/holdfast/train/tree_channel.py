"""The control channel of many members: each is connected to its parent and its children in a tree (`member_tree`).

A round goes up and down once. These rules make a vote over the tree as safe as one in a mesh, where each member hears the others
itself. docs/architecture/step.md has the argument.

R1. A member sends its word of a round once: after its own part is there, and after it has the words of all of its children.
R2. The root makes a result only of a word about every member of the generation.
R3. A member passes the result on before it acts on it.
R4. A connection belongs to one generation, and to the member that has proved that it is the one.
R5. Nothing is sent after `abort`, and no member gets another parent within a generation.
"""

from __future__ import annotations

import selectors
import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from holdfast.errors import CollectiveFault
from holdfast.protocol.messages import Generation, Member
from holdfast.protocol.wire.frames import Codec, body_of, missing, pack
from holdfast.train.control_channel import ChannelStore, ControlChannel, not_all_in_sum
from holdfast.train.member_tree import (
    END,
    MISTAKES,
    NOT_IN_SUM,
    OTHER_SUM,
    SAVE,
    Round,
    Word,
    merged,
    parents,
    result,
    sides,
)
from holdfast.train.step_sum import Addends, ControlMessage, mismatch

_words: Codec[Word] = Codec(Word)
_MOST_BYTES = 16 << 20
"""Of a word. A sum of 1,024 numbers has some 40 kB, and the norm of a replica of 4,096 workers 150 kB."""
_READ_BYTES = 4096
"""More than a word about weights or a vote has: it is read at once."""
_NOTHING: ControlMessage = (0.0, 0.0, 0.0)


class TreeChannel(ControlChannel):
    """Connections to a parent and to children. Every member is in the same round, or in two that follow each other."""

    def __init__(self, generation: Generation, rank: int, fan_out: int) -> None:
        """fan_out: as in `member_tree.parents`; the same for all members."""
        self.parents = parents([member.node for member in generation.members], fan_out)
        self._parent = self.parents[rank]
        self._children = [child for child, parent in enumerate(self.parents) if parent == rank]
        super().__init__(generation, rank, [self._parent] if rank else [], self._children)
        self._own: Word | None = None

    def store(self, labels: Callable[[Member], Sequence[str]]) -> ChannelStore:
        """As in ControlChannel. A key takes the way to the members of its group."""
        beyond: dict[int, set[str]] = {rank: set() for rank in self._peers}
        for member, side in zip(self._generation.members, sides(self.parents, self.rank), strict=True):
            if side != self.rank:
                beyond[side].update(labels(member))
        return TreeStore(self, self._parent, beyond)

    # ------------------------------------------------------------ rounds

    def send_weights(self, step: int, /, *messages: ControlMessage) -> None:
        """As in ControlChannel."""
        weights, losses = tuple(w for w, _, _ in messages), tuple(x for _, x, _ in messages)
        seen = tuple(dict.fromkeys(layout for _, _, layout in messages))[:2]
        self._begin(self._word(Round.WEIGHTS, step, sums=(weights, losses), seen=seen))

    def receive_weights(
        self, step: int, own: Sequence[ControlMessage], counts: Sequence[int] | None, /
    ) -> list[ControlMessage]:
        """As in ControlChannel."""
        total = self._end()
        # One number each, but for what `math.fsum` refuses.
        (weights, losses), seen = total.sums, total.seen
        layout = seen[0] if seen else 0.0
        said = [(w, 0.0, layout) for w in weights] + [(0.0, x, layout) for x in losses]
        return said + [(0.0, 0.0, other) for other in seen[1:]]

    def exchange(self, step: int, message: ControlMessage, counts: bool) -> list[ControlMessage]:
        """As in ControlChannel."""
        self._begin(self._word(Round.EXCHANGE, step, by_rank=((self.rank, *message),) if counts else ()))
        messages = [_NOTHING] * self.size
        for rank, *said in self._end().by_rank:
            messages[rank] = (said[0], said[1], said[2])
        return messages

    def sum(self, step: int, own: Addends, counts: bool) -> dict[str, Any]:
        """As in ControlChannel."""
        columns = tuple(tuple(column) if counts else () for column in own.columns())
        self._begin(self._word(Round.SUM, step, sums=columns, seen=(own.fingerprint,)))
        total = self._end()
        if total.flags & OTHER_SUM:
            raise mismatch(own.shapes, step, *total.ranks)
        return own.total(total.sums)

    def send_vote(self, step: int, message: ControlMessage, /) -> None:
        """As in ControlChannel."""
        _, ends, saves = message
        flags = (END if ends else 0) | (SAVE if saves else 0)
        self._begin(self._word(Round.VOTE, step, flags=flags))

    def receive_vote(self, step: int, own: Sequence[ControlMessage], /) -> list[ControlMessage]:
        """As in ControlChannel."""
        total = self._end()
        self.late(total.latest)
        return [(1.0, float(bool(total.flags & END)), float(bool(total.flags & SAVE)))]

    # ------------------------------------------------------------ a round

    def _word(self, kind: Round, step: int, **parts: Any) -> Word:
        return Word(kind=kind, step=step, count=1, latest=self.rank, **parts)

    def _begin(self, own: Word) -> None:
        """This member's part of a round is there."""
        self._own = own
        # R1 is kept by a member without children in this moment, and by any other one only when it has heard them. So a word
        # says that all members which it counts are that far, and nobody need ask them again.
        if not self._children and self.rank:
            self._say(own)

    def _end(self) -> Word:
        """The word about all members.

        Raises:
            CollectiveFault: a neighbour is gone, or in another step or round.
            UsageError: not all members are in a `Step.sum`. (That they sum other things is in the word's flags.)
        """
        own, self._own = self._own, None
        assert own is not None, "`_begin` comes first"
        latest, below = self.rank, []
        for child in self._children:
            frame, was_there = self._hear(child)
            word = _words.decode(body_of(frame))
            # Who is in a `Step.sum` where another one is not is told apart in `merged`, and all members hear of it.
            if not word.flags & MISTAKES and (word.kind is Round.SUM) is (own.kind is Round.SUM):
                self._check_is_of(own, word, child)
            # The last one that had to be waited for came last: those behind it were there by then.
            latest = latest if was_there else word.latest
            below.append((child, word))
        word = merged(own, self.rank, below, latest)
        if self.rank:
            if self._children:
                self._say(word)
            frame, _ = self._hear(self._parent)
            total = _words.decode(body_of(frame))
            if not total.flags & MISTAKES:
                self._check_is_of(own, total, self._parent)
        else:
            total_or_none = result(word, self.size)
            if total_or_none is None:
                raise CollectiveFault(f"{word.count} of {self.size} members took part in a round")
            total, frame = total_or_none, pack(total_or_none)
        self.waits(-1)
        # R3. Whatever this member does with the result (a vote's lets it commit, which may raise, or take long), those below
        # do not wait for it.
        for child in self._children:
            self._pass_on(child, frame)
        # No round ends with a mistake, whichever it was about: a vote that took one for its result would commit a step that is
        # not prepared everywhere. Only `sum` can say what it summed, and raises the rest itself.
        if total.flags & NOT_IN_SUM:
            raise not_all_in_sum(*total.ranks)
        if total.flags & OTHER_SUM and own.kind is not Round.SUM:
            raise not_all_in_sum(total.ranks[0], self.rank)
        return total

    def _check_is_of(self, own: Word, word: Word, rank: int) -> None:
        # If two members are at different steps, one has committed what the other has not, and adding their words up would
        # hide it.
        if word.step != own.step:
            raise CollectiveFault(f"rank {rank} is at step {word.step}, this rank at {own.step}")
        if word.kind is not own.kind:
            raise CollectiveFault(
                f"rank {rank} is in the round {word.kind.name} of step {own.step}, this rank in {own.kind.name}"
            )

    def _say(self, word: Word) -> None:
        """To the parent."""
        # It cannot block for ever: a parent reads its children's words before it sends anything in this round.
        try:
            self._peers[self._parent].sendall(pack(word))
        except OSError as error:
            if not self.fails_on_receive:
                raise CollectiveFault(f"lost rank {self._parent}: {error}") from error

    def _pass_on(self, child: int, frame: bytes) -> None:
        try:
            self._peers[child].sendall(frame)
        # The result is true whoever is gone, so the other children get it and this member acts on it. That the child is gone
        # is seen in the next round, by whoever waits for its word.
        except OSError:
            return

    def _hear(self, rank: int) -> tuple[bytes, bool]:
        """A neighbour's next frame, and whether it was there already."""
        # Nothing can come behind it: a child says nothing more before it has the result, and a parent makes no other result
        # before it has this member's next word.
        was_there, frame = True, self._read(rank, _READ_BYTES, socket.MSG_DONTWAIT)
        if not frame:
            was_there = False
            self.waits(rank)
            # No time limit. How long a neighbour may take is the coordinator's decision, because it alone sees all of them;
            # `abort` ends the wait.
            frame = self._read(rank, _READ_BYTES)
        while size := missing(frame, _MOST_BYTES):
            if size < 0:
                raise CollectiveFault(f"rank {rank} said more than one word in a round")
            frame += self._read(rank, size)
        return frame, was_there

    def _read(self, rank: int, most: int, flags: int = 0) -> bytes:
        """What has come from a neighbour; empty, with MSG_DONTWAIT: nothing."""
        try:
            data = self._peers[rank].recv(most, flags)
        except BlockingIOError:
            return b""
        except OSError as error:
            raise CollectiveFault(f"lost rank {rank}: {error}") from error
        if not data:
            raise CollectiveFault(f"lost rank {rank}: its connection closed")
        return data


_HEAD = struct.Struct("<BI")
_KEY, _END = 1, 2
_READ_KEYS = 1 << 16


class TreeStore(ChannelStore):
    """Keys travel along the tree, to the members of their group. A thread passes them on until `finish`: this member may be inside
    of gloo, where it waits for a peer that waits for a key."""

    def __init__(self, channel: TreeChannel, parent: int, beyond: Mapping[int, set[str]]) -> None:
        """parent: a rank; -1: the channel's member is the root. beyond: for each neighbour, the labels of the groups that have
        members there."""
        super().__init__(channel)
        self._parent, self._beyond = parent, beyond
        self._news = threading.Condition()
        self._error: CollectiveFault | None = None
        self._unsent = {rank: bytearray() for rank in beyond}
        self._unread = {rank: bytearray() for rank in beyond}
        self._ended: set[int] = set()
        self._has_ended = self._complete = self._sent = self._closed = False
        self._woken, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="holdfast-keys", daemon=True)
        self._thread.start()

    def set(self, key: str, value: bytes | str) -> None:
        """Sends the value to the members of the key's group."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        with self._news:
            self._values[key] = data
            if self._finished:
                return
            name = key.encode()
            body = struct.pack("<H", len(name)) + name + data
            self._spread(key, _HEAD.pack(_KEY, len(body)) + body, None)
            self._news.notify_all()
        self._wake()

    def get(self, key: str) -> bytes:
        """Waits for the value."""
        self.wait([key])
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits for the keys. The timeout is not needed: a generation that breaks ends the wait."""
        with self._news:
            self._news.wait_for(lambda: self.check(keys) or self._error or self._complete)
            if not self.check(keys):
                raise self._error or CollectiveFault("a rank requested a key that no rank has set")

    def finish(self) -> None:
        """As in ChannelStore."""
        with self._news:
            self._finished = True
            self._end()
        self._wake()
        with self._news:
            # Until the thread has sent all: a word of this member would else come in the middle of a key.
            self._news.wait_for(lambda: self._error or self._sent)
            if self._error is not None:
                raise self._error

    def close(self) -> None:
        """As in ChannelStore. The thread ends, and whoever still waits is let go."""
        with self._news:
            self._closed = True
            if not self._sent and self._error is None:
                self._error = CollectiveFault("the generation broke while its members connected")
            self._news.notify_all()
        self._wake()
        self._thread.join()
        self._woken.close()
        self._waker.close()

    # ------------------------------------------------------------ under the lock

    def _spread(self, key: str, frame: bytes, origin: int | None) -> None:
        """To all neighbours beyond which there are members of the key's group, but the one that it came from."""
        label = key.partition("/")[0]
        for rank, labels in self._beyond.items():
            if rank != origin and label in labels:
                self._unsent[rank] += frame

    def _end(self) -> None:
        """Says that no key follows, once that is so of this member and of all below it; and, from the root on, of all members."""
        # As in a round: up once all below have ended, and down from the root. On each connection it comes behind all keys. So
        # who hears it from its parent has all keys, and nobody sends a key behind it.
        below = self._beyond.keys() - {self._parent}
        if not self._finished or not below <= self._ended:
            return
        end = _HEAD.pack(_END, 0)
        if self._parent >= 0 and not self._has_ended:
            self._unsent[self._parent] += end
        self._has_ended = True
        if self._parent < 0 or self._parent in self._ended:
            for rank in below:
                self._unsent[rank] += end
            self._complete = True
            self._news.notify_all()

    def _take(self, rank: int, received: bytes) -> None:
        """What came from a neighbour."""
        buffer = self._unread[rank]
        buffer += received
        while len(buffer) >= _HEAD.size:
            kind, size = _HEAD.unpack_from(buffer)
            end = _HEAD.size + size
            if len(buffer) < end:
                return
            frame = bytes(buffer[:end])
            del buffer[:end]
            if kind == _END:
                self._ended.add(rank)
                self._end()
                return
            name = _HEAD.size + 2
            value = name + struct.unpack_from("<H", frame, _HEAD.size)[0]
            key = frame[name:value].decode()
            self._values[key] = frame[value:]
            self._spread(key, frame, rank)
            self._news.notify_all()

    # ------------------------------------------------------------ the thread

    def _wake(self) -> None:
        try:
            self._waker.send(b"\0")
        except OSError:  # so many wait there already, or it is closed
            return

    def _run(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._woken, selectors.EVENT_READ, -1)
                while self._arrange(selector):
                    for key, events in selector.select():
                        self._move(key.data, events)
        except CollectiveFault as error:
            with self._news:
                self._error = self._error or error
                self._news.notify_all()

    def _arrange(self, selector: selectors.BaseSelector) -> bool:
        """What is waited for next; False: nothing any more."""
        with self._news:
            if self._closed:
                return False
            if self._complete and not any(self._unsent.values()):
                self._sent = True
                self._news.notify_all()
                return False
            wanted = {
                rank: (selectors.EVENT_READ if rank not in self._ended else 0)
                | (selectors.EVENT_WRITE if self._unsent[rank] else 0)
                for rank in self._beyond
            }
        there = {key.data: key.events for key in selector.get_map().values()}
        for rank, events in wanted.items():
            sock = self._channel._peers[rank]
            if not events and rank in there:
                selector.unregister(sock)
            elif events and rank not in there:
                selector.register(sock, events, rank)
            elif events != there.get(rank, 0):
                selector.modify(sock, events, rank)
        return True

    def _move(self, rank: int, events: int) -> None:
        """Sends and reads what can be. Of two neighbours that send large values, each would else wait until the other reads."""
        if rank < 0:
            self._woken.recv(_READ_KEYS)
            return
        sock = self._channel._peers[rank]
        try:
            if events & selectors.EVENT_WRITE:
                with self._news:
                    unsent = self._unsent[rank]
                    del unsent[: sock.send(unsent[:_READ_KEYS], socket.MSG_DONTWAIT)]
            if events & selectors.EVENT_READ:
                # No word can come behind the last key, and be taken for one: a member says nothing more to its parent, which
                # has no result for it either, before this store has ended on both sides.
                received = sock.recv(_READ_KEYS, socket.MSG_DONTWAIT)
                if not received:
                    raise CollectiveFault(f"lost rank {rank}: its connection closed")
                with self._news:
                    self._take(rank, received)
        except BlockingIOError:
            return
        except OSError as error:
            raise CollectiveFault(f"lost rank {rank}: {error}") from error
