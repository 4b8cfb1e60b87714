"""Pytest imports a test module under its bare name, so two of one name cannot be collected in one run."""

from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_no_two_test_modules_have_one_name():
    often = Counter(path.name for path in TESTS.rglob("test_*.py"))
    assert [name for name, count in often.items() if count > 1] == []
