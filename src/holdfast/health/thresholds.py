"""Conditions over readings: levels, changes, counters that rise, and readings that cannot be read."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from typing import TypeVar

from holdfast.health.rules import Rule
from holdfast.health.samples import Reading
from holdfast.protocol.health import Condition

_K = TypeVar("_K")
_V = TypeVar("_V")

SAMPLES = 64
"""Samples kept of one reading for one rule's window; a new one within a 64th of the window replaces the last one."""
KEYS_KEPT = 8192
ANY = "*"
REMIND_S = 600.0
"""A reading that is still unknown after this long is reported again, and the core asks a person then."""


class Series:
    """The state that one rule keeps about one reading."""

    __slots__ = ("left", "reported", "reported_s", "samples", "since_s", "times")

    def __init__(self) -> None:
        self.samples: deque[tuple[float, float]] = deque()
        self.left = False
        self.since_s: float | None = None
        self.times: deque[float] = deque()
        self.reported = False
        self.reported_s = 0.0


class Thresholds:
    """Judges readings, one after the other."""

    def __init__(self) -> None:
        self._series: OrderedDict[tuple[str, str], Series] = OrderedDict()
        # Only readings that another rule compares with are kept: `below_reading` needs the value of its
        # partner, which may come in the same round or in the one before.
        self._latest: OrderedDict[tuple[str, str, str], float | str] = OrderedDict()
        self._by_name: dict[tuple[str, str], list[Rule]] = {}
        self._unknown: dict[str, list[Rule]] = {}
        self._compared: set[str] = set()

    def set_rules(self, rules: Iterable[Rule]) -> None:
        """Replaces the rules."""
        self._by_name, self._unknown, self._compared = {}, {}, set()
        for rule in rules:
            if rule.unknown:
                self._unknown.setdefault(rule.source, []).append(rule)
            else:
                self._by_name.setdefault((rule.source, rule.reading), []).append(rule)
                self._compared |= {rule.below_reading, rule.above_reading} - {""}

    def judge(self, reading: Reading, now_s: float) -> Iterator[tuple[Rule, Condition, str, int]]:
        """Yields each rule whose condition became true or is over, with its condition, a message, and how often it
        became true."""
        yield from self._judge_unknown(reading, now_s)
        # An unknown value changes no rule's state: it neither confirms a fault nor ends one. The `unknown`
        # rules above have judged it already.
        if reading.value is None:
            return
        if reading.name in self._compared:
            _keep(self._latest, (reading.source, reading.name, reading.subject), reading.value)
        for rule in self._by_name.get((reading.source, reading.name), ()):
            series = self._of(rule.id, reading.subject)
            true = self._true(rule, reading, series, now_s)
            yield from _turn(rule, series, true, now_s, describe(rule, reading))

    def _judge_unknown(self, reading: Reading, now_s: float) -> Iterator[tuple[Rule, Condition, str, int]]:
        """One finding for a source that cannot be read, whichever of its readings failed; the next value ends it."""
        # A rule for this very source replaces the general one; both together would report the same failure
        # twice.
        for rule in self._unknown.get(reading.source, self._unknown.get(ANY, [])):
            series = self._of(rule.id, reading.source)
            # Almost every reading of every source ends here, so the message is not built before this.
            if reading.value is not None and series.since_s is None and not series.reported:
                continue
            message = f"{reading.source}: {reading.name} cannot be read: {reading.why or 'no answer'}"
            if reading.value is not None:
                message = f"{reading.source} can be read again"
            yield from _turn(rule, series, reading.value is None, now_s, message)

    def _of(self, id: str, subject: str) -> Series:
        key = (id, subject)
        series = self._series.pop(key, None) or Series()
        _keep(self._series, key, series)
        return series

    def _true(self, rule: Rule, reading: Reading, series: Series, now_s: float) -> bool:
        value = reading.value
        assert value is not None
        # Only what was in the good state can leave it. A port that was never active has no cable, and a new
        # node must not begin with a fault.
        if rule.leaves is not None:
            if value == rule.leaves:
                series.left = True
                return False
            return series.left
        if rule.equals is not None or rule.differs is not None:
            # Before the check for text: states such as `DOWN` are judged by equality and nothing else.
            return value == rule.equals if rule.equals is not None else value != rule.differs
        # A number was expected and the source gave text. It is not judged; a comparison would raise in the
        # agent's loop.
        if isinstance(value, str):
            return False
        if rule.any_bits is not None:
            return bool(int(value) & rule.any_bits)
        if rule.above is not None or rule.below is not None:
            return (rule.above is None or value > rule.above) and (rule.below is None or value < rule.below)
        if rule.below_reading or rule.above_reading:
            other = self._latest.get(
                (reading.source, rule.below_reading or rule.above_reading, reading.subject)
            )
            # The partner has not been read yet, or is unknown now: nothing to compare with is no fault.
            if not isinstance(other, int | float):
                return False
            return value < other if rule.below_reading else value > other
        return _changed(rule, series, float(value), now_s)


