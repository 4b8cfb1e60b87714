"""Searches for garbage that do not look at the whole job each time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

ALL_EACH = 1000
"""One of so many searches looks at everything."""


@contextmanager
def short_searches(all_each: int = ALL_EACH) -> Iterator[None]:
    """Inside, Python's search for objects that only hold each other leaves out what an earlier one has found alive.

    Such a search stops everything, and Python looks at all objects in each. That took 31 ms with 16,000 workers, and grows with
    the job; a fault would be decided so much later. Nearly all of these objects are the job's state, which
    is freed without a search. What else has died since it was left out is found when one search of `all_each` looks at everything.
    """
    searches = 0

    def searched(phase: str, info: dict[str, int]) -> None:
        nonlocal searches
        if phase != "stop" or info["generation"] != 2:
            return
        searches += 1
        if searches % all_each == 0:
            gc.unfreeze()
        else:
            gc.freeze()

    gc.collect()
    gc.freeze()
    gc.callbacks.append(searched)
    try:
        yield
    finally:
        gc.callbacks.remove(searched)
        gc.unfreeze()
