"""What something costs, in lines of Python that run: the same on every machine, however busy."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def lines_of(what: Callable[[], object]) -> int:
    """How many lines run in a call."""
    count = 0

    def trace(frame: FrameType, kind: str, _: Any) -> Any:
        nonlocal count
        count += kind == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        what()
    finally:
        sys.settrace(before)
    return count
