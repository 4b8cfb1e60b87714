"""Searches for garbage in the coordinator's process."""

from __future__ import annotations

import gc
import weakref

from holdfast.coordinator.service.garbage import short_searches


class Ring:
    """Holds itself."""

    def __init__(self) -> None:
        self.me = self


def looked_at() -> int:
    """Objects that the next search looks at."""
    return len(gc.get_objects())


def test_what_was_found_alive_is_left_out_and_new_garbage_is_found() -> None:
    with short_searches():
        gc.collect()
        before = looked_at()
        state = [[n] for n in range(10_000)]
        assert looked_at() > before + 10_000
        gc.collect()
        assert looked_at() < before + 1_000
        ring = Ring()
        gone = weakref.ref(ring)
        del ring
        gc.collect()
        assert gone() is None
    assert gc.get_freeze_count() == 0
    assert looked_at() > len(state)


def test_garbage_that_was_alive_when_it_was_left_out_is_found_by_the_search_of_all() -> None:
    with short_searches(all_each=3):
        ring = Ring()
        gone = weakref.ref(ring)
        gc.collect()
        del ring
        gc.collect()
        assert gone() is not None
        gc.collect()  # the third: from here all is looked at
        gc.collect()
        assert gone() is None
