"""What a rule is: where it looks, what it looks for, and what it asks for."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from holdfast.errors import UsageError
from holdfast.protocol.health import Remedy, Severity, acts_on_node
from holdfast.protocol.times import parse_seconds

QUIET_S = 180.0
"""A burst is over after this long without another occurrence (NVIDIA Fleet Intelligence, NVSentinel)."""
DURATIONS = ("window", "quiet", "apart", "holds", "start_within", "start_after", "every")
SAMPLES_CAP = 10_000
LINE_SOURCES = ("kmsg", "log")


class Rule(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """One rule, as written in TOML. Durations are seconds or `"10m"`.

    A rule looks at lines (`pattern`), at readings (`reading`), or for readings that cannot be had (`unknown`).

    pattern: regular expression over a line, searched; its named groups fill `subject` (`"gpu {pci}"`). family, code: one
    entry of a table of codes, see `catalogue`; variant: what the line says beside the code, or the group's name. In a worker's log the group `value` is a number that `above` and `below`
    judge; start_within, every: the line must come so soon after the worker's start, and so often (absence is the fault);
    ranks: whose logs (empty: all; for absence only rank 0); start_after: nothing counts in the first so many seconds.

    reading: the reading's name. It is judged by one of above, below, equals, differs, any_bits (of a mask), leaves (it
    was this, and is no more), rises or falls (by so much within `window`; without one since the reading before),
    rate_above (per second over `window`), below_reading or above_reading (another reading of the same subject).
    holds: the condition must be true for so long. share: for this share of the window.

    count: so many matches, or so many times that the condition became true, within `window`; matches closer than
    `apart` are one. quiet: a burst ends after so long without one. fault_on_match: a line that ends the worker it came from (short for a severity and remedy).
    shared: nobody's node is to blame. examples, others: lines that must and must not match.
    """

    id: str
    source: str = ""
    severity: Severity = Severity.WARNING
    remedy: Remedy = Remedy.WATCH
    wording: str = ""
    reference: str = ""
    subject: str = ""
    pattern: str = ""
    family: str = ""
    code: str = ""
    variant: str = ""
    reading: str = ""
    unknown: bool = False
    above: float | None = None
    below: float | None = None
    equals: float | str | None = None
    differs: float | str | None = None
    any_bits: int | None = None
    leaves: float | str | None = None
    rises: float | None = None
    falls: float | None = None
    rate_above: float | None = None
    below_reading: str = ""
    above_reading: str = ""
    holds: float = 0.0
    share: float = 0.0
    count: int = 1
    window: float = 0.0
    apart: float = 0.0
    quiet: float = QUIET_S
    start_within: float = 0.0
    start_after: float = 0.0
    every: float = 0.0
    ranks: tuple[int, ...] = ()
    fault_on_match: bool = False
    shared: bool = False
    dry_run: bool = False
    enabled: bool = True
    examples: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    @property
    def absence(self) -> bool:
        """The fault is that a line does not come."""
        return bool(self.start_within or self.every)

    @property
    def firm(self) -> bool:
        """It says how much of what logs say is a fault, so one finding is enough. What takes a node out of the job is
        never decided by one line: a log holds what the script prints, and that may be anybody's text."""
        # `firm` findings skip the core's demand for a second occurrence. A rule with limits, an absence or a
        # count already says how much is a fault. A rule that takes away a node is never firm on one line.
        limits = self.above is not None or self.below is not None
        one_line = (self.fault_on_match or limits) and not acts_on_node(self.remedy)
        return self.source == "log" and (one_line or self.absence or self.count > 1)

    @property
    def changes(self) -> bool:
        """It is about a change of a value, which is over as soon as the value stands still."""
        return any(limit is not None for limit in (self.rises, self.falls, self.rate_above))


CONDITIONS = (
    *("above", "below", "equals", "differs", "any_bits", "leaves", "rises", "falls", "rate_above"),
    *("below_reading", "above_reading"),
)


