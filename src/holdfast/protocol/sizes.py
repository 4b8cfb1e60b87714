"""Sizes as people write them."""

from __future__ import annotations

import re

from holdfast.errors import UsageError

SIZES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_size(option: str, text: str) -> int:
    """`8G` in bytes. Raises UsageError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", text)
    # Powers of 1024, as memory is sized. Zero is refused: it would mean "no memory at all" for one reader and
    # "no limit" for the next.
    if match is None or float(match[1]) <= 0:
        raise UsageError(f"{option} must be a size (got {text!r}), for example 8G")
    return int(float(match[1]) * SIZES[match[2]])