def _changed(rule: Rule, series: Series, value: float, now_s: float) -> bool:
    """Whether the value rose or fell by the rule's amount within its window. After a reset of a counter the window
    begins again."""
    samples = series.samples
    falling = rule.falls is not None
    # Counters go back when a driver is reloaded, a device is reset, or a 32-bit counter wraps. The difference
    # over such a point is meaningless, and without clearing the old maximum would hide every later rise.
    # `falls` rules watch values for which going down is the fault itself.
    if samples and not falling and value < samples[-1][1]:
        samples.clear()
    # The newest sample before the window stays, because it is the value with which the window began. Without
    # it a rise between two rare readings would be lost.
    while len(samples) > 1 and rule.window and samples[1][0] <= now_s - rule.window:
        samples.popleft()
    before = samples[0][1] if samples else value
    if not rule.window and samples:
        before = samples[-1][1]
    # Memory is bounded by thinning, not by dropping the oldest: a day's window read every 15 s would need
    # 5,760 samples, and 64 place a rise to within 2% of the window.
    if len(samples) > 1 and now_s - samples[-2][0] < rule.window / SAMPLES:
        samples.pop()
    samples.append((now_s, value))
    while len(samples) > SAMPLES + 2:
        samples.popleft()
    if falling:
        # The second test is for a limit of zero, where standing still would count as a change.
        return before - value >= (rule.falls or 0.0) and before > value
    needed = rule.rises if rule.rises is not None else (rule.rate_above or 0.0) * rule.window
    return value > before and value - before >= needed


def _turn(
    rule: Rule, series: Series, true: bool, now_s: float, message: str
) -> Iterator[tuple[Rule, Condition, str, int]]:
    """Yields a report if the condition has been true for long or often enough and that was not reported yet, or if it
    is over."""
    if rule.share:
        true = _share(rule, series, true, now_s)
    if true and series.since_s is None:
        series.since_s = now_s
        if rule.count > 1:
            series.times.append(now_s)
    elif not true:
        series.since_s = None
    # Not yet, and nothing else is touched: a condition that was already reported stays reported while it
    # flickers within `holds`.
    if true and series.since_s is not None and now_s - series.since_s < rule.holds:
        return
    if rule.count > 1:
        while series.times and (series.times[0] < now_s - rule.window or len(series.times) > rule.count):
            series.times.popleft()
        # Each time that the condition became true counts, not each reading during which it was true: a link
        # that flaps is the fault, and one that is down is another rule's.
        often = len(series.times) >= rule.count
        if often and not series.reported:
            series.reported = True
            yield rule, Condition.FAULTY, message, len(series.times)
        elif not often:
            series.reported = False
        return
    # Reported once until it is over. Only a reading that stays unknown is repeated: the core first waits for
    # it to come back, and asks a person after the second report.
    if true and (not series.reported or (rule.unknown and now_s - series.reported_s >= REMIND_S)):
        series.reported, series.reported_s = True, now_s
        yield rule, Condition.FAULTY, message, 1
    elif not true and series.reported:
        series.reported = False
        if not rule.changes:  # a counter that stays the same does not mean that the fault is gone
            yield rule, Condition.HEALTHY, message, 1


def _share(rule: Rule, series: Series, true: bool, now_s: float) -> bool:
    """Whether the condition was true for the rule's share of its window, after a whole window has passed."""
    samples = series.samples
    # The share is taken over evenly spaced samples, so that a source which is also woken by events does not
    # weigh moments of many events more.
    if not samples or now_s - samples[-1][0] >= rule.window / SAMPLES:
        samples.append((now_s, float(true)))
    while len(samples) > 1 and samples[1][0] <= now_s - rule.window:
        samples.popleft()
    # Before a whole window has passed its share is unknown: a new node would be faulty after its first bad
    # sample.
    whole = samples[0][0] <= now_s - rule.window
    return whole and sum(v for _, v in samples) >= rule.share * len(samples)


def describe(rule: Rule, reading: Reading) -> str:
    """A message with the reading and the limit that it violates."""
    value = f"{reading.value:g}" if isinstance(reading.value, int | float) else repr(reading.value)
    limits = {
        "above": rule.above,
        "below": rule.below,
        "expected other than": rule.equals,
        "expected": rule.differs if rule.differs is not None else rule.leaves,
    }
    limit = next((f" ({k} {v})" for k, v in limits.items() if v is not None), "")
    about = f"{reading.subject}: " if reading.subject else ""
    return f"{about}{reading.name} = {value}{limit}"


def _keep(kept: OrderedDict[_K, _V], key: _K, value: _V) -> None:
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > KEYS_KEPT:
        kept.popitem(last=False)
