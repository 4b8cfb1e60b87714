"""Where the workers of a replica leave a broken step together: by how many calls each of its groups has seen.

A healthy replica must not leave a collective half done, or its connections could not be used again. Workers that call the
same collectives in one order could stop at one number. The stages of a pipeline do not: each has calls of its own, in an order
of its own. So every group has a count, and every direction between two workers has one for messages. A place is consistent
where all members of each group have begun as many calls of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from holdfast.errors import CollectiveFailed

Say = Callable[[dict[str, int], int], None]
"""Tells the coordinator what was begun here, and at which agreement this worker stands; -1: it does not stand."""


class CollectiveCounts:
    """How many calls this worker has begun in each group, and where it is to stop.

    The coordinator takes the largest count of each group as its limit. A worker goes on until it has reached all of its limits.
    It may come to a call that is beyond a limit while others still wait for it in another group. That call is then
    begun, and told: its group's limit grows, and who already stood goes on. Calls only ever grow in number, and the step
    has an end, so all come to stand. Then all leave, and not before: until then a limit may still grow.
    """

    def __init__(self, is_mine: Callable[[str], bool]) -> None:
        """is_mine: whether this worker takes part in the calls of a name."""
        self._is_mine = is_mine
        self.say: Say = lambda begun, stands: None
        self._news = threading.Condition()
        self._begun: dict[str, int] = {}
        self._aborted = self._halting = self._leave = False
        self._limits: Mapping[str, int] | None = None
        self._agreement = 0
        self._stood = -1

    @property
    def aborted(self) -> bool:
        """Whether nobody may begin a call any more."""
        return self._aborted

    def renew(self) -> None:
        """New connections: all counts begin anew."""
        with self._news:
            self._aborted = False
            self._begun.clear()
            self._forget()

    def abort(self) -> None:
        """Frees who waits here. Safe from any thread, more than once."""
        # The flag comes before the connections are shut: a call that is about to begin checks it under the same
        # lock, so none begins behind the abort and waits for a peer that has left.
        with self._news:
            self._aborted = True
            self._news.notify_all()

    def halt(self) -> dict[str, int]:
        """The generation broke, and this replica is intact: no further call begins before `run_to`. Returns what has begun.
        From the link's thread."""
        with self._news:
            # Read under the lock that `begin` holds when it adds to it. So what goes to the coordinator is
            # exact: a call that is not in it has not begun, and will not begin before `run_to`.
            self._forget()
            self._halting = True
            self._news.notify_all()
            return dict(self._begun)

    def run_to(self, limits: Mapping[str, int], agreement: int, leave: bool) -> None:
        """So many calls are to begin here, and no more. leave: all have come to stand. From the link's thread."""
        with self._news:
            # Messages keep their order, so a later agreement is never followed by an earlier one.
            self._limits, self._agreement, self._leave = limits, agreement, leave
            self._news.notify_all()

    def begin(self, name: str) -> None:
        """Before every call that reaches another worker.

        Raises:
            CollectiveFailed: the step is to be left here.
        """
        told: dict[str, int] | None = None
        with self._news:
            while self._halting and not self._aborted:
                if self._limits is not None:
                    if self._begun.get(name, 0) < self._limits.get(name, 0):
                        break
                    if self._is_behind():
                        # Others wait inside a call of another group for this worker, and its way there leads
                        # through this one. Whoever takes part in this one hears of it and follows.
                        told = {**self._begun, name: self._begun.get(name, 0) + 1}
                        break
                    self._stand()
                # The wait has no time limit of its own: either `run_to` comes, or the coordinator aborts the
                # replica because one of its workers did not answer.
                self._news.wait()
            if self._aborted:
                raise CollectiveFailed("the generation broke")
            self._begun[name] = self._begun.get(name, 0) + 1
        if told is not None:
            self.say(told, -1)

    def leave(self, broken: bool) -> int:
        """The main thread has left the step. Returns the number of the agreement at which it did, 0 where none was needed, or
        -1: the connections are of no use any more. broken: the generation is, so `halt` or `abort` was called or is about
        to be."""
        with self._news:
            # The main thread may be here before the link's thread has called `halt`. Deciding now would see
            # neither a limit nor an abort, and the replica would keep groups of which the others think
            # otherwise.
            while broken and not self._aborted and not self._may_leave():
                self._news.wait()
            # Behind its limits this worker has left the step early, by an error of its own. The others wait in
            # a call that never comes: their connections cannot be kept.
            if self._aborted or (self._limits is not None and self._is_behind()):
                return -1
            agreement = self._agreement
            self._forget()
            return agreement

    def _may_leave(self) -> bool:
        if not self._halting or self._limits is None:
            return False
        if self._is_behind() or self._leave:
            return True
        if self._stood != self._agreement:
            self._stood = self._agreement
            self.say(dict(self._begun), self._agreement)
        return False

    def _stand(self) -> None:
        """In front of a call that is not to begin.

        Raises:
            CollectiveFailed: all stand, so all leave.
        """
        if self._may_leave():
            raise CollectiveFailed("the generation broke")

    def _is_behind(self) -> bool:
        """Whether others have begun calls that this worker has not. Under the lock."""
        assert self._limits is not None
        return any(
            count > self._begun.get(name, 0) for name, count in self._limits.items() if self._is_mine(name)
        )

    def _forget(self) -> None:
        self._halting = self._leave = False
        self._limits, self._agreement, self._stood = None, 0, -1
