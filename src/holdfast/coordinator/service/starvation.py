"""Which agents are silent for want of a processor, as far as this machine's kernel knows.

On a machine that is overloaded an agent may not get to speak for seconds, and is well. One that is stopped, hangs, or is
cut off does not wait for a processor while it is silent: so only that time counts as silence in which no thread of it did.
Agents on other machines cannot be looked at. There an agent has its machine to itself, and threads that mostly sleep
get a processor before those that compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from holdfast.protocol.processes import ThreadTimes, kernel_id, thread_times


class _Silence:
    """How long one silent agent has waited for a processor, from the first look at it on."""

    def __init__(self, heard_s: float, now: float, threads: Mapping[int, ThreadTimes]) -> None:
        self.heard_s = heard_s
        """When the agent was heard of last, with what was excused since."""
        self._looked_s = now
        self._waits: dict[int, tuple[float, float]] = {}
        self._totals = self._count(threads, now)
        self._owed_s = 0.0

    def look(self, threads: Mapping[int, ThreadTimes], now: float) -> float:
        """For how long of the time since the last look it could not run (s)."""
        totals = self._count(threads, now)
        # The thread that waited longest: any one of an agent's threads may be the one that sends heartbeats,
        # or hold what that one waits for.
        grown_s = max(
            (total - self._totals[t] for t, total in totals.items() if t in self._totals), default=0.0
        )
        # A wait may show only when it ends, and be longer than the time since the last look. The rest is kept,
        # and not cut off: of many long waits little would be excused. Never more at once than the time between
        # the looks, whatever the kernel counts, or a node would be trusted into the future.
        self._owed_s += max(0.0, grown_s)
        waited_s = min(self._owed_s, now - self._looked_s)
        self._owed_s -= waited_s
        self._totals, self._looked_s = totals, now
        self.heard_s += waited_s
        return waited_s

    def _count(self, threads: Mapping[int, ThreadTimes], now: float) -> dict[int, float]:
        """By thread, for how long it has waited, with the wait that goes on now: the kernel adds that one only when it
        ends, and at a low priority that can take longer than a node has to speak."""
        waits, totals = {}, {}
        for thread, times in threads.items():
            totals[thread] = times.waited_s
            if times.runnable:
                # Runnable, and it has not run since that look: so it has waited from there on.
                since_s, ran_s = self._waits.get(thread, (now, times.ran_s))
                waits[thread] = (since_s if ran_s == times.ran_s else now, times.ran_s)
                totals[thread] += now - waits[thread][0]
        self._waits = waits
        return totals


class Starving:
    """Looks at the agents of this machine that have been silent for longer than they should."""

    def __init__(
        self, patience_s: float, times: Callable[[int], Mapping[int, ThreadTimes]] = thread_times
    ) -> None:
        """
        Args:
            patience_s: nobody who was heard of more lately is looked at.
            times: what the kernel has counted for each thread of a process, by its pid.
        """
        self._patience_s, self._times, self._here = patience_s, times, kernel_id()
        self._pids: dict[str, int] = {}
        self._silences: dict[str, _Silence] = {}

    def on_agent_joined(self, node: str, kernel: str, pid: int) -> None:
        """An agent said hello. kernel: as `kernel_id` says there."""
        self._silences.pop(node, None)
        if kernel and kernel == self._here:
            self._pids[node] = pid
        else:
            self._pids.pop(node, None)

    def look(self, heard: Iterable[tuple[str, float]], now: float) -> dict[str, float]:
        """Nodes that waited for a processor since the last look, and for how long (s). heard: of each node that lives,
        when it was heard of last, in the time of `now`."""
        starved = {}
        silences: dict[str, _Silence] = {}
        for node, heard_s in heard:
            if node not in self._pids:
                continue
            silence = self._silences.get(node)
            # What was excused counts as heard of, in the core and here. Only what is later than that was said by
            # the agent itself, and ends its silence.
            if silence is not None and heard_s <= silence.heard_s:
                waited_s = silence.look(self._times(self._pids[node]), now)
                if waited_s > 0:
                    starved[node] = waited_s
                silences[node] = silence
            elif now - heard_s > self._patience_s:
                # A first look gives numbers to compare with, and no verdict. Only their growth is time in which
                # the agent could not run.
                silences[node] = _Silence(heard_s, now, self._times(self._pids[node]))
        self._silences = silences
        return starved
