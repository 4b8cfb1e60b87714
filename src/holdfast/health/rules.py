"""Defines a rule: its source, its condition, and the remedy that it asks for."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import msgspec

from holdfast.errors import Damaged, UsageError
from holdfast.health.patterns import compiled
from holdfast.protocol.health import Remedy, Severity, acts_on_node
from holdfast.protocol.units import parse_seconds
from holdfast.protocol.wire.decoding import decode

QUIET_S = 180.0
"""A burst is over after this long without another occurrence (NVIDIA Fleet Intelligence, NVSentinel)."""
DURATIONS = ("window", "quiet", "apart", "holds", "start_within", "start_after", "every")
SAMPLES_CAP = 10_000
LINE_SOURCES = ("kmsg", "log")


class Rule(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """One rule, as written in TOML. Durations are seconds or `"10m"`.

    A rule looks at lines (`pattern`), at readings (`reading`), or for readings that cannot be had (`unknown`). A reading is
    judged by exactly one of CONDITIONS.
    """

    id: str
    source: str = ""
    """Its source: `kmsg` or `log` for lines, the name of a source for readings."""
    severity: Severity = Severity.WARNING
    remedy: Remedy = Remedy.WATCH
    wording: str = ""
    """The text that people read about it."""
    reference: str = ""
    subject: str = ""
    """The subject of a finding, with the named groups of the pattern: `"gpu {pci}"`."""
    pattern: str = ""
    """Regular expression over a line, searched for."""
    family: str = ""
    """The table of codes that it belongs to, see `ruleset`."""
    code: str = ""
    """Its entry in that table."""
    variant: str = ""
    """A pattern for the rest of the line beside the code, or the name of the group that matched."""
    reading: str = ""
    """The reading's name."""
    unknown: bool = False
    """It is about readings of its source that cannot be read."""
    above: float | None = None
    """The reading is above this. For a line: the number in its group `value`."""
    below: float | None = None
    """The reading is below this; for a line likewise."""
    equals: float | str | None = None
    differs: float | str | None = None
    any_bits: int | None = None
    """Any of these bits of a mask is set."""
    leaves: float | str | None = None
    """The reading had this value, and has another one now."""
    rises: float | None = None
    """The value rises by this much within `window`; without a window, since the reading before."""
    falls: float | None = None
    """The value falls by this much, in the same way."""
    rate_above: float | None = None
    """The value rises faster than this, per second, over `window`."""
    below_reading: str = ""
    """The reading is below this other reading of the same subject."""
    above_reading: str = ""
    """The reading is above this other reading of the same subject."""
    holds: float = 0.0
    """Seconds for which the condition must be true."""
    share: float = 0.0
    """The share of the window for which it must be true."""
    count: int = 1
    """How many matches, or how many times that the condition became true, are needed within `window`."""
    window: float = 0.0
    """Seconds."""
    apart: float = 0.0
    """Matches closer together than this many seconds count as one."""
    quiet: float = QUIET_S
    """A burst ends after this many seconds without an occurrence."""
    start_within: float = 0.0
    """The line must appear within this many seconds after a worker's start: its absence is the fault."""
    start_after: float = 0.0
    """Nothing counts in the first seconds of a worker's training, as many as this."""
    every: float = 0.0
    """The line must appear again within this many seconds."""
    ranks: tuple[int, ...] = ()
    """The ranks whose logs are judged; empty: all, and for an absence rank 0."""
    fault_on_match: bool = False
    """The line reports what ended its worker; short for a severity and a remedy."""
    shared: bool = False
    """The fault is no node's."""
    dry_run: bool = False
    """On trial: its findings are recorded and never acted on."""
    enabled: bool = True
    examples: tuple[str, ...] = ()
    """Lines that the pattern must match."""
    others: tuple[str, ...] = ()
    """Lines that it must not match."""

    own: bool = False
    """Its patterns are from Holdfast's catalogue, see `patterns`. Not a field of rule files."""

    @property
    def absence(self) -> bool:
        """The fault is that a line does not come."""
        return bool(self.start_within or self.every)

    @property
    def firm(self) -> bool:
        """Whether one finding is enough to act on: the rule itself says how often, or how far, must be exceeded. A
        single line of a log never takes a node out of the job: a log contains what the script prints, which may be
        anybody's text."""
        # `firm` findings skip the core's demand for a second occurrence. A rule with limits, an absence or a
        # count already says how much is a fault. A rule that takes away a node is never firm on one line.
        limits = self.above is not None or self.below is not None
        one_line = (self.fault_on_match or limits) and not acts_on_node(self.remedy)
        return self.source == "log" and (one_line or self.absence or self.count > 1)

    @property
    def changes(self) -> bool:
        """Whether it is about a change of a value, which is over as soon as the value stays the same."""
        return any(limit is not None for limit in (self.rises, self.falls, self.rate_above))


