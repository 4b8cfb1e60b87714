"""Which framework, in which version, can do what: a table from the results that pytest wrote.

table.py RESULT.xml... [--write PAGE]

A test says what it shows by two marks: `framework("transformers")` and `capability("kill")`. `tests/adapters/conftest.py`
puts them, with the installed version, into pytest's results. Several environments have a file each.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

PROPERTY = "adapter"
CAPABILITIES = ("level 1", "level 2", "kill", "resize", "sharded")
BEGIN, END = "<!-- table begin -->", "<!-- table end -->"
WORST_FIRST = ("failed", "not run", "passed", "refused")
"""A cell says the worst of its tests: one that was left out is no success of the others."""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What one test says of a cell."""

    framework: str
    version: str
    capability: str
    outcome: str
    """passed, refused (with a sentence, as it should be), failed or not run."""


def shown_as(framework: str, version: str, capability: str, refused: bool) -> str:
    """The property of a test, which `read` reads."""
    if capability not in CAPABILITIES:
        raise ValueError(f"no capability is called {capability!r}; there are: {', '.join(CAPABILITIES)}")
    return "|".join((framework, version, capability, "refused" if refused else "passed"))


def tag(item: Any) -> None:
    """Puts what a collected test shows into its results."""
    framework = item.get_closest_marker("framework")
    for mark in item.iter_markers("capability") if framework else ():
        (name,) = framework.args
        for capability in mark.args:
            text = shown_as(name, _version(name), capability, mark.kwargs.get("refused", False))
            item.user_properties.append((PROPERTY, text))


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def read(files: Iterable[Path]) -> list[Shown]:
    """From files that `pytest --junitxml` wrote."""
    found = []
    for file in files:
        for case in ElementTree.parse(file).iter("testcase"):
            tags = {child.tag for child in case}
            for known in case.iterfind("properties/property"):
                if known.get("name") != PROPERTY:
                    continue
                framework, version, capability, success = str(known.get("value")).split("|")
                outcome = (
                    "failed" if tags & {"failure", "error"} else "not run" if "skipped" in tags else success
                )
                found.append(
                    Shown(framework=framework, version=version, capability=capability, outcome=outcome)
                )
    return found


def render(shown: Iterable[Shown]) -> str:
    """A Markdown table: a row for each framework and version. What no test says is "not run"."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for one in shown:
        row = cells.setdefault((one.framework, one.version), {})
        before = row.get(one.capability, WORST_FIRST[-1])
        row[one.capability] = min(before, one.outcome, key=WORST_FIRST.index)
    lines = [
        f"| framework | version | {' | '.join(CAPABILITIES)} |",
        "|---" * (2 + len(CAPABILITIES)) + "|",
    ]
    for (framework, version), row in sorted(
        cells.items(), key=lambda item: (item[0][0], _numbers(item[0][1]))
    ):
        found = [row.get(capability, "not run") for capability in CAPABILITIES]
        lines.append(f"| {framework} | {version} | {' | '.join(found)} |")
    return "\n".join(lines)


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
