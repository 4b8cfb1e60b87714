"""The table of frameworks says no more than what pytest's results say."""

from __future__ import annotations

import pytest
import table
from table import Shown


def result(folder, name, version, cases):
    """A file of results: (capability, refused, what pytest writes into the case)."""
    text = "".join(
        f'<testcase name="t{n}"><properties><property name="{table.PROPERTY}" '
        f'value="{table.shown_as("transformers", version, capability, refused)}"/></properties>{inside}</testcase>'
        for n, (capability, refused, inside) in enumerate(cases)
    )
    file = folder / name
    file.write_text(f'<testsuites><testsuite>{text}<testcase name="other"/></testsuite></testsuites>')
    return file


def row(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_cell_is_what_its_tests_showed(tmp_path):
    new = [
        ("kill", False, ""),
        ("level 2", False, ""),
        ("sharded", True, ""),
        ("resize", False, "<skipped/>"),
    ]
    old = [("kill", False, ""), ("kill", False, "<failure/>"), ("resize", False, "<error/>")]
    files = [result(tmp_path, "new.xml", "5.23.0", new), result(tmp_path, "old.xml", "5.9.1", old)]
    head, _, *rows = table.render(table.read(files)).splitlines()
    assert row(head)[2:] == list(table.CAPABILITIES)
    assert list(map(row, rows)) == [
        ["transformers", "5.9.1", "not run", "not run", "failed", "failed", "not run"],
        ["transformers", "5.23.0", "not run", "passed", "passed", "not run", "refused"],
    ]


def test_a_test_that_was_left_out_is_not_hidden_by_another():
    both = [
        Shown(framework="x", version="1", capability="kill", outcome=outcome)
        for outcome in ("passed", "not run")
    ]
    for order in (both, both[::-1]):
        assert row(table.render(order).splitlines()[-1])[4] == "not run"


def test_a_refusal_that_failed_is_a_failure(tmp_path):
    file = result(tmp_path, "x.xml", "1", [("sharded", True, "<failure/>")])
    assert [one.outcome for one in table.read([file])] == ["failed"]


def test_the_table_of_a_page_is_replaced():
    page = f"above\n{table.BEGIN}\nold\n{table.END}\nbelow\n"
    assert table.put(page, "new") == f"above\n{table.BEGIN}\nnew\n{table.END}\nbelow\n"
    with pytest.raises(ValueError, match="table begin"):
        table.put("no marks", "new")


def test_a_capability_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match="resiez"):
        table.shown_as("transformers", "1", "resiez", False)


class Item:
    """A collected test, as far as its marks."""

    def __init__(self, *marks):
        self.marks, self.user_properties = [mark.mark for mark in marks], []

    def iter_markers(self, name):
        return [mark for mark in self.marks if mark.name == name]

    def get_closest_marker(self, name):
        return next(iter(self.iter_markers(name)), None)


def test_the_marks_of_a_test_come_into_its_results():
    item = Item(
        pytest.mark.framework("pytest"),
        pytest.mark.capability("level 2", "kill"),
        pytest.mark.capability("sharded", refused=True),
    )
    table.tag(item)
    texts = [("level 2", "passed"), ("kill", "passed"), ("sharded", "refused")]
    wanted = [f"pytest|{pytest.__version__}|{capability}|{outcome}" for capability, outcome in texts]
    assert item.user_properties == [(table.PROPERTY, text) for text in wanted]
    unmarked = Item(pytest.mark.framework("pytest"))
    table.tag(unmarked)
    assert unmarked.user_properties == []
