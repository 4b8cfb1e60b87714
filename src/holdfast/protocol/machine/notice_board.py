"""The notices that are in force on a machine, as an agent and a worker keep them."""

from __future__ import annotations

import time

import msgspec

from holdfast.protocol.notices import Notice


class NoticeBoard:
    """The notices in force, with their deadlines on this machine's clock. One thread may read while another writes."""

    def __init__(self) -> None:
        self.numbers: tuple[int, ...] = ()
        """Of the notices that stand. A new tuple with every change, so whoever looks often compares by identity."""
        self._standing: tuple[tuple[Notice, float | None], ...] = ()

    def put(self, notices: tuple[Notice, ...]) -> None:
        """Replaces all notices by these."""
        now = time.monotonic()
        self._standing = tuple((n, None if n.deadline_s is None else now + n.deadline_s) for n in notices)
        self.numbers = tuple(n.number for n in notices)

    def standing(self) -> tuple[Notice, ...]:
        """All notices in force, with the remaining time: the earliest deadline first, those without one last."""
        now = time.monotonic()
        left = [
            n if until_s is None else msgspec.structs.replace(n, deadline_s=max(0.0, until_s - now))
            for n, until_s in self._standing
        ]
        return tuple(
            sorted(left, key=lambda n: (float("inf") if n.deadline_s is None else n.deadline_s, n.number))
        )

    def first(self) -> Notice | None:
        """The most urgent one; None: nothing is to go away."""
        return next(iter(self.standing()), None)
