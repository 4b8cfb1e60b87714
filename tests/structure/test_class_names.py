"""A public class has its name alone in the package, so that a reader knows which class is meant without the import.

Where several classes share a name, the reason stands here.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "holdfast"

RECORDED = "the ledger's event that records this message or order; its kind on disk is the class's name"
ENTERED = "the ledger's event that records this event of the core; its kind on disk is the class's name"
CAUSE = "the cause that this message reports; its kind on disk is the class's name"
RECORDED_NAMES = (
    "one worker as a message, all together in the ledger; both names are in what is recorded of decisions"
)
DOCUMENTED = "the name that a script imports from the adapter of its own framework"
TORCHTITAN = "torchtitan names the class of a component's options so, within the component"

SHARED = {
    "BeganAnew": RECORDED,
    "Capacity": RECORDED,
    "CollectiveError": RECORDED,
    "Config": TORCHTITAN,
    "Failed": RECORDED,
    "Finding": RECORDED,
    "GradientsDiffer": CAUSE,
    "JobGoing": RECORDED,
    "NodeJoined": ENTERED,
    "NodeLost": ENTERED,
    "NodeTaken": RECORDED,
    "NodeUnavailable": RECORDED,
    "Rebuild": RECORDED,
    "Repaired": RECORDED,
    "Saved": RECORDED,
    "Snapshots": DOCUMENTED,
    "Stalled": RECORDED,
    "Started": RECORDED_NAMES,
    "StopRequested": ENTERED,
}
"""Names that several modules have, with the reason."""


def where(package: Path) -> dict[str, list[str]]:
    """The modules of each public class, by its name. Classes within classes and functions count."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(path.relative_to(package).as_posix())
    return found


@cache
def shared(package: Path) -> dict[str, list[str]]:
    return {name: paths for name, paths in where(package).items() if len(paths) > 1}


def test_names_of_classes_are_unique_but_for_those_with_a_reason() -> None:
    found = shared(PACKAGE)
    new = [f"{name} ({', '.join(paths)})" for name, paths in found.items() if name not in SHARED]
    assert not new, "name each class by what differs: " + "; ".join(new)
    assert set(SHARED) <= set(found), "an exception that is not needed"


@pytest.mark.parametrize("reason", [RECORDED, ENTERED, CAUSE])
def test_a_shared_name_is_recorded_where_its_reason_says(reason: str) -> None:
    home = "protocol/causes.py" if reason is CAUSE else "protocol/ledger.py"
    found = shared(PACKAGE)
    for name in (name for name, why in SHARED.items() if why is reason):
        paths = found[name]
        assert len(paths) == 2, name
        assert home in paths, name


def test_a_new_duplicate_is_found(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("class Thing:\n    class Inner: ...\n\nclass _Own: ...\n")
    (tmp_path / "two.py").write_text("def f():\n    class Inner: ...\n\nclass _Own: ...\n")
    assert shared(tmp_path) == {"Inner": ["one.py", "two.py"]}
