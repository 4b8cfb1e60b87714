"""This process's link to its node's agent. A worker of a job sets it before the script runs; saving and loading ask for it."""

from __future__ import annotations

from typing import Protocol

from holdfast.protocol import messages as m
from holdfast.protocol.machine.notice_board import NoticeBoard
from holdfast.protocol.machine.progress_page import ProgressPage
from holdfast.protocol.snapshots import Key


class AgentLink(Protocol):
    """What checkpoints need of a worker's link (`holdfast.train.link.Link`)."""

    start: m.Start
    page: ProgressPage
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


_current: list[AgentLink] = []
"""At most one: a process is one worker for its whole life."""


def attach(link: AgentLink) -> None:
    """This process is a worker of a job from now on."""
    _current[:] = [link]


def detach() -> None:
    """This process is no worker: a child that a script forked must not speak for its parent."""
    _current.clear()


def current() -> AgentLink | None:
    """The link of this worker; None outside of a job."""
    return _current[0] if _current else None
