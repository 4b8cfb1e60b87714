import json
from importlib.resources import files

import pytest

from holdfast.tools.plan.tables import MISFIT, compare


@pytest.fixture(scope="module")
def cells():
    return compare(json.loads(files("holdfast.tools.plan").joinpath("published.json").read_text()))


def test_every_published_cell_follows_but_for_three(cells):
    odd = [(c.row, c.column, c.published, c.computed) for c in cells if not c.equal]
    assert odd == [
        ("0.05%", "512 nodes", 48, 47),
        ("0.07%", "256 nodes", 40, 39),
        ("0.07%", "512 nodes", 55, 54),
    ]
    assert {c.note for c in cells if not c.equal} == {MISFIT}
    assert {c.table[0] for c in cells if not c.equal} == {"4"}


def test_no_cell_is_left_out(cells):
    counted = {}
    for cell in cells:
        counted[cell.table[0]] = counted.get(cell.table[0], 0) + 1
    assert counted == {"o": 3, "1": 32, "2": 4, "3": 2, "4": 32, "5": 6, "6": 1}
