"""Engines, trackers, checks and commands by their names: entry points of installed packages, Holdfast's own among them.

`entry_points.txt` beside this file declares Holdfast's own, and pyproject.toml makes the distribution's metadata of it. It is
read as a file, because a source tree that is not installed has no metadata, and an editable install keeps that of the day on
which it was installed. A name of Holdfast's own is found without a search of the installed packages, which may be hundreds of
files on a slow file system.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from holdfast.distribution import NAME
from holdfast.errors import UsageError

ENGINES = "holdfast.engines"
TRACKERS = "holdfast.trackers"
CHECKS = "holdfast.checks"
COMMANDS = "holdfast.commands"


@dataclass(frozen=True)
class EntryPoint:
    """What a package provides under a name."""

    group: str
    name: str
    value: str
    """`module:attribute`."""
    package: str = NAME
    """As pip knows it."""

    def __str__(self) -> str:
        return f"the {self.group.rpartition('.')[2].removesuffix('s')} {self.name!r} of the package {self.package}"

    def load(self) -> Any:
        """The object that it names.

        Raises:
            UsageError: importing it fails in a package that is not Holdfast.
        """
        module, _, attribute = self.value.partition(":")
        if self.package == NAME:
            return getattr(import_module(module), attribute)
        try:
            found = import_module(module)
            for part in attribute.split("."):
                found = getattr(found, part)
        # Anything may happen in a module of somebody's, an exit too, and no other command may fail for it.
        except (Exception, SystemExit) as error:
            raise self.broken(f"{type(error).__name__}: {error}") from error
        return found

    def broken(self, why: str) -> UsageError:
        """The error that it cannot be used, as one line."""
        line = " ".join(why.split())
        return UsageError(
            f"{self} cannot be used ({self.value}: {line}); update that package or uninstall it"
        )


def find(group: str, name: str) -> EntryPoint | None:
    """Holdfast's own entry point of this name, else another package's.

    Raises:
        UsageError: two other packages have it.
    """
    if (own := ours(group).get(name)) is not None:
        return own
    found = [each for each in _others(group) if each.name == name]
    if len(found) > 1:
        packages = " and ".join(each.package for each in found)
        raise UsageError(
            f"{found[0].name!r} in {group} is offered by the packages {packages}: uninstall one of them"
        )
    return found[0] if found else None


def names(group: str) -> tuple[str, ...]:
    """All names of a group, Holdfast's own first."""
    return tuple(dict.fromkeys([*ours(group), *(each.name for each in _others(group))]))


@cache
def ours(group: str) -> dict[str, EntryPoint]:
    """Holdfast's own, in the order in which they are declared."""
    found: dict[str, EntryPoint] = {}
    section = ""
    for line in Path(__file__).with_name("entry_points.txt").read_text(encoding="ascii").splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif section == group and line:
            name, _, value = line.partition(" = ")
            found[name] = EntryPoint(group, name, value)
    return found


@cache
def _others(group: str) -> tuple[EntryPoint, ...]:
    """Those of other packages. One that has a name of Holdfast's own is left out, with a line that says so."""
    from importlib.metadata import entry_points

    found = []
    for each in entry_points(group=group):
        package = each.dist.name if each.dist is not None else each.module
        if package == NAME:
            continue
        point = EntryPoint(group, each.name, each.value, package)
        if each.name in ours(group):
            sys.stderr.write(f"[holdfast] {point} is ignored, because Holdfast has one of this name\n")
        else:
            found.append(point)
    return tuple(sorted(found, key=lambda each: (each.name, each.package)))
