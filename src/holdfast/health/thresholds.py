"""Conditions over readings: levels, changes, counters that rise, and readings that cannot be had."""

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
"""Kept of one reading for one rule's window; a new one within a 64th of the window takes the last one's place."""
KEYS_KEPT = 8192
ANY = "*"
REMIND_S = 600.0
"""What is still unknown after this long is told again: the core asks a person then."""


class Series:
    """What one rule remembers of one reading."""

    __slots__ = ("left", "said", "said_s", "samples", "since_s", "times")

    def __init__(self) -> None:
        self.samples: deque[tuple[float, float]] = deque()
        self.left = False
        self.since_s: float | None = None
        self.times: deque[float] = deque()
        self.said = False
        self.said_s = 0.0


class Thresholds:
    """Judges readings, one after the other."""

    def __init__(self) -> None:
        self._series: OrderedDict[tuple[str, str], Series] = OrderedDict()
        self._latest: OrderedDict[tuple[str, str, str], float | str] = OrderedDict()
        self._by_name: dict[tuple[str, str], list[Rule]] = {}
        self._unknown: dict[str, list[Rule]] = {}
        self._compared: set[str] = set()

    def set_rules(self, rules: Iterable[Rule]) -> None:
        """Other rules from now on."""
        self._by_name, self._unknown, self._compared = {}, {}, set()
        for rule in rules:
            if rule.unknown:
                self._unknown.setdefault(rule.source, []).append(rule)
            else:
                self._by_name.setdefault((rule.source, rule.reading), []).append(rule)
                self._compared |= {rule.below_reading, rule.above_reading} - {""}

    def judge(self, reading: Reading, now_s: float) -> Iterator[tuple[Rule, Condition, str, int]]:
        """Rules whose condition became true or is over, with words for it and how often it became true."""
        yield from self._judge_unknown(reading, now_s)
        if reading.value is None:
            return
        if reading.name in self._compared:
            _keep(self._latest, (reading.source, reading.name, reading.subject), reading.value)
        for rule in self._by_name.get((reading.source, reading.name), ()):
            series = self._of(rule.id, reading.subject)
            true = self._true(rule, reading, series, now_s)
            yield from _turn(rule, series, true, now_s, describe(rule, reading))

    def _judge_unknown(self, reading: Reading, now_s: float) -> Iterator[tuple[Rule, Condition, str, int]]:
        """One finding for a source whose readings cannot be had, whichever of them; they end with its next value."""
        for rule in self._unknown.get(reading.source, self._unknown.get(ANY, [])):
            series = self._of(rule.id, reading.source)
            if reading.value is not None and series.since_s is None and not series.said:
                continue
            words = f"{reading.source}: {reading.name} cannot be read: {reading.why or 'no answer'}"
            if reading.value is not None:
                words = f"{reading.source} can be read again"
            yield from _turn(rule, series, reading.value is None, now_s, words)

    def _of(self, id: str, subject: str) -> Series:
        key = (id, subject)
        series = self._series.pop(key, None) or Series()
        _keep(self._series, key, series)
        return series

    def _true(self, rule: Rule, reading: Reading, series: Series, now_s: float) -> bool:
        value = reading.value
        assert value is not None
        if rule.leaves is not None:
            if value == rule.leaves:
                series.left = True  # it has been there: from now on it can leave
                return False
            return series.left
        if rule.equals is not None or rule.differs is not None:
            return value == rule.equals if rule.equals is not None else value != rule.differs
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
            if not isinstance(other, int | float):
                return False
            return value < other if rule.below_reading else value > other
        return _changed(rule, series, float(value), now_s)


def _changed(rule: Rule, series: Series, value: float, now_s: float) -> bool:
    """The value rose or fell by so much within the window. A counter that was reset begins again."""
    samples = series.samples
    falling = rule.falls is not None
    if samples and not falling and value < samples[-1][1]:
        samples.clear()
    while len(samples) > 1 and rule.window and samples[1][0] <= now_s - rule.window:
        samples.popleft()  # the newest of those before the window stays: the value when it began
    before = samples[0][1] if samples else value
    if not rule.window and samples:
        before = samples[-1][1]
    if len(samples) > 1 and now_s - samples[-2][0] < rule.window / SAMPLES:
        samples.pop()
    samples.append((now_s, value))
    while len(samples) > SAMPLES + 2:
        samples.popleft()
    if falling:
        return before - value >= (rule.falls or 0.0) and before > value
    needed = rule.rises if rule.rises is not None else (rule.rate_above or 0.0) * rule.window
    return value > before and value - before >= needed


def _turn(
    rule: Rule, series: Series, true: bool, now_s: float, words: str
) -> Iterator[tuple[Rule, Condition, str, int]]:
    """Whether the condition has been true for long or often enough, and whether that is news."""
    if rule.share:
        true = _share(rule, series, true, now_s)
    if true and series.since_s is None:
        series.since_s = now_s
        if rule.count > 1:
            series.times.append(now_s)
    elif not true:
        series.since_s = None
    if true and series.since_s is not None and now_s - series.since_s < rule.holds:
        return
    if rule.count > 1:
        while series.times and (series.times[0] < now_s - rule.window or len(series.times) > rule.count):
            series.times.popleft()
        often = len(series.times) >= rule.count
        if often and not series.said:
            series.said = True
            yield rule, Condition.FAULTY, words, len(series.times)
        elif not often:
            series.said = False
        return
    if true and (not series.said or (rule.unknown and now_s - series.said_s >= REMIND_S)):
        series.said, series.said_s = True, now_s
        yield rule, Condition.FAULTY, words, 1
    elif not true and series.said:
        series.said = False
        if not rule.changes:  # a counter that stands still has healed nothing
            yield rule, Condition.HEALTHY, words, 1


def _share(rule: Rule, series: Series, true: bool, now_s: float) -> bool:
    """True for the rule's share of its window, which must have passed once."""
    samples = series.samples
    if not samples or now_s - samples[-1][0] >= rule.window / SAMPLES:
        samples.append((now_s, float(true)))
    while len(samples) > 1 and samples[1][0] <= now_s - rule.window:
        samples.popleft()
    whole = samples[0][0] <= now_s - rule.window
    return whole and sum(v for _, v in samples) >= rule.share * len(samples)


def describe(rule: Rule, reading: Reading) -> str:
    """A reading and what is wrong about it, in words."""
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
