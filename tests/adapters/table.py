"""Which framework, in which version, can do what: a table from the results that pytest wrote.

table.py RESULT.xml... [--write PAGE]

A test says what it shows by two marks: `framework("transformers")` and `capability("kill")`. `tests/adapters/conftest.py`
puts them, with the installed version and the number of tests that show the same, into pytest's results. Several files may
be of one environment: a test that failed in one of them has failed.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

PROPERTY = "adapter"
CAPABILITIES = ("level 1", "level 2", "kill", "resize", "sharded")
BEGIN, END = "<!-- table begin -->", "<!-- table end -->"
NOTHING = {("deepspeed", "level 2"), ("megatron-bridge", "level 2"), ("ray", "level 2")}
"""Holdfast has no adapter for it, so there is nothing to test."""
WORST_FIRST = ("failed", "not run", "passed", "refused")
"""A cell says the worst of its tests."""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What one test says of a cell."""

    framework: str
    version: str
    capability: str
    outcome: str
    """passed, refused (with a sentence, as it should be), failed or not run."""
    test: str
    """Its name; two results of one test are not two tests."""
    of: int
    """So many tests of this cell were there, whether they were chosen (`-k`, `-m`) or not."""


def shown_as(framework: str, version: str, capability: str, refused: bool, of: int) -> str:
    """The property of a test, which `read` reads."""
    if capability not in CAPABILITIES:
        raise ValueError(f"no capability is called {capability!r}; there are: {', '.join(CAPABILITIES)}")
    return "|".join((framework, version, capability, "refused" if refused else "passed", str(of)))


def tag(items: Sequence[Any]) -> None:
    """Puts what each collected test shows into its results. Call it before any of them is left out."""
    # A test that was left out leaves no result. Without the number of all of them, the cheapest test of a cell
    # would say "passed" for those that nobody ran.
    shows = [(item, *one) for item in items for one in _shows(item)]
    of = Counter((name, capability) for _, name, capability, _ in shows)
    for item, name, capability, refused in shows:
        version = _version(name)
        if version is not None:  # else its tests say nothing of any version
            text = shown_as(name, version, capability, refused, of[name, capability])
            item.user_properties.append((PROPERTY, text))


def _shows(item: Any) -> list[tuple[str, str, bool]]:
    """By a test's marks: the framework, the capability, and whether that is refused."""
    framework = item.get_closest_marker("framework")
    return [
        (framework.args[0], capability, mark.kwargs.get("refused", False))
        for mark in (item.iter_markers("capability") if framework else ())
        for capability in mark.args
    ]


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def read(files: Iterable[Path]) -> list[Shown]:
    """From files that `pytest --junitxml` wrote."""
    found = []
    for file in files:
        for case in ElementTree.parse(file).iter("testcase"):
            tags = {child.tag for child in case}
            for known in case.iterfind("properties/property"):
                if known.get("name") != PROPERTY:
                    continue
                framework, version, capability, success, of = str(known.get("value")).split("|")
                outcome = (
                    "failed" if tags & {"failure", "error"} else "not run" if "skipped" in tags else success
                )
                found.append(
                    Shown(
                        framework=framework,
                        version=version,
                        capability=capability,
                        outcome=outcome,
                        test=f"{case.get('classname')}.{case.get('name')}",
                        of=int(of),
                    )
                )
    return found


def render(shown: Iterable[Shown]) -> str:
    """A Markdown table: a row for each framework and version. Where not all tests of a cell ran, it says how many."""
    found: dict[tuple[str, str], dict[str, list[Shown]]] = {}
    for one in shown:
        row = found.setdefault((one.framework, one.version), {})
        row.setdefault(one.capability, []).append(one)
    lines = [
        f"| framework | version | {' | '.join(CAPABILITIES)} |",
        "|---" * (2 + len(CAPABILITIES)) + "|",
    ]
    for (framework, version), row in sorted(
        found.items(), key=lambda item: (item[0][0], _numbers(item[0][1]))
    ):
        cells = [
            "none" if (framework, capability) in NOTHING else _cell(row.get(capability, []))
            for capability in CAPABILITIES
        ]
        lines.append(f"| {framework} | {version} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(shown: Sequence[Shown]) -> str:
    """The worst of its tests; a success only if none of them was left out, else how many succeeded."""
    outcomes = {one.outcome for one in shown}
    if not shown or "failed" in outcomes:
        return "failed" if shown else "not run"
    succeeded = {one.test for one in shown} - {one.test for one in shown if one.outcome == "not run"}
    of = max(one.of for one in shown)
    if not succeeded:
        return "not run"
    return f"{len(succeeded)} of {of}" if len(succeeded) < of else min(outcomes, key=WORST_FIRST.index)


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def put(page: str, table: str) -> str:
    """The page with the table between its two marks. Raises ValueError for a page without them."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="table.py", description=__doc__)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--write", type=Path, help="the page whose table is replaced")
    chosen = parser.parse_args()
    table = render(read(chosen.results))
    print(table)
    if chosen.write:
        chosen.write.write_text(put(chosen.write.read_text(encoding="utf-8"), table), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
