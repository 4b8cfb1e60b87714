"""Which agents are silent for want of a processor or of memory, as far as this machine's kernel knows.

On a machine that is overloaded an agent may not get to speak for seconds, and is well. One that is stopped, hangs, or is
cut off does not wait for a processor while it is silent: so only that time counts as silence in which no thread of it did. Nor
does the time count in which nothing on the machine could run, because the kernel looked for memory for all.
Agents on other machines cannot be looked at. There an agent has its machine to itself, and threads that mostly sleep
get a processor before those that compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from holdfast.protocol.machine.processes import ThreadTimes, kernel_id, memory_stall_s, thread_times


class _Silence:
    """How long one silent agent has waited for a processor or for memory, from the first look at it on."""

    def __init__(
        self, heard_s: float, now: float, threads: Mapping[int, ThreadTimes], stall_s: float
    ) -> None:
        self.heard_s = heard_s
        """When the agent was heard of last, with what was excused since."""
        self._looked_s = now
        self._waits: dict[int, tuple[float, float]] = {}
        self._totals = self._count(threads, now)
        self._owed_s = 0.0
        self._stall_s = stall_s

    def look(self, threads: Mapping[int, ThreadTimes], now: float, stall_s: float) -> float:
        """For how long of the time since the last look it could not run (s). stall_s: see `memory_stall_s`."""
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
        # The larger, and not the sum: who waits for a processor behind those who look for memory waits once.
        waited_s = max(waited_s, min(stall_s - self._stall_s, now - self._looked_s))
        self._stall_s = stall_s
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
        self,
        patience_s: float,
        times: Callable[[int], Mapping[int, ThreadTimes]] = thread_times,
        stall: Callable[[], float] = memory_stall_s,
    ) -> None:
        """
        Args:
            patience_s: nobody who was heard of more lately is looked at.
            times: what the kernel has counted for each thread of a process, by its pid.
            stall: for how long nothing on this machine could run for want of memory, since some moment (s).
        """
        self._patience_s, self._times, self._stall, self._here = patience_s, times, stall, kernel_id()
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
        """Nodes that waited for a processor or for memory since the last look, and for how long (s). heard: of each node that lives,
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
                waited_s = silence.look(self._times(self._pids[node]), now, self._stall())
                if waited_s > 0:
                    starved[node] = waited_s
                silences[node] = silence
            elif now - heard_s > self._patience_s:
                # A first look gives numbers to compare with, and no verdict. Only their growth is time in which
                # the agent could not run.
                silences[node] = _Silence(heard_s, now, self._times(self._pids[node]), self._stall())
        self._silences = silences
        return starved
