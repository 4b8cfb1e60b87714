"""Rules from TOML files: the catalogue, and the rules that users add, override and disable."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from holdfast.errors import UsageError
from holdfast.health.rules import Rule, RuleError, make_rule
from holdfast.protocol.machine.ownership import refuse_open_to_others
from holdfast.protocol.wire.decoding import decode

Fields = dict[str, Any]
MOST_BYTES = 1 << 20
"""The longest rule file. Reading names with many dots takes time quadratic in their number."""

_FAMILY_KEYS = ("source", "pattern", "subject", "variant", "quiet", "reference", "examples", "others")
_TABLES = ("class", "code")


class RuleSet:
    """Rules by their ids, and the file that last changed each. Disabled rules are kept, because their names must stay
    known."""

    def __init__(self) -> None:
        self._fields: dict[str, Fields] = {}
        self._families: dict[str, Fields] = {}
        self._origins: dict[str, str] = {}
        self._made: dict[str, Rule] = {}
        self._own: set[str] = set()
        """Rules and families whose patterns are the catalogue's."""

    def __iter__(self) -> Iterator[Rule]:
        return iter(self._made.values())

    def __len__(self) -> int:
        return len(self._made)

    def copy(self) -> RuleSet:
        """A copy that can be changed without changing this one."""
        other = RuleSet()
        other._fields, other._families = dict(self._fields), dict(self._families)
        other._origins, other._made, other._own = dict(self._origins), dict(self._made), set(self._own)
        return other

    def get(self, id: str) -> Rule | None:
        """The rule with this id."""
        return self._made.get(id)

    def origin(self, id: str) -> str:
        """The file that last changed a rule."""
        return self._origins[id]

    def read(self, text: str, name: str, own: bool = False) -> list[str]:
        """Reads one file; returns the ids of the rules that it defines. name: for messages. own: it is from the
        catalogue.

        Raises:
            UsageError: the file or one of its rules is wrong; the message names the line, and nothing was changed.
        """
        # All of it decodes a user's file: a wrong type, such as a table instead of a text, may be found
        # anywhere in it.
        return decode(lambda text: self._read(text, name, own), text, name, error=UsageError, most=MOST_BYTES)

    def _read(self, text: str, name: str, own: bool) -> list[str]:
        tables = tomllib.loads(text)
        unknown = set(tables) - {"rule", "family"}
        if unknown:
            key = min(unknown)
            raise UsageError(
                f"{name}, line {_line(text, key)}: {key!r} is not a table of a rule file; write [[rule]] or "
                "[family.NAME]"
            )
        # Everything is gathered and checked before anything is stored: a file with one wrong rule must not
        # leave half of itself behind.
        written: dict[str, Fields] = {}
        families = dict(self._families)
        ours = set(self._own)
        for family, table in _tables(tables, "family", name, text).items():
            families[family] = self._merge(family, table, families.get(family), name, text)
            expanded = _expand(family, families[family])
            _mark(ours, f"[{family}]", expanded, own, table)
            written |= expanded
        rules = tables.get("rule", [])
        if not isinstance(rules, list):
            raise UsageError(f"{name}, line {_line(text, 'rule')}: write [[rule]], with two brackets")
        lines: dict[str, int] = {}
        for nth, given in enumerate(rules):
            id = given.get("id")
            if not isinstance(id, str):
                raise UsageError(f"{name}, line {_rule_line(text, nth)}: this rule does not have an id")
            if id in lines:
                raise UsageError(
                    f"{name}, line {_rule_line(text, nth)}: rule {id!r} is in this file twice, first in line {lines[id]}"
                )
            lines[id] = _rule_line(text, nth)
            # A rule of a name that exists changes only the fields that it gives: users adjust a limit or a
            # remedy without copying the pattern.
            before = written.get(id, self._fields.get(id, {}))
            if "pattern" in given and "pattern" in before:  # these belong to the old pattern
                before = {
                    k: v for k, v in before.items() if k not in ("examples", "others", "subject", "family")
                }
            written[id] = before | given
            _mark(ours, id, (), own, given)
            if isinstance(repeat := written[id].get("repeat"), dict):
                del written[id]["repeat"]
                again = f"{id}-repeated"
                written[again], lines[again] = {**written[id], "id": again, **repeat}, lines[id]
                _mark(ours, again, (), own, given)
        made = {}
        for id, fields in written.items():
            try:
                made[id] = make_rule(fields, id in ours)
            except RuleError as error:
                # A rule of a family has no table of its own; its code's line in the family's table is the
                # nearest.
                line = (
                    _key_line(text, lines[id], error.key)
                    if id in lines
                    else _line(text, fields.get("code", ""))
                )
                raise UsageError(f"{name}, line {line}: {error}") from None
        self._families, self._own = families, ours
        self._fields |= written
        self._made |= made
        self._origins |= dict.fromkeys(made, name)
        return list(made)

    def named(self, name: str) -> list[str]:
        """The ids that a name matches; `*` in it stands for anything."""
        pattern = re.compile(re.escape(name).replace(r"\*", ".*"))
        return [id for id in self._made if pattern.fullmatch(id)]

    def on_trial(self, names: Iterable[str]) -> None:
        """Puts rules on trial: their findings are recorded, never acted on. `*`: all; `xid-*`: a family.

        Raises:
            UsageError: no rule matches a name.
        """
        for name in names:
            hit = self.named(name)
            if not hit:
                raise UsageError(f"there is no rule named {name!r}; `holdfast health rules` lists all rules")
            for id in hit:
                self._fields[id] = self._fields[id] | {"dry_run": True}
                # The fields are changed as well as the rule: a file that is read later and changes the rule
                # must not take it off trial.
                self._made[id] = make_rule(self._fields[id], id in self._own)

    def _merge(self, family: str, given: Fields, before: Fields | None, name: str, text: str) -> Fields:
        for key in given:
            if key not in (*_FAMILY_KEYS, *_TABLES):
                raise UsageError(
                    f"{name}, line {_line(text, key)}: {key!r} is not a field of a family; the fields are "
                    f"{', '.join((*_FAMILY_KEYS, *_TABLES))}"
                )
        merged = {**(before or {}), **given}
        for table in _TABLES:
            # Tables of codes and classes are merged entry by entry, so that a user's file may change one Xid
            # of some hundred.
            merged[table] = {**(before or {}).get(table, {}), **given.get(table, {})}
        for code, entry in merged["code"].items():
            found = [entry, entry.get("repeat", {})] if isinstance(entry, dict) else [entry]
            for one in found:
                if (
                    not isinstance(one, dict)
                    or one.get("class", next(iter(merged["class"]), "")) not in merged["class"]
                ):
                    raise UsageError(
                        f"{name}, line {_line(text, code)}: code {code} of {family} needs one of the classes "
                        f"{', '.join(merged['class'])}"
                    )
        return merged


