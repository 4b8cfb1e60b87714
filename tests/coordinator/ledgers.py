"""What tests of ledgers share: bounds that they reach, and how much of a file a reader looks at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest

from holdfast.coordinator.service import rollups
from holdfast.coordinator.service.store import Store

STEPS, BUCKETS, PIECE = 600, 100, 64
T = TypeVar("T")


@contextmanager
def small() -> Iterator[None]:
    """Bounds of a ledger that a test reaches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollups, "STEPS_KEPT", STEPS)
        patch.setattr(rollups, "BUCKETS_KEPT", BUCKETS)
        patch.setattr(rollups, "PIECE", PIECE)
        patch.setattr(rollups, "NAMED_KEPT", 3)
        patch.setattr(rollups, "NAMES_BYTES", 40)
        yield


def counted(store: Store, read: Callable[[], T]) -> tuple[T, int]:
    """What a reading gives, and how many thousand instructions of SQLite's machine it took."""
    ticks = 0

    def tick() -> int:
        nonlocal ticks
        ticks += 1
        return 0

    store._db.set_progress_handler(tick, 1000)
    found = read()
    store._db.set_progress_handler(None, 0)
    return found, ticks