class RuleError(UsageError):
    """A rule that cannot be. key: the field that is wrong."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


def make_rule(fields: dict[str, Any]) -> Rule:
    """A rule from its fields, checked; durations as seconds.

    Raises:
        RuleError: something is missing, misspelt, or does not go together.
    """
    known = set(Rule.__struct_fields__)
    for key in fields:
        if key not in known:
            raise RuleError(key, f"{key!r} is no field of a rule; there are {', '.join(sorted(known))}")
    fields = dict(fields)
    for key in DURATIONS:
        if isinstance(fields.get(key), str):
            fields[key] = _seconds(key, fields[key])
    if fields.get("fault_on_match"):
        # The short form is for scripts that print what killed them. Restarting the worker is the mildest
        # remedy that helps, and the only one that a single line of a log may ask for (see `firm`).
        fields.setdefault("severity", "error")
        fields.setdefault("remedy", "restart-worker")
        fields.setdefault("quiet", 1.0)  # each counts: what a log says is acted on when it comes again
    try:
        rule = msgspec.convert(fields, Rule)
    except msgspec.ValidationError as error:
        # msgspec names the field only in its message; the rule file's line is found by that name.
        text = str(error)
        at = re.search(r"`\$\.(\w+)", text)
        raise RuleError(at[1] if at else "id", text.replace(" - at `$.", " - at `")) from None
    _check(rule)
    return rule


def _check(rule: Rule) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", rule.id):
        raise RuleError("id", f"id {rule.id!r}: letters, digits, '.', '_' and '-', at most 64 of them")
    kinds = [
        k for k, on in (("pattern", rule.pattern), ("reading", rule.reading), ("unknown", rule.unknown)) if on
    ]
    if rule.family:
        kinds = ["pattern"]
    if len(kinds) != 1:
        raise RuleError("id", f"{rule.id}: give one of pattern, reading and unknown, not {len(kinds)}")
    if not rule.source:
        raise RuleError("source", f'{rule.id}: source is missing, for example "kmsg" or "log"')
    if rule.count < 1 or rule.count > SAMPLES_CAP:
        raise RuleError("count", f"{rule.id}: count is between 1 and {SAMPLES_CAP}")
    # A log's lines have an order of their own, so a count without a window means `in a row` there. Kernel
    # lines and readings have none: without a window two faults a year apart would count as two.
    if rule.count > 1 and not rule.window and rule.source != "log":
        raise RuleError("count", f'{rule.id}: a count needs a window, for example window = "10m"')
    if not 0 <= rule.share <= 1 or (rule.share and not rule.window):
        raise RuleError("share", f"{rule.id}: share is between 0 and 1, of a window that is given too")
    for key in DURATIONS:
        if getattr(rule, key) < 0:
            raise RuleError(key, f"{rule.id}: {key} cannot be below 0")
    if rule.reading:
        _check_reading(rule)
    elif rule.pattern:
        _check_line(rule)


def _check_reading(rule: Rule) -> None:
    # Zero is a valid limit (`above = 0`), so absent means None or an empty name, never false.
    given = [c for c in CONDITIONS if getattr(rule, c) not in (None, "")]
    if len(given) != 1:
        raise RuleError(
            given[1] if given else "reading", f"{rule.id}: a reading needs one of {', '.join(CONDITIONS)}"
        )
    if rule.rate_above is not None and not rule.window:
        raise RuleError("rate_above", f'{rule.id}: a rate needs a window, for example window = "60s"')
    if rule.absence or rule.ranks:
        raise RuleError("every", f"{rule.id}: start_within, every and ranks are for lines")


def _check_line(rule: Rule) -> None:
    if rule.source not in LINE_SOURCES:
        raise RuleError(
            "source", f"{rule.id}: lines come from {' and '.join(LINE_SOURCES)}, not {rule.source!r}"
        )
    pattern = _compiled(rule, "pattern")
    if rule.variant:
        _compiled(rule, "variant")
    if rule.family and "code" not in pattern.groupindex:
        raise RuleError("pattern", f"{rule.id}: the pattern of a family needs a group (?P<code>...)")
    try:
        # Formatted once with empty groups: a misspelt group would otherwise raise on the first match, on the
        # agent, months later.
        rule.subject.format(**dict.fromkeys(pattern.groupindex, ""))
    except KeyError as error:
        raise RuleError(
            "subject", f"{rule.id}: subject names {error}, which is no group of the pattern"
        ) from None
    except (IndexError, ValueError, AttributeError) as error:
        raise RuleError("subject", f"{rule.id}: subject {rule.subject!r}: {error}") from None
    if (rule.above is not None or rule.below is not None) and not pattern.groups:
        raise RuleError(
            "pattern", f"{rule.id}: above and below judge a number: give it a group (?P<value>...)"
        )
    if rule.absence and rule.source != "log":
        raise RuleError("every", f'{rule.id}: start_within and every are for source = "log"')
    # A process chooses its own name, and the kernel prints it in its lines. A pattern that could match
    # anywhere would let any user of the node take it out of the job by naming a process `NVRM: Xid ... 79`.
    severe = rule.source == "kmsg" and acts_on_node(rule.remedy)
    if severe and not re.match(r"(?:\(\?[a-zA-Z]+\)\s*)?\^", rule.pattern):
        raise RuleError(
            "pattern",
            f"{rule.id}: a pattern that asks for {rule.remedy.value} begins with ^ and the kernel's own words: further on in "
            "the kernel's lines stand names that any process gives itself",
        )
    # Examples are checked whenever rules are read, not only in our tests: a user who changes a pattern learns
    # at the start that it does not match the line that it was written for.
    for line in rule.examples:
        if pattern.search(line) is None:
            raise RuleError("examples", f"{rule.id}: the pattern does not match its example {line!r}")
    for line in rule.others:
        if pattern.search(line) is not None:
            raise RuleError("others", f"{rule.id}: the pattern matches {line!r}, which it must not")


def _compiled(rule: Rule, key: str) -> re.Pattern[str]:
    try:
        return re.compile(getattr(rule, key))
    except re.error as error:
        raise RuleError(key, f"{rule.id}: the {key} is no regular expression: {error}") from None


def _seconds(key: str, text: str) -> float:
    try:
        return parse_seconds(key, text)
    except UsageError as error:
        raise RuleError(key, str(error)) from None
