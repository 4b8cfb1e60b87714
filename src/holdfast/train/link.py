"""A worker's link to its agent, and the coordinator's orders that arrive through it.

One thread reads the Unix socket. It must work while the main thread trains, so it only records what arrives and, when a
generation is broken, frees the main thread from the collective in which it waits.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial

from holdfast.checkpoint import agent_link
from holdfast.errors import GenerationBroken
from holdfast.protocol import messages as m
from holdfast.protocol.faults import ArmedFault
from holdfast.protocol.machine.notice_board import NoticeBoard
from holdfast.protocol.machine.progress_record import ProgressRecord
from holdfast.protocol.notices import Notice
from holdfast.protocol.snapshots import Key
from holdfast.protocol.wire.frames import Codec, pack

_orders: Codec[m.ToWorker] = Codec(m.ToWorker)


class Link:
    """Messages to and from the agent. Thread-safe.

    Attributes:
        start: what this worker was told to become.
        record: the progress record, shared with the agent.
        failed: the script raised outside of a step; this worker ends and has nothing more to say.
        notices: what is to go away, as far as the job knows.
    """

    def __init__(self, sock: socket.socket, start: m.Start, record: ProgressRecord, token: str) -> None:
        self.start = start
        self.record = record
        self.token = token
        self.failed = False
        self.notices = NoticeBoard()
        self._sock = sock
        self._reader = threading.Thread(target=self._read, name="holdfast-link", daemon=True)
        self._sending = threading.Lock()
        self._news = threading.Condition()
        self._order: m.JoinGeneration | m.Stop | m.Rebuild | None = None
        self._seen = 0
        self._broken = 0
        self._broken_reason = ""
        self._yielding = 0
        self._acked: set[str] = set()
        self._slot: m.SlotGiven | None = None
        self._found: m.SnapshotFound | None = None
        self._abort: Callable[[], None] | None = None
        self._halt: Callable[[], dict[str, int]] | None = None
        self._run_to: Callable[[Mapping[str, int], int, bool], None] | None = None
        self.on_arm: Callable[[tuple[ArmedFault, ...]], None] = lambda faults: None
        self.on_drop: Callable[[], None] = lambda: None
        self.on_where: Callable[[int], None] = lambda request: None
        self.on_stacks: Callable[[], None] = lambda: None

    def listen(self) -> None:
        """Starts the reading thread (a daemon: it ends with the process)."""
        self._reader.start()

    def close(self) -> None:
        """Ends the link and its thread. For a job of one; a worker's link lasts as long as its process."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._reader.join()
        self._sock.close()

    def send(self, message: m.WorkerMessage) -> None:
        """Sends a message to the agent. Errors are ignored: an agent that is gone takes this process with it."""
        # Packed outside the lock; only the write is under it. The main thread, the snapshot's and the
        # reader's all send, and two frames must not interleave.
        frame = pack(message)
        with self._sending:
            try:
                self._sock.sendall(frame)
            except OSError:
                return

    # ------------------------------------------------------------ for the main thread

    def next_order(self) -> m.JoinGeneration | m.Stop | m.Rebuild:
        """Waits for the next generation to join, or for the order to leave."""
        with self._news:
            self._news.wait_for(lambda: self._order is not None)
            order, self._order = self._order, None
            assert order is not None
            return order

    def check(self, generation: int) -> None:
        """Raises GenerationBroken when this generation, or a later one, was broken."""
        # Read without the lock: one attribute, which only grows. A step asks several times, and a value that
        # is a moment old is found by the next collective.
        if self._broken >= generation:
            raise GenerationBroken(self._broken_reason)

    def broken(self, generation: int) -> bool:
        """Whether this generation, or a later one, was broken."""
        return self._broken >= generation

    def wait_broken(self, generation: int) -> None:
        """Waits until the coordinator has broken the generation (after a collective failed here)."""
        with self._news:
            # An order ends the wait too. A Stop may come without a Break, when the job ends at this moment.
            self._news.wait_for(lambda: self._broken >= generation or self._order is not None)

    def yielding(self, generation: int) -> bool:
        """Whether the generation is to end at the next commit."""
        return self._yielding >= generation

    def guard(
        self,
        generation: int,
        abort: Callable[[], None],
        halt: Callable[[], dict[str, int]] | None = None,
        run_to: Callable[[Mapping[str, int], int, bool], None] | None = None,
    ) -> None:
        """`abort` is called (from another thread) when this generation breaks; at once if it has.

        halt: called instead while the worker's own replica is intact; returns how many calls of each of its groups have begun.
        run_to: called with where to stand then, see `CollectiveCounts.run_to`. `abort` may follow.
        """
        with self._news:
            # Under the lock that `_note` holds, so a break is seen here or finds the new `abort`; it cannot
            # fall in between. `abort` is called outside of it, because it takes locks of its own.
            if self._broken < generation:
                self._abort, self._halt, self._run_to = abort, halt, run_to
                return
        abort()

    def unguard(self) -> None:
        """Ends the effect of `guard`: the main thread has left every collective."""
        with self._news:
            self._abort = self._halt = self._run_to = None

    def wait_acked(self, fault: str) -> None:
        """Waits until the agent has passed on that an injected fault fires here."""
        with self._news:
            self._news.wait_for(lambda: fault in self._acked)

    def wait_slot(self, key: Key, timeout_s: float) -> m.SlotGiven | None:
        """The agent's answer to SlotWanted; None when it does not come in time."""
        with self._news:
            self._news.wait_for(lambda: self._slot is not None and self._slot.key == key, timeout_s)
            given = self._slot
            if given is None or given.key != key:
                return None
            # Taken: a slot may be asked for again, for the same shard, and that has an answer of its own.
            self._slot = None
            return given

    def wait_found(self, request: int, timeout_s: float) -> m.SnapshotFound | None:
        """The coordinator's answer to FindSnapshot; None when it does not come in time."""
        with self._news:
            self._news.wait_for(lambda: self._found is not None and self._found.request == request, timeout_s)
            found = self._found
            return found if found is not None and found.request == request else None

    # ------------------------------------------------------------ the reading thread

    def _read(self) -> None:
        while (order := _orders.read(self._sock)) is not None:
            self._take(order)

    def _take(self, order: m.ToWorker) -> None:
        match order:
            case m.Arm(faults):
                self.on_arm(faults)
            case m.DropTraffic():
                self.on_drop()
            case m.WhereInCollectives(request):
                self.on_where(request)
            case m.WriteStacks():
                self.on_stacks()
            case m.Notify(notices):
                self.notices.put(notices)
            case _:
                abort = self._note(order)
                if abort is not None:
                    abort()

    def _say_halted(self, generation: int, halt: Callable[[], dict[str, int]]) -> None:
        self.send(m.Halted(generation, halt()))

    def _note(self, order: m.ToWorker) -> Callable[[], None] | None:
        with self._news:
            match order:
                # Messages of an older coordinator or a repeated one change nothing: the number only grows.
                case m.JoinGeneration(generation=generation) if generation.number > self._seen:
                    self._seen = generation.number
                    self._order = order
                case m.Stop() | m.Rebuild():
                    self._order = order
                case m.Break(generation, reason, halts) if generation > self._broken:
                    self._broken, self._broken_reason = generation, reason
                    self._news.notify_all()
                    # The replica is intact: its workers first agree where to leave the step. `abort` stays
                    # armed, for when one of them cannot go on.
                    if halts and self._halt is not None:
                        return partial(self._say_halted, generation, self._halt)
                    # Taken out, so that it runs once. It is returned and not called: it would be called under
                    # the lock, and the main thread may need that lock to get out of its collective.
                    abort, self._abort = self._abort, None
                    return abort
                case m.Break(generation, _, halts) if generation == self._broken and not halts:
                    abort, self._abort = self._abort, None
                    return abort
                case m.RunTo(generation, begun, agreement, leave) if (
                    generation == self._broken and self._run_to is not None
                ):
                    return partial(self._run_to, begun, agreement, leave)
                case m.EndAtCommit(generation):
                    self._yielding = max(self._yielding, generation)
                case m.Ack(fault):
                    self._acked.add(fault)
                case m.SlotGiven():
                    self._slot = order
                case m.SnapshotFound():
                    self._found = order
                case _:
                    pass
            self._news.notify_all()
        return None