CONDITIONS = (
    *("above", "below", "equals", "differs", "any_bits", "leaves", "rises", "falls", "rate_above"),
    *("below_reading", "above_reading"),
)


class RuleError(UsageError):
    """A rule is not valid. key: the field that is wrong."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


def make_rule(fields: dict[str, Any], own: bool = False) -> Rule:
    """A checked rule from its fields; durations as seconds. own: see `Rule`.

    Raises:
        RuleError: a field is missing, misspelt, or conflicts with another one.
    """
    known = set(Rule.__struct_fields__) - {"own"}
    for key in fields:
        if key not in known:
            raise RuleError(
                key, f"{key!r} is not a field of a rule; the fields are {', '.join(sorted(known))}"
            )
    fields = dict(fields)
    for key in DURATIONS:
        if isinstance(fields.get(key), str):
            fields[key] = _seconds(key, fields[key])
    if fields.get("fault_on_match"):
        # The short form is for scripts that print the error that ended them. Restarting the worker is the
        # mildest remedy that helps, and the only one that a single line of a log may ask for (see `firm`).
        fields.setdefault("severity", "error")
        fields.setdefault("remedy", "restart-worker")
        fields.setdefault("quiet", 1.0)  # acted on when the line appears again
    try:
        made: Rule = decode(partial(msgspec.convert, type=Rule), fields, "")
        rule = msgspec.structs.replace(made, own=own)
    except Damaged as error:
        # msgspec names the field only in its message; the rule file's line is found by that name.
        text = str(error).removeprefix(": ")
        at = re.search(r"`\$\.(\w+)", text)
        raise RuleError(at[1] if at else "id", text.replace(" - at `$.", " - at `")) from None
    _check(rule)
    return rule


def _check(rule: Rule) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", rule.id):
        raise RuleError(
            "id",
            f"id {rule.id!r}: an id may have only letters, digits, '.', '_' and '-', at most 64 characters",
        )
    kinds = [
        k for k, on in (("pattern", rule.pattern), ("reading", rule.reading), ("unknown", rule.unknown)) if on
    ]
    if rule.family:
        kinds = ["pattern"]
    if len(kinds) != 1:
        raise RuleError(
            "id", f"{rule.id}: a rule must have exactly one of pattern, reading and unknown, not {len(kinds)}"
        )
    if not rule.source:
        raise RuleError("source", f'{rule.id}: source is missing, for example "kmsg" or "log"')
    if rule.count < 1 or rule.count > SAMPLES_CAP:
        raise RuleError("count", f"{rule.id}: count must be between 1 and {SAMPLES_CAP}")
    # A log's lines have an order of their own, so a count without a window means `in a row` there. Kernel
    # lines and readings have none: without a window two faults a year apart would count as two.
    if rule.count > 1 and not rule.window and rule.source != "log":
        raise RuleError("count", f'{rule.id}: a count needs a window, for example window = "10m"')
    if not 0 <= rule.share <= 1 or (rule.share and not rule.window):
        raise RuleError("share", f"{rule.id}: share must be between 0 and 1, and needs a window")
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
        raise RuleError("every", f"{rule.id}: start_within, every and ranks can be used only for lines")


def _check_line(rule: Rule) -> None:
    if rule.source not in LINE_SOURCES:
        raise RuleError(
            "source",
            f"{rule.id}: the source of lines must be {' or '.join(LINE_SOURCES)}, not {rule.source!r}",
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
            "subject", f"{rule.id}: subject names {error}, which is not a group of the pattern"
        ) from None
    except (IndexError, ValueError, AttributeError) as error:
        raise RuleError("subject", f"{rule.id}: subject {rule.subject!r}: {error}") from None
    if (rule.above is not None or rule.below is not None) and not pattern.groups:
        raise RuleError(
            "pattern",
            f"{rule.id}: above and below compare a number: the pattern needs a group (?P<value>...)",
        )
    if rule.absence and rule.source != "log":
        raise RuleError("every", f'{rule.id}: start_within and every can be used only with source = "log"')
    # A process chooses its own name, and the kernel prints it in its lines. A pattern that could match
    # anywhere would let any user of the node take it out of the job by naming a process `NVRM: Xid ... 79`.
    severe = rule.source == "kmsg" and acts_on_node(rule.remedy)
    if severe and not re.match(r"(?:\(\?[a-zA-Z]+\)\s*)?\^", rule.pattern):
        raise RuleError(
            "pattern",
            f"{rule.id}: a pattern that asks for {rule.remedy.value} must begin with ^ and words of the kernel "
            "itself, because later parts of a line may contain names that any process can choose",
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
        return compiled(getattr(rule, key), rule.own)
    except ValueError as error:
        raise RuleError(key, f"{rule.id}: the {key} {error}") from None


def _seconds(key: str, text: str) -> float:
    try:
        return parse_seconds(key, text)
    except UsageError as error:
        raise RuleError(key, str(error)) from None
