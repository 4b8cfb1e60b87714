"""The table of frameworks says no more than what pytest's results say."""

from __future__ import annotations

from collections import Counter

import pytest
import table
from table import Shown


def result(folder, name, version, cases, left_out=0):
    """A file of results: (capability, refused, what pytest writes into the case). left_out: tests of each cell more."""
    of = Counter(capability for capability, *_ in cases)
    text = "".join(
        f'<testcase name="t{n}"><properties><property name="{table.PROPERTY}" value="'
        f'{table.shown_as("transformers", version, capability, refused, of[capability] + left_out)}"/></properties>'
        f"{inside}</testcase>"
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


def kill(outcome, test, of):
    return Shown(framework="x", version="1", capability="kill", outcome=outcome, test=test, of=of)


def cell(*shown):
    """What the table says of `kill`."""
    return row(table.render(shown).splitlines()[-1])[4]


def test_a_test_that_was_left_out_is_not_hidden_by_another():
    both = [kill("passed", "a", 2), kill("not run", "b", 2)]
    assert cell(*both) == cell(*both[::-1]) == "1 of 2"
    assert cell(kill("not run", "a", 2), kill("not run", "b", 2)) == "not run"


def test_a_part_of_a_cells_tests_is_no_success(tmp_path):
    """Those that -k or -m left out are in no file."""
    assert cell(kill("passed", "a", 2)) == cell(kill("passed", "a", 2), kill("passed", "a", 2)) == "1 of 2"
    assert cell(kill("passed", "a", 2), kill("passed", "b", 2)) == "passed"
    assert cell(kill("failed", "a", 2)) == "failed"
    file = result(tmp_path, "x.xml", "1", [("sharded", True, "")], left_out=1)
    assert row(table.render(table.read([file])).splitlines()[-1])[6] == "1 of 2"


def test_what_there_is_no_adapter_for_is_not_called_untested():
    one = Shown(framework="ray", version="2.60.0", capability="level 1", outcome="passed", test="a", of=1)
    assert row(table.render([one]).splitlines()[-1])[2:] == [
        "passed",
        "none",
        "not run",
        "not run",
        "not run",
    ]


def test_a_test_that_failed_once_has_failed():
    """In another file of the same environment it passed."""
    assert cell(kill("failed", "a", 1), kill("passed", "a", 1)) == "failed"


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
        table.shown_as("transformers", "1", "resiez", False, 1)


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
    unmarked = Item(pytest.mark.framework("pytest"))
    another = Item(pytest.mark.framework("pytest"), pytest.mark.capability("kill"))
    elsewhere = Item(pytest.mark.framework("not-there"), pytest.mark.capability("kill"))
    table.tag([item, unmarked, another, elsewhere])
    texts = [("level 2", "passed", 1), ("kill", "passed", 2), ("sharded", "refused", 1)]
    wanted = [f"pytest|{pytest.__version__}|{capability}|{outcome}|{of}" for capability, outcome, of in texts]
    assert item.user_properties == [(table.PROPERTY, text) for text in wanted]
    assert unmarked.user_properties == elsewhere.user_properties == []
