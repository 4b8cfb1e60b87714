"""Reads the machine's sources on a thread of their own, as seldom as they allow, and applies rules to the readings."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Iterable

from holdfast.health.rule_engine import RuleEngine
from holdfast.health.rules import Rule
from holdfast.health.samples import LogLine, Reading
from holdfast.health.sources import Source
from holdfast.protocol.health import Condition, Finding, Remedy, Severity
from holdfast.protocol.machine.processes import stand_back

NICE = 10
"""Nothing on this thread is worth a worker's time slice."""
GRACE_S = 8.0
"""A call into a source that takes longer hangs."""
LOOK_S = 1.0
"""How often it is looked whether everything watches. Together with the grace it is below ten seconds."""
ANSWER = "answer"
WATCH_ENDED = "watch-ended"
"""What is found when nothing is read any more: then nothing is found either, and that is no sign of health."""
UNWATCHED = "source-unwatched"
"""What is found when one source gives nothing any more: it hangs, is refused, or a thread of its own has ended."""


class _Polled:
    """One source and when it is read next. fd: readable when the source has news before its time; -1: it never does."""

    def __init__(self, source: Source, now_s: float) -> None:
        self.source = source
        self.next_s = now_s
        self.began_s: float | None = None
        self.fd: int = getattr(source, "fileno", lambda: -1)()
        self.trouble: Callable[[], str] = getattr(source, "trouble", lambda: "")
        self.refused = ""
        """Why its newest reading has no value; empty: it has some."""
        self.said = False
        """It was said that it is not watched."""

    def not_watched(self, now_s: float) -> str:
        """Why nothing is known of it now; empty: it is watched."""
        if self.began_s is not None and now_s - self.began_s >= GRACE_S:
            return f"a call has not returned for {now_s - self.began_s:.0f} s"
        return self.refused or self.trouble()


