"""Finds the rules that a line matches: one search per pattern, and none if the line lacks a fixed part of the pattern."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

from holdfast.health.kmsg import SPEAKER
from holdfast.health.patterns import compiled
from holdfast.health.rules import Rule
from holdfast.health.samples import LogLine
from holdfast.protocol.health import acts_on_node

MATCHED_CHARS = 2000
"""Characters of a line that are searched: a user's pattern on a line of a megabyte would delay everything else."""
UNKNOWN_CODE = "unknown"

NAME_CHARS = 15
"""Length of the name that a process gives itself (TASK_COMM_LEN less the zero); it may have any characters."""
_BY_NAME = re.compile(
    rf"\A.{{1,{NAME_CHARS}}}(?:\[\d+\]| ?\(\d+\)|: (?:attempt to|page allocation|vmalloc|potentially)| invoked oom-| use[sd] )",
    re.DOTALL,
)
"""How kernel lines that begin with the name of a process continue (`NAME[12]: segfault at ...`)."""
_NAMED = re.compile(rf"\bname=.{{0,{NAME_CHARS}}}, ")
"""The name of the process in an Xid's line. It may contain anything, including text that distinguishes the variants of
a code."""
_QUOTES = re.compile(r"NVRM: API mismatch: ")
"""Lines that quote a user's text that may be longer than a process's name. (The driver repeats the version that a
client gave, up to 63 characters.)"""
_SET = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_COUNT = re.compile(r"\{(?:\d+(?:,\d*)?|,\d*)\}")
"""A set of characters; a repetition. A brace that does not begin a repetition is an ordinary character."""


class Matcher:
    """The rules over lines of one source that share a pattern: one rule, or a family of codes."""

    def __init__(self, rules: list[Rule]) -> None:
        first = rules[0]
        self.pattern = compiled(first.pattern, first.own)
        # A match that takes a node out of the job must be where the kernel puts it, at the beginning of the
        # line: further on there are names of processes, files and groups, which anybody can choose.
        self._severe = first.source == "kmsg" and any(acts_on_node(r.remedy) for r in rules)
        # Every line of a busy log meets every pattern of the catalogue. Looking for a fixed text first is
        # much cheaper than a search, and almost no line passes.
        self._hints = literals(first.pattern)
        self._variant = compiled(first.variant, first.own) if first.variant else None
        self._rules = rules if not first.family else []
        self._codes: dict[str, list[Rule]] = defaultdict(list)
        for rule in rules:
            if rule.family:
                self._codes[rule.code].append(rule)

    def may_match(self, text: str) -> bool:
        """Whether the line can match: it contains one of the fixed texts. False saves the search."""
        return any(hint in text for hint in self._hints)

    def match(self, text: str, by_name: bool) -> re.Match[str] | None:
        """by_name: the line begins with a name that a process gave itself."""
        if not self._severe:
            return self.pattern.search(text)
        # `match`, not `search`: even a pattern whose author forgot the ^ is held to the beginning of the
        # line.
        return None if by_name else self.pattern.match(text)

    def rules(self, text: str, match: re.Match[str]) -> list[Rule]:
        """The rules that a match belongs to. In a family, the rules of the code, or of its variant if that has an
        entry."""
        if not self._codes:
            return self._rules
        code = match["code"]
        variant = None
        # The process's name is removed before the variant is looked for, for the same reason: a name may
        # contain the words of a more severe variant.
        rest = _NAMED.sub("", text[match.end(self.pattern.groupindex["code"]) :], count=1)
        if self._variant is not None and (found := self._variant.search(rest)):
            variant = found.lastgroup or next((g for g in found.groups() if g), "").lower()
        # Drivers add codes with every version. A code that the table does not know gets the family's entry
        # for unknown ones, which watches and never acts.
        if code not in self._codes:
            code = UNKNOWN_CODE
        # The variant's own entry first; a variant without one is judged as the plain code.
        for name in (f"{code}-{variant}", code):
            if name in self._codes:
                return self._codes[name]
        return []


