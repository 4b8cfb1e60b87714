"""Messages between two workers of a replica, such as those between the stages of a pipeline.

They are begun at once and waited for later: a schedule sends an activation and wants a gradient back in one go, and whoever
waited for its send first would wait for a peer that does the same.

Gloo's wait for a message cannot be left and taken up again: when its time is over it closes all connections of the group. So
a thread for each direction waits without a limit, and the main thread waits for the thread, or for an abort.
"""

from __future__ import annotations

import queue
import threading
from typing import Any

import torch.distributed as dist

from holdfast.errors import CollectiveFailed
from holdfast.train.gloo_group import GlooGroup, first_line

_Work: Any = dist.Work


class Message(_Work):  # type: ignore[misc]
    """What torch gets for a message. A wait for it is ended by an abort, which gloo's own would not be."""

    def __init__(self, gloo: GlooGroup, work: Any, tensors: Any, called: Any) -> None:
        """tensors: gloo reads or writes them until the message is done. called: as in `ReplicaGroups`."""
        super().__init__()
        self.gloo = gloo
        self._work, self._tensors, self._called = work, tensors, called
        self._ended = False
        self._error: str | None = None

    def wait(self, timeout: Any = None) -> bool:
        """Until it has come, or has gone.

        Raises:
            CollectiveFailed: a peer is gone, or `abort` was called.
        """
        self._called(True)
        if not self.gloo.until(self.is_completed):
            raise CollectiveFailed("the generation broke")
        if self._error is not None:
            raise CollectiveFailed(self._error)
        self._called(False)
        return True

    def is_completed(self) -> bool:
        """Whether there is nothing to wait for."""
        return self._ended

    def follow(self) -> None:
        """Waits for gloo, in the thread of its direction."""
        try:
            self._work.wait()
        except RuntimeError as error:
            self._error = first_line(error)
        self._ended = True
        self.gloo.tell()


class SentMessages:
    """Those of this worker that may still be on their way."""

    def __init__(self) -> None:
        self._open: list[Message] = []
        self._followers: dict[str, queue.SimpleQueue[Message | None]] = {}

    def add(self, direction: str, message: Message) -> Message:
        """One more. Those of one direction come to their end in the order in which they were begun."""
        # The list keeps tensors alive: a schedule that a fault cuts off drops its own references, and gloo may
        # still write into them.
        self._open = [m for m in self._open if not m.is_completed()]
        self._open.append(message)
        if direction not in self._followers:
            self._followers[direction] = queue.SimpleQueue()
            follow = threading.Thread(
                target=_follow, args=(self._followers[direction],), name="holdfast-message", daemon=True
            )
            follow.start()
        self._followers[direction].put(message)
        return message

    def complete(self) -> bool:
        """Whether all have come to their end, which is waited for: both ends of each have begun it."""
        try:
            for message in self._open:
                message.wait()
        except CollectiveFailed:
            return False
        self._open.clear()
        return True

    def close(self) -> None:
        """After an abort, or when all are complete: until gloo has let go of the tensors, if it ever does."""
        for message in self._open:
            message.gloo.let_go(message.is_completed)
        self._open.clear()
        # A thread that waits for gloo hears of its end afterwards. Where gloo never lets go it stays, and holds
        # nothing but its message.
        for follower in self._followers.values():
            follower.put(None)
        self._followers.clear()


def _follow(messages: queue.SimpleQueue[Message | None]) -> None:
    while (message := messages.get()) is not None:
        message.follow()
