"""Notices of what is to go away, as a script gets them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from holdfast.checkpoint import agent_link
from holdfast.protocol.machine.notice_board import NoticeBoard
from holdfast.protocol.notices import Notice


def notice() -> Notice | None:
    """What is to go away, of this worker's node and its job: the most urgent, or None.

    For scripts at levels 0 and 1, which ask between two of their steps, for example to save once more. At level 2 it is
    `run.notice`. A notice that was withdrawn, because a node stays after all, is gone at the next call. None also where
    there is no job, and in processes that a worker started.
    """
    link = agent_link.current()
    return link.notices.first() if link is not None else None


class Warnings:
    """Calls of a script for each notice, once for each function that it gave."""

    def __init__(self, board: NoticeBoard) -> None:
        self._board = board
        self._functions: list[tuple[Callable[[Notice], object], set[int]]] = []
        self._seen: tuple[int, ...] = board.numbers

    def add(self, function: Callable[[Notice], object]) -> None:
        """A function to be called, also with what stands already."""
        self._functions.append((function, set()))
        self._seen = ()

    def due(self) -> bool:
        """Whether something may have to be called: one comparison where nothing has changed."""
        return self._board.numbers is not self._seen and bool(self._functions)

    def calls(self) -> Iterator[Callable[[], object]]:
        """What has to be called now. A call counts as made when it is given, whatever comes of it."""
        self._seen = self._board.numbers
        for notice in self._board.standing():
            for function, told in self._functions:
                if notice.number not in told:
                    told.add(notice.number)
                    yield _call(function, notice)


def _call(function: Callable[[Notice], object], notice: Notice) -> Callable[[], object]:
    return lambda: function(notice)