class Matchers:
    """The matchers of a set of rules, by source."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        groups: dict[tuple[str, str, bool, str], list[Rule]] = defaultdict(list)
        for rule in rules:
            if rule.pattern:
                own = "" if rule.family else rule.id
                groups[rule.source, rule.pattern, rule.own, own].append(rule)
        self._by_source: dict[str, list[Matcher]] = defaultdict(list)
        for (source, *_), same in groups.items():
            # A family is searched for as long as one of its codes is enabled. Disabled codes stay in it:
            # without them their lines would fall to the entry for unknown codes.
            if any(rule.enabled for rule in same):
                self._by_source[source].append(Matcher(same))

    def find(self, line: LogLine) -> Iterator[tuple[Rule, re.Match[str]]]:
        """Every enabled rule that the line matches."""
        text = line.text[:MATCHED_CHARS]
        if not text.isascii():
            text = text.encode(errors="replace").decode()  # RE2 takes no half of a surrogate pair
        by_name = begins_with_a_name(text)
        whole = list(self._matches(line.source, text, by_name))
        yield from whole
        if "\n" in text:
            matched = {rule.id for rule, _ in whole}
            for part, is_named in _later_lines(text, by_name):
                yield from (
                    one for one in self._matches(line.source, part, is_named) if one[0].id not in matched
                )

    def _matches(self, source: str, text: str, by_name: bool) -> Iterator[tuple[Rule, re.Match[str]]]:
        for matcher in self._by_source.get(source, ()):
            if matcher.may_match(text) and (match := matcher.match(text, by_name)):
                for rule in matcher.rules(text, match):
                    if rule.enabled:
                        yield rule, match


def _later_lines(text: str, by_name: bool) -> Iterator[tuple[str, bool]]:
    """Yields the lines of a record after its first one, each with whether it may be text that somebody else chose, like
    a line that begins with a process's name."""
    first, *later = text.split("\n")
    speaker = SPEAKER.match(first)
    # Names of files, labels and options may contain newlines, and the kernel prints some of them unchanged.
    # So a later line is the kernel's own only if the record begins with a driver's prefix, all its lines do,
    # and none of them quotes a text that somebody else chose.
    by_name = by_name or speaker is None or _QUOTES.match(first) is not None
    for part in (part.lstrip(" ") for part in later):
        by_name = by_name or speaker is None or not part.startswith(speaker[0])
        yield part, by_name


def begins_with_a_name(text: str) -> bool:
    """Whether a line of the kernel begins with the name of a process, so that its first words are not the kernel's own."""
    return _BY_NAME.match(text) is not None


def literals(pattern: str) -> tuple[str, ...]:
    """Fixed texts, at least one of which is in every match: the longest plain run of each alternative. An empty text
    matches any line: no fixed text could be determined. Looks at the top level of the pattern only."""
    # Ignoring case or white space makes a literal text of the pattern a wrong hint. An empty hint matches
    # every line, so the search always runs: slower, never wrong.
    if re.search(r"\(\?[a-zA-Z-]*[ix]", pattern):
        return ("",)
    alternatives: list[list[str]] = [[""]]
    depth = i = 0
    while i < len(pattern):
        c = pattern[i]
        step, plain = 1, ""
        if c == "\\":
            step = 2
            escaped = pattern[i + 1 : i + 2]
            # Escapes of several characters are not worth a parser here. Giving up costs speed only.
            if escaped in ("x", "u", "U", "N") or escaped.isdigit():
                return ("",)
            plain = "" if escaped.isalnum() else escaped
        elif c == "[":
            found = _SET.match(pattern, i)
            step = len(found[0]) if found else len(pattern)
        elif c == "{":
            found = _COUNT.match(pattern, i)
            step = len(found[0]) if found else 1
        elif c in "()":
            depth += 1 if c == "(" else -1
        elif c not in ".^$*+?}|":
            plain = c
        runs = alternatives[-1]
        following = pattern[i + step : i + step + 1]
        if c == "|" and not depth:
            alternatives.append([""])
        # Text within a group, or that may occur zero times, need not be in the line, so the run ends before
        # it.
        elif depth or not plain or following in ("*", "?", "{"):
            runs.append("")
        else:
            runs[-1] += plain
            # One occurrence is certain and more may follow: the run includes this character and ends after
            # it.
            if following == "+":
                runs.append("")
        i += step
    return tuple(max(runs, key=len) for runs in alternatives)