class Poller:
    """Owns the sources. `found` and `on_lines` are called on the poller's thread; `on_lines` gets the lines that sources have,
    to be judged together with those from elsewhere: a burst is one, however it is heard of."""

    def __init__(
        self,
        rules: Iterable[Rule],
        found: Callable[[list[Finding]], None],
        on_lines: Callable[[list[LogLine]], None] = lambda lines: None,
        on_read: Callable[[list[Reading | LogLine]], None] = lambda readings: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """on_read: gets all that one source has read, on the poller's thread, before it is judged."""
        self._clock = clock
        self._rule_engine = RuleEngine(rules)
        self._on_read = on_read
        self._found, self._on_lines = found, on_lines
        self._polled: list[_Polled] = []
        self._hung: list[_Polled] = []
        self._lock = threading.Lock()
        # An event of the kernel's and not a threading.Event, because the thread waits for file descriptors of
        # sources at the same time.
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread: threading.Thread | None = None
        self._closed = False
        self._ended = ""
        self._reported_ended = False
        self._read_all = threading.Event()

    def add(self, sources: Iterable[Source]) -> None:
        """More sources; they are read soon."""
        now = self._clock()
        with self._lock:
            self._polled += [_Polled(source, now) for source in sources]
        # Started with the first source: a node that watches nothing has no thread.
        if self._thread is None and self._polled:
            self._start()
        self._nudge()

    @property
    def sources(self) -> frozenset[str]:
        """Names of those that it owns."""
        with self._lock:
            return frozenset(polled.source.name for polled in (*self._polled, *self._hung))

    def read_once(self, within_s: float) -> None:
        """Waits until everything was read for the first time."""
        self._read_all.wait(within_s if self._polled else 0.0)

    def use(self, rules: Iterable[Rule]) -> None:
        """Replaces the rules."""
        with self._lock:
            self._rule_engine.set_rules(rules)

    def watch_yourself(self, wait: bool = False) -> None:
        """Whether everything watches, asked every `LOOK_S` from another thread. A source that hangs is left behind: the others go on
        without it on a new thread. So they do when the thread ended by itself. Each is said, and when it is over.

        wait: also while the thread judges."""
        if self._thread is None or self._closed:
            return
        # Whoever has it judges what was just read, at a low priority: the caller has workers to serve, and looks again soon.
        if not self._lock.acquire(blocking=wait):
            return
        try:
            self._look_after(self._thread, self._clock())
        finally:
            self._lock.release()

    def _look_after(self, thread: threading.Thread, now: float) -> None:
        # Taken and cleared together. The thread writes it once and has ended then, so no lock is needed.
        ended, self._ended = self._ended, ""
        # Without a number it has not begun yet.
        if not ended and thread.ident is not None and not thread.is_alive():
            ended = "it is gone"
        self._say_ended(ended, now)
        if ended:
            for polled in self._polled:
                polled.began_s = None  # nobody is in its call any more
        stuck = [p for p in self._polled if p.began_s is not None and now - p.began_s >= GRACE_S]
        for polled in stuck:
            # A source that hangs, in a driver for example, cannot be interrupted. It keeps the old thread
            # and is left out of the new one's list, so the others are read on.
            self._polled.remove(polled)
            self._hung.append(polled)
        silent = [
            _silent(p.source.name, now - (p.began_s or now)) for p in self._hung if p.began_s is not None
        ]
        self._judge(silent, now)
        self._say_unwatched(now)
        if stuck or ended:
            self._start()

    def _say_unwatched(self, now_s: float) -> None:
        """Once of each source, and once when it is watched again. The caller has the lock."""
        all_ = (*self._polled, *self._hung)
        why = {id(p): p.not_watched(now_s) for p in all_}
        changed = [p for p in all_ if bool(why[id(p)]) is not p.said]
        if not changed:
            return
        back = [p for p in changed if p.said]
        for polled in changed:
            polled.said = not polled.said
        found = [_unwatched(p.source.name, "") for p in back]
        # Whoever keeps what is unknown keeps it by the rule: what is still unwatched is said again.
        again = [p for p in all_ if p.said and (back or p in changed)]
        self._found(found + [_unwatched(p.source.name, why[id(p)]) for p in again])

    def _say_ended(self, why: str, now_s: float) -> None:
        """Nothing is known of any source until it is read again. Said once, and once more when it is over."""
        if why:
            told = f"the thread that reads the sensors ended: {why}"
            self._judge(
                [Reading(source=p.source.name, name=ANSWER, value=None, why=told) for p in self._polled],
                now_s,
            )
        if bool(why) is self._reported_ended:
            return
        self._reported_ended = bool(why)
        text = (
            f"hardware monitoring stopped: {why}; restarting it" if why else "hardware monitoring works again"
        )
        condition = Condition.UNKNOWN if why else Condition.HEALTHY
        severity = Severity.WARNING if why else Severity.INFO
        self._found(
            [
                Finding(
                    rule=WATCH_ENDED,
                    severity=severity,
                    remedy=Remedy.WATCH,
                    source="agent",
                    condition=condition,
                    evidence=text,
                )
            ]
        )

    def close(self) -> None:
        """Ends the thread unless a source holds it, and gives back what idle sources hold."""
        self._closed = True
        self._nudge()
        if self._thread is not None:
            # A thread that hangs in a driver is left behind. It is a daemon, so it does not hold up the
            # process's end.
            self._thread.join(timeout=1.0)
        if self._thread is None or not self._thread.is_alive():
            # Only when the thread is over: it would otherwise wait on a descriptor that some other file has
            # got meanwhile.
            os.close(self._wake)
            for polled in self._polled:
                polled.source.close()

    # ------------------------------------------------------------ the thread

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="health", daemon=True)
        self._thread.start()

    def _nudge(self) -> None:
        os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        try:
            stand_back(NICE)
            self._read_on()
        except BaseException as error:  # noqa: BLE001 - whatever ends the watching must be said, else it passes for health
            # Of a thread that was given up, the one that took its place says nothing.
            if self._thread is threading.current_thread():
                self._ended = f"{type(error).__name__}: {error}"

    def _read_on(self) -> None:
        me = threading.current_thread()
        # A thread that was given up as stuck finds here that another one took its place, and ends.
        while not self._closed and self._thread is me:
            due = self._await_due()
            for polled in due:
                if self._closed or not self._read(polled, me):
                    return
            if due:
                self._read_all.set()

    def _await_due(self) -> list[_Polled]:
        """Waits until something is due. Periods of whole seconds from a common beginning share their wake-ups."""
        waiter = select.poll()
        waiter.register(self._wake, select.POLLIN)
        with self._lock:
            # A copy, because the watchdog takes stuck sources out of the list while this thread waits.
            polled = list(self._polled)
        for p in polled:
            if p.fd >= 0:
                waiter.register(p.fd, select.POLLIN)
        delay_s = min((p.next_s for p in polled), default=self._clock() + 3600) - self._clock()
        ready = dict(waiter.poll(max(0.0, delay_s) * 1000 + 1))
        for p in polled:
            if ready.get(p.fd, 0) & (select.POLLNVAL | select.POLLHUP):
                p.fd = -1  # it is closed: nothing comes from there any more
        if self._wake in ready:
            os.eventfd_read(self._wake)
        now = self._clock()
        return [p for p in polled if p.next_s <= now or p.fd in ready]

    def _read(self, polled: _Polled, me: threading.Thread) -> bool:
        """Reads one source; False when it took so long that another thread does the rest now."""
        polled.began_s = now = self._clock()
        try:
            readings = list(polled.source.read())
        except Exception as error:  # noqa: BLE001 - a source that breaks is unknown, whatever broke it
            readings = [
                Reading(
                    source=polled.source.name, name=ANSWER, value=None, why=f"{type(error).__name__}: {error}"
                )
            ]
        self._on_read(readings)
        with self._lock:
            polled.began_s = None
            if readings:
                polled.refused = _refused(readings)
            if now >= polled.next_s:
                # In whole periods from its first time, not from now. Sources with the same period stay
                # together, and the processor is woken once for all of them; a late reading is not made up for
                # by several in a row.
                polled.next_s += polled.source.every_s * (1 + (now - polled.next_s) // polled.source.every_s)
            if self._thread is not me:
                self._hung.remove(polled)
                self._polled.append(polled)  # it answers again
                self._nudge()
                return False
            self._judge(readings, self._clock())
            if bool(polled.refused) is not polled.said:
                self._say_unwatched(self._clock())
        return True

    def _judge(self, readings: Iterable[Reading | LogLine], now_s: float) -> None:
        findings: list[Finding] = []
        lines: list[LogLine] = []
        for item in readings:
            if isinstance(item, LogLine):
                lines.append(item)
            else:
                findings += self._rule_engine.on_reading(item, now_s)
        # Lines go to the loop's own rule engine. A burst that the kernel's log and the driver both report must
        # count as one burst.
        if lines:
            self._on_lines(lines)
        if findings:
            self._found(findings)


def _refused(readings: Iterable[Reading | LogLine]) -> str:
    """Why nothing could be read; empty: something was. How long a driver has been silent is no reading of it."""
    given = [r for r in readings if isinstance(r, Reading) and not r.name.endswith("silent_s")]
    if any(r.value is not None for r in given):
        return ""
    return next((r.why or "it does not return a value" for r in given), "")


def _unwatched(source: str, why: str) -> Finding:
    return Finding(
        rule=UNWATCHED,
        severity=Severity.WARNING if why else Severity.INFO,
        remedy=Remedy.WATCH,
        source="agent",
        subject=source,
        condition=Condition.UNKNOWN if why else Condition.HEALTHY,
        evidence=f"{source} is not watched: {why}" if why else f"{source} is watched again",
    )


def _silent(source: str, since_s: float) -> Reading:
    return Reading(source=source, name=ANSWER, value=None, why=f"no answer for {since_s:.0f} s")
