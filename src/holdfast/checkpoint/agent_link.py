"""A worker's link to its node's agent as checkpoints use it, and the slots in the agent's memory. A worker of a job sets it
before the script runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from holdfast.checkpoint.memory import MappingObserver, SlotMaps
from holdfast.protocol import messages as m
from holdfast.protocol.machine.notice_board import NoticeBoard
from holdfast.protocol.machine.progress_record import ProgressRecord
from holdfast.protocol.snapshots import Key
from holdfast.tensors.index import StateIndex


class AgentLink(Protocol):
    """The part of a worker's link (`holdfast.train.link.Link`) that checkpoints use."""

    start: m.Start
    record: ProgressRecord
    token: str
    notices: NoticeBoard

    def send(self, message: m.WorkerMessage) -> None:
        """To the agent."""
        ...

    def wait_slot(self, key: Key, timeout_s: float) -> m.SlotGiven | None:
        """The agent's answer to SlotWanted; None when it does not come in time."""
        ...

    def wait_found(self, request: int, timeout_s: float) -> m.SnapshotFound | None:
        """The coordinator's answer to FindSnapshot; None when it does not come in time."""
        ...


class AgentSlots:
    """Slots in the agent's memory, from the worker's side: it asks for one and fills it, and the agent is told of the result in
    any case."""

    def __init__(self, link: AgentLink, observer: MappingObserver | None = None) -> None:
        """observer: as in `SlotMaps`."""
        self._link, self._maps = link, SlotMaps(observer)

    def want(self, key: Key, nbytes: int, waits: bool = False, paced: bool = False) -> None:
        """Requests a slot. From this call on the agent counts the copy, and a stop waits for it."""
        self._link.send(m.SlotWanted(key, nbytes, waits, paced=paced))

    def given(self, key: Key, patience_s: float) -> m.SlotGiven | None:
        """The agent's answer; None when it does not come in time."""
        return self._link.wait_slot(key, patience_s)

    def fill(
        self,
        key: Key,
        index: StateIndex,
        path: str | None,
        copy: Callable[[memoryview], bool],
        cost_s: Callable[[], float],
    ) -> bool:
        """Has `copy` fill the slot at `path`, with what `index` is about. False: it has not done so, or there is no slot.

        Args:
            cost_s: what the copy cost training; asked once, when the slot is not used any more.

        Raises:
            TierError: the slot is gone.
        """
        done: bytes | None = None
        try:
            if path is not None:
                with self._maps.blob(path, index.nbytes) as blob:
                    if copy(blob):
                        done = msgspec.msgpack.encode(index)
        finally:
            # In `finally`, and with None after an error: the agent holds the slot until it hears of it. An
            # agent that heard nothing would keep the memory of a shard for a worker that has long gone on.
            self._link.send(m.SlotFilled(key, done, cost_s()))
        return done is not None


_current: list[AgentLink] = []
"""At most one: a process is one worker for its whole life."""


def attach(link: AgentLink) -> None:
    """Declares this process a worker of a job."""
    _current[:] = [link]


def detach() -> None:
    """Declares this process no worker: a child that a script forked must not use its parent's link."""
    _current.clear()


def current() -> AgentLink | None:
    """The link of this worker; None outside of a job."""
    return _current[0] if _current else None