def _mark(ours: set[str], key: str, members: Iterable[str], own: bool, given: Fields) -> None:
    """Keeps track of the patterns that are the catalogue's own. They stay so if a user changes a field other than a
    pattern, or adds a code to a family."""
    if own or (key in ours and not given.keys() & {"pattern", "variant"}):
        ours.update((key, *members))
    else:
        ours.difference_update((key, *members))


def _expand(family: str, table: Fields) -> dict[str, Fields]:
    """One rule for every code of a family."""
    common = {k: table[k] for k in ("source", "subject", "variant", "quiet", "reference") if k in table}
    rules: dict[str, Fields] = {}
    for code, entry in table["code"].items():
        fields = {
            "id": f"{family}-{code}",
            "family": family,
            "code": code,
            "pattern": table.get("pattern", ""),
        }
        rules[fields["id"]] = fields | common | _entry(table, entry)
        if repeat := entry.get("repeat"):
            again = rules[fields["id"]] | {"id": f"{family}-{code}-repeated"}
            again |= _entry(table, {"name": entry.get("name", ""), **repeat})
            rules[again["id"]] = again
    # Examples belong to the family's pattern, which all its rules share; checked once with the first of them.
    first = next(iter(rules.values()), None)
    if first is not None:
        first |= {k: table[k] for k in ("examples", "others") if k in table}
    return rules


def _entry(table: Fields, entry: Fields) -> Fields:
    """The fields of a rule for one entry of a table of codes: those of its class, and its own."""
    of_class: Fields = table["class"].get(entry.get("class", ""), {})
    parts = [entry.get("name", ""), entry.get("why") or of_class.get("wording", "")]
    own = {k: v for k, v in entry.items() if k not in ("class", "name", "why", "repeat")}
    return of_class | own | {"wording": ". ".join(filter(None, parts))}


def _tables(tables: Fields, key: str, name: str, text: str) -> dict[str, Fields]:
    found = tables.get(key, {})
    if not isinstance(found, dict) or not all(isinstance(v, dict) for v in found.values()):
        raise UsageError(f"{name}, line {_line(text, key)}: write [{key}.NAME]")
    return found


def _line(text: str, word: str) -> int:
    """The number of the first line that begins with a word, or has it in its table header."""
    pattern = re.compile(rf"\s*(\[.*\b{re.escape(word)}\b|{re.escape(word)}\b)")
    return next((i for i, line in enumerate(text.splitlines(), 1) if pattern.match(line)), 1)


def _rule_line(text: str, nth: int) -> int:
    """The number of the line in which the nth [[rule]] begins."""
    heads = [i for i, line in enumerate(text.splitlines(), 1) if re.match(r"\s*\[\[\s*rule\s*\]\]", line)]
    return heads[nth] if nth < len(heads) else 1


def _key_line(text: str, begin: int, key: str) -> int:
    """The number of the line of a key in the table that begins at `begin`."""
    lines = text.splitlines()
    for i in range(begin, len(lines)):
        if re.match(r"\s*\[", lines[i]):
            break
        if re.match(rf"\s*{re.escape(key)}\s*=", lines[i]):
            return i + 1
    return begin


def catalogue() -> RuleSet:
    """A copy of Holdfast's own rules, which the caller may change."""
    return _catalogue().copy()


@cache
def _catalogue() -> RuleSet:
    """Read once per process: a forked process that has them already does not read them again."""
    rules = RuleSet()
    folder = resources.files("holdfast.health.catalogue")
    for file in sorted(folder.iterdir(), key=lambda f: f.name):
        if file.name.endswith(".toml"):
            rules.read(file.read_text(encoding="utf-8"), file.name, own=True)
    return rules


def load_rules(files: Iterable[str] = (), dry_run: Iterable[str] = ()) -> RuleSet:
    """The catalogue with the user's files applied on top of it.

    Raises:
        UsageError: a file cannot be read or is wrong; the message names the line.
    """
    rules = catalogue()
    for name in files:
        try:
            # A rule can cause a reboot of a machine, or its replacement.
            refuse_open_to_others(Path(name), "--health-rules", owner=False)
            text = Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"the rule file {name} cannot be read: {error}") from None
        rules.read(text, name)
    rules.on_trial(dry_run)
    return rules
