"""Which random schedules a test runs that looks into each of them."""

import pytest
from golden import SHARDED_FROM


def some_and_at_night_many(test):
    """Gives a test `seeds`: a few, and at night some hundred others, sharded ones among them."""
    many = [*range(4, 300), *range(SHARDED_FROM + 1, SHARDED_FROM + 60)]
    seeds = [[*range(4), SHARDED_FROM], pytest.param(many, marks=pytest.mark.nightly)]
    return pytest.mark.timeout(3600)(pytest.mark.parametrize("seeds", seeds, ids=["some", "many"])(test))
