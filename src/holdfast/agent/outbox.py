"""The messages that an agent has for the coordinator: a queue of bounded length.

While there is no coordinator everything waits here with the time of its arrival. A full queue has to lose something, so
it chooses what: never the newest, and nothing that counts while there is something else.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import msgspec

from holdfast.protocol import messages as m

KEPT_MESSAGES = 10_000
REPEATED = 512
"""So many of the newest losses are told again on a new connection: a coordinator that died, or hung before that, may not
have written what it was sent. Everything else that it may have missed is in the hello."""
FREED = 1 / 8
"""This share of a full queue is freed at once: one look through it makes room for many messages."""


class Letter(NamedTuple):
    """A message that waits for a coordinator."""

    arrived_s: float
    """When it came, on CLOCK_MONOTONIC."""
    message: m.AgentMessage
    again: bool = False
    """It was sent before, to a coordinator that may not have written it."""


class Outbox:
    """Oldest first. Whoever sends takes a letter out, and then says `sent`, or puts back what could not be sent: so a
    letter that is under way is not among those that may be dropped."""

    def __init__(self, kept: int = KEPT_MESSAGES, repeated: int = REPEATED) -> None:
        self._kept = kept
        self._waiting: deque[Letter] = deque()
        # Bounded by itself: what was sent needs no promise, only a good chance to be written by the next
        # coordinator.
        self._told: deque[Letter] = deque(maxlen=repeated)

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, message: m.AgentMessage, now_s: float) -> None:
        """Appends a message. It is kept, whatever else has to be dropped for it."""
        if len(self._waiting) >= self._kept:
            self._make_room()
        # After room was made, and without a look at its worth. The newest message is the one that somebody
        # waits for now.
        self._waiting.append(Letter(now_s, message))

    def take(self) -> Letter:
        """Takes the oldest message out."""
        return self._waiting.popleft()

    def put_back(self, letter: Letter) -> None:
        """Puts a letter that could not be sent back to the front."""
        self._waiting.appendleft(letter)

    def sent(self, letter: Letter) -> None:
        """Notes that a letter was handed to the kernel."""
        if (losses := _losses(letter.message)) is not None:
            # Only losses and figures. Everything else that a new coordinator may have missed is in the hello,
            # and to send it twice could count it twice.
            self._told.append(Letter(letter.arrived_s, losses, again=True))

    def repeat(self) -> None:
        """On a new connection: queues the newest losses again, before the rest, as far as there is room."""
        room = max(0, self._kept - len(self._waiting))
        # From the newest back, each put before the one after it: they arrive in their old order, and if there
        # is no room for all of them it is the oldest that are lost.
        while self._told and room:
            self._waiting.appendleft(self._told.pop())
            room -= 1
        self._told.clear()

    def _make_room(self) -> None:
        """Drops the least important messages, the oldest first."""
        # A stable order of two keys, so that of messages with the same worth the oldest goes first. This runs
        # once for an eighth of the queue, not for every message.
        order = sorted(range(len(self._waiting)), key=lambda i: (_worth(self._waiting[i]), i))
        dropped = set(order[: max(1, int(self._kept * FREED))])
        self._waiting = deque(letter for i, letter in enumerate(self._waiting) if i not in dropped)


def _worth(letter: Letter) -> int:
    """Least: what was sent before; what is soon said anew; rows of the ledger. Most: what the core waits for."""
    message = letter.message
    if letter.again:
        return 0
    if isinstance(message, m.Heartbeat | m.StoreProgress | m.Stalled | m.NodeReadings):
        return 1
    if isinstance(message, m.FromWorker) and isinstance(message.message, m.Progress | m.Restoring):
        inner = message.message
        # A row of losses is lost for the curve that a person sees. Nothing decides by it.
        return 2 if isinstance(inner, m.Progress) and (inner.losses or inner.figures) else 1
    return 3


def _losses(message: m.AgentMessage) -> m.AgentMessage | None:
    """What of a message may be told again, without anything that is counted."""
    if not isinstance(message, m.FromWorker) or not isinstance(message.message, m.Progress):
        return None
    if not message.message.losses and not message.message.figures:
        return None
    # `spent` is added up by the core, so a repetition would count the time twice. Losses and figures are
    # written by their step, and a second copy changes nothing.
    return m.FromWorker(message.worker, msgspec.structs.replace(message.message, spent=()))
