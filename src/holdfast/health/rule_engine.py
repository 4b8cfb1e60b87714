"""Judges lines and readings by the rules. No clock, no I/O: times come with the calls, and memory has bounds."""

from __future__ import annotations

import re
from collections import OrderedDict, deque
from collections.abc import Iterable

from holdfast.health.absence import Absence
from holdfast.health.log_matching import Matchers
from holdfast.health.rules import Rule
from holdfast.health.samples import LogLine, Reading
from holdfast.health.thresholds import Thresholds
from holdfast.protocol.health import EVIDENCE_CHARS, Condition, Finding, Remedy, Severity

KEYS_KEPT = 4096
"""The most pairs of subject and rule that are remembered; the one that was quiet longest is forgotten first."""
_SEVERITIES, _REMEDIES = list(Severity), list(Remedy)


class Burst:
    """When a fault last occurred on one subject, and the worst finding that was reported about it."""

    __slots__ = ("last_s", "reported")

    def __init__(self) -> None:
        self.last_s = float("-inf")
        self.reported: tuple[int, int] | None = None


class RuleEngine:
    """The rules and their memory. Pass it every line and reading, and call `overdue` at `next_due_s`."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self._bursts: OrderedDict[tuple[str, str], Burst] = OrderedDict()
        self._matches: OrderedDict[tuple[str, str], deque[float]] = OrderedDict()
        self._thresholds = Thresholds()
        self._absence = Absence()
        self.set_rules(rules)

    def set_rules(self, rules: Iterable[Rule]) -> None:
        """Replaces the rules; state kept for rules of the same name stays."""
        kept = list(rules)
        self._matchers = Matchers(kept)
        self._thresholds.set_rules(r for r in kept if r.enabled and (r.reading or r.unknown))
        self._absence.set_rules(r for r in kept if r.enabled and r.absence)
        self.reads_logs = any(r.enabled and r.source == "log" for r in kept)

    # ------------------------------------------------------------ lines

    def on_line(self, line: LogLine, now_s: float) -> list[Finding]:
        """The findings of the rules about a line. now_s: on any clock that never goes backward."""
        found = []
        # A line may be old when it arrives: a kernel log is read from where the last agent stopped, and a
        # journal arrives late. Windows and bursts count in the time at which something happened, not at which
        # it was read.
        at_s = now_s - line.age_s
        for rule, match in self._matchers.find(line):
            subject = subject_of(rule, match, line.worker)
            # A line that a rule waits for is no fault; it only meets the expectation.
            if rule.absence:
                self._absence.on_line(rule, line.worker, now_s)
                continue
            if line.worker and not self._absence.is_line_of(rule, line.worker, now_s):
                continue
            if not _over(rule, match):
                if rule.window == 0:
                    # A rule over a log may count without a window: that many bad values in a row. One good
                    # value restarts the count.
                    self._matches.pop((rule.id, subject), None)
                continue
            count = self._counted(rule, subject, at_s)
            if count >= rule.count and self._news(rule, subject, at_s):
                found.append(
                    finding(rule, subject, line.text, count=count, worker=line.worker, age_s=line.age_s)
                )
        return found

    def _counted(self, rule: Rule, subject: str, at_s: float) -> int:
        """How often the rule matched within its window, including this time."""
        if rule.count == 1 and not rule.window:
            return 1
        key = (rule.id, subject)
        # Popped and stored again: the dictionary's order is the order of last use, so `_bound` forgets the
        # quietest.
        times = self._matches.pop(key, None) or deque()
        self._matches[key] = times
        _bound(self._matches)
        # One event often gives several lines (an Xid of every engine of a GPU). Lines closer than `apart` are
        # one event; without that a single fault would reach a count that asks for repetition.
        if not times or at_s - times[-1] >= rule.apart:
            times.append(at_s)
        # No more than `count` times are kept: more of them decide nothing, and a flooded log must not cost
        # memory.
        while len(times) > rule.count or (rule.window and times[0] < at_s - rule.window):
            times.popleft()
        return len(times)

    def _news(self, rule: Rule, subject: str, at_s: float) -> bool:
        """Whether a match is to be reported: not if this burst has been reported already. All codes of a family on one
        subject are one burst, in which only a worse one is reported, because one Xid brings others with it."""
        # A rule on trial stays out of its family's burst. It is never acted on, so it must not be the reason
        # that a rule which is acted on stays silent.
        group = rule.family if rule.family and not rule.dry_run else rule.id
        key = (group, subject)
        burst = self._bursts.pop(key, None) or Burst()
        self._bursts[key] = burst
        _bound(self._bursts)
        # Measured from the last occurrence, not from the first: a fault that repeats every minute is one
        # burst for as long as it lasts, and is reported once.
        if at_s - burst.last_s > rule.quiet:
            burst.reported = None
        # Lines of several sources may be out of order, and a burst must not end because an old line came
        # late.
        burst.last_s = max(burst.last_s, at_s)
        # The order of the enums is the order of severity and of how much a remedy disturbs the job. Within a
        # burst only a worse one is news: the core has already acted on the milder one.
        rank = (_SEVERITIES.index(rule.severity), _REMEDIES.index(rule.remedy))
        if burst.reported is not None and rank <= burst.reported:
            return False
        burst.reported = rank
        return True

    # ------------------------------------------------------------ readings

    def on_reading(self, reading: Reading, now_s: float) -> list[Finding]:
        """The findings of the rules about a reading. When a condition is over, a finding has condition healthy."""
        found = []
        for rule, condition, evidence, count in self._thresholds.judge(reading, now_s):
            # A source that cannot be read concerns the source as a whole, whichever of its readings happened
            # to fail first.
            about = "" if rule.unknown else reading.subject
            # Levels are held by `Thresholds` until they are over. A rise is over with the next equal value,
            # so a counter that rises at every reading would give a finding each time; the burst keeps it to
            # one.
            if rule.changes and not self._news(rule, about, now_s):
                continue
            found.append(
                finding(rule, about, evidence, count=count, device=reading.device, condition=condition)
            )
        return found

    # ------------------------------------------------------------ lines that do not come

    def on_training_started(self, worker: str, rank: int, now_s: float) -> None:
        """The worker begins to train: from now on its log must show the lines that the rules expect."""
        self._absence.on_training_started(worker, rank, now_s)

    def on_training_paused(self, worker: str) -> None:
        """The worker does not train for now, or is gone."""
        self._absence.on_training_paused(worker)

    def next_due_s(self) -> float | None:
        """When `overdue` next has a finding if nothing happens before."""
        return self._absence.next_due_s()

    def overdue(self, now_s: float) -> list[Finding]:
        """The findings about lines that should have appeared by now."""
        return [
            finding(rule, worker, evidence, worker=worker)
            for rule, worker, evidence in self._absence.overdue(now_s)
        ]


def subject_of(rule: Rule, match: re.Match[str], worker: str) -> str:
    """The subject of a match: the rule's text with the match's groups filled in; in a log, the worker. PCI addresses
    are brought into one form."""
    if not rule.subject:
        return worker
    groups = {k: v or "" for k, v in match.groupdict().items()}
    return rule.subject.format(**groups | {k: v.lower() for k, v in groups.items() if k == "pci"})


def finding(
    rule: Rule,
    subject: str,
    evidence: str,
    *,
    count: int = 1,
    device: str = "",
    worker: str = "",
    age_s: float = 0.0,
    condition: Condition = Condition.FAULTY,
) -> Finding:
    """A finding of the rule."""
    # An unknown reading is neither health nor a fault: acting on it would replace nodes for a missing
    # permission.
    if rule.unknown and condition is Condition.FAULTY:
        condition = Condition.UNKNOWN
    return Finding(
        rule=rule.id,
        severity=rule.severity,
        remedy=rule.remedy,
        source=rule.source,
        condition=condition,
        subject=subject,
        device=device,
        worker=worker,
        # Findings are kept in the ledger and in the node's history for good, so one of them is bounded.
        evidence=evidence[:EVIDENCE_CHARS],
        count=count,
        shared=rule.shared,
        dry_run=rule.dry_run,
        age_s=round(age_s, 3),
        firm=rule.firm,
    )


def _over(rule: Rule, match: re.Match[str]) -> bool:
    """Whether the number in the line is beyond the rule's threshold; true if the rule has none."""
    if rule.above is None and rule.below is None:
        return True
    # Scripts print numbers in many ways. Text that is not a number is not judged, because a rule must never
    # turn a log's format into a fault. NaN compares as false on both sides: not-finite values need a pattern
    # of their own.
    text = match["value"] if "value" in match.re.groupindex else match[1]
    try:
        value = float(text)
    except (TypeError, ValueError):
        return False
    return (rule.above is None or value > rule.above) and (rule.below is None or value < rule.below)


def _bound(kept: OrderedDict[tuple[str, str], Burst] | OrderedDict[tuple[str, str], deque[float]]) -> None:
    while len(kept) > KEYS_KEPT:
        kept.popitem(last=False)
