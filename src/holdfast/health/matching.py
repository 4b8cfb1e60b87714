"""Which rules a line matches: one search per pattern, and none where a fixed part of the pattern is missing."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

from holdfast.health.readings import Line
from holdfast.health.rules import Rule

MATCHED_CHARS = 2000
"""So much of a line is looked at: a user's pattern on a line of a megabyte would hold everything else up."""
UNKNOWN_CODE = "unknown"


class Matcher:
    """The rules over lines of one source that share a pattern: one rule, or a family of codes."""

    def __init__(self, rules: list[Rule]) -> None:
        first = rules[0]
        self.pattern = re.compile(first.pattern)
        self.hint = literal(first.pattern)
        self._variant = re.compile(first.variant) if first.variant else None
        self._rules = rules if not first.family else []
        self._codes: dict[str, list[Rule]] = defaultdict(list)
        for rule in rules:
            if rule.family:
                self._codes[rule.code].append(rule)

    def rules(self, text: str, match: re.Match[str]) -> list[Rule]:
        """Those that a match is of: of a family the code's, for its variant if there is one."""
        if not self._codes:
            return self._rules
        code = match["code"]
        variant = None
        if self._variant is not None and (found := self._variant.search(text, match.end("code"))):
            variant = next((g for g in found.groups() if g), "").lower()
        if code not in self._codes:
            code = UNKNOWN_CODE
        for name in (f"{code}-{variant}", code):
            if name in self._codes:
                return self._codes[name]
        return []


class Matchers:
    """The matchers of a set of rules, by source."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        groups: dict[tuple[str, str, str], list[Rule]] = defaultdict(list)
        for rule in rules:
            if rule.pattern:
                own = "" if rule.family else rule.id
                groups[rule.source, rule.pattern, own].append(rule)
        self._by_source: dict[str, list[Matcher]] = defaultdict(list)
        for (source, _, _), same in groups.items():
            if any(rule.enabled for rule in same):
                self._by_source[source].append(Matcher(same))

    def find(self, line: Line) -> Iterator[tuple[Rule, re.Match[str]]]:
        """Every enabled rule that the line matches."""
        text = line.text[:MATCHED_CHARS]
        for matcher in self._by_source.get(line.source, ()):
            if matcher.hint in text and (match := matcher.pattern.search(text)):
                for rule in matcher.rules(text, match):
                    if rule.enabled:
                        yield rule, match


def literal(pattern: str) -> str:
    """The longest text that every match holds; empty when it is not plain to see. Looks at the top level only."""
    if re.search(r"\(\?[a-zA-Z-]*[ix]", pattern):
        return ""
    runs, run, depth, i = [], "", 0, 0
    while i < len(pattern):
        c = pattern[i]
        step, plain = 1, ""
        if c == "\\":
            step = 2
            escaped = pattern[i + 1 : i + 2]
            plain = escaped if not escaped.isalnum() else ""
            if escaped in ("x", "u", "U", "N"):
                return ""
        elif c == "[":
            end = pattern.find("]", i + 2)
            step = (end - i + 1) if end > 0 else len(pattern)
        elif c == "(":
            depth += 1
        elif c == ")":
            depth -= 1
        elif c == "|" and depth == 0:
            return ""
        elif c not in ".^$*+?{}|":
            plain = c
        elif c == "{":
            end = pattern.find("}", i)
            step = (end - i + 1) if end > 0 else 1
        following = pattern[i + step : i + step + 1]
        if depth or not plain or following in ("*", "?", "{"):
            runs.append(run)
            run = ""
        else:
            run += plain
        if plain and following == "+":
            runs.append(run)
            run = ""
        i += step
    return max([*runs, run], key=len)