def notice() -> Notice | None:
    """The most urgent notice that this worker's node or its job will go away; None: there is none.

    For scripts at levels 0 and 1, which ask between two of their steps, for example to save once more. At level 2 it is
    `run.notice`. A notice that was withdrawn, because a node stays after all, is gone at the next call. None also where there
    is no job, and in processes that a worker started.
    """
    link = agent_link.current()
    return link.notices.first() if link is not None else None


class Warnings:
    """Calls functions of the script for each notice, each function once per notice."""

    def __init__(self, board: NoticeBoard) -> None:
        self._board = board
        self._functions: list[tuple[Callable[[Notice], object], set[int]]] = []
        self._seen: tuple[int, ...] = board.numbers

    def add(self, function: Callable[[Notice], object]) -> None:
        """Adds a function. It is also called for notices that are in force already."""
        self._functions.append((function, set()))
        self._seen = ()

    def due(self) -> bool:
        """Whether something may have to be called: one comparison where nothing has changed."""
        return self._board.numbers is not self._seen and bool(self._functions)

    def calls(self) -> Iterator[Callable[[], object]]:
        """The calls that are due now. A call counts as made when it is returned here, whatever comes of it."""
        self._seen = self._board.numbers
        for notice in self._board.standing():
            for function, told in self._functions:
                if notice.number not in told:
                    told.add(notice.number)
                    yield _call(function, notice)


def _call(function: Callable[[Notice], object], notice: Notice) -> Callable[[], object]:
    return lambda: function(notice)
