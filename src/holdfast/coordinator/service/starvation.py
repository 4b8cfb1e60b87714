"""Which agents are silent for want of a processor, as far as this machine's kernel knows.

On a machine that is overloaded an agent may not get to speak for seconds, and is well. One that is stopped, hangs, or is
cut off does not wait for a processor while it is silent: so only that time counts as silence in which no thread of it did.
Agents on other machines cannot be looked at. There an agent has its machine to itself, and threads that mostly sleep
get a processor before those that compute.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from holdfast.protocol.processes import kernel_id, waits_s


class _Look(NamedTuple):
    at_s: float
    waits_s: dict[int, float]


class Starving:
    """Looks at the agents of this machine that have been silent for longer than they should."""

    def __init__(self, patience_s: float) -> None:
        """patience_s: nobody who was heard of more lately is looked at."""
        self._patience_s, self._here = patience_s, kernel_id()
        self._pids: dict[str, int] = {}
        self._looks: dict[str, _Look] = {}

    def on_agent_joined(self, node: str, kernel: str, pid: int) -> None:
        """An agent said hello. kernel: as `kernel_id` says there."""
        self._looks.pop(node, None)
        if kernel and kernel == self._here:
            self._pids[node] = pid
        else:
            self._pids.pop(node, None)

    def look(self, heard: Iterable[tuple[str, float]], now: float) -> dict[str, float]:
        """Nodes that waited for a processor since the last look, and for how long (s). heard: of each node that lives,
        when it was heard of last, in the time of `now`."""
        starved = {}
        looks: dict[str, _Look] = {}
        for node, heard_s in heard:
            if now - heard_s <= self._patience_s or node not in self._pids:
                continue
            # A first look gives a number to compare with and no verdict. Only the growth between two looks is
            # time in which the agent could not run.
            before = self._looks.get(node)
            looks[node] = now_there = _Look(now, waits_s(self._pids[node]))
            if before is None:
                continue
            # The thread that waited longest: any one of an agent's threads may be the one that sends
            # heartbeats.
            more = [s - before.waits_s[t] for t, s in now_there.waits_s.items() if t in before.waits_s]
            # Never more than the time between the looks, whatever the kernel counts, or a node would be
            # trusted into the future.
            waited_s = min(max(more, default=0.0), now - before.at_s)
            if waited_s > 0:
                starved[node] = waited_s
        self._looks = looks
        return starved
