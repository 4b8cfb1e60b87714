"""Kubernetes' quantities: `500m` cores, `200Gi` bytes."""

from __future__ import annotations

import re

_SUFFIXES = {
    "": 1.0,
    "m": 1e-3,
    **{unit: 1000.0**n for n, unit in enumerate(("k", "M", "G", "T", "P", "E"), 1)},
    **{f"{unit}i": 1024.0**n for n, unit in enumerate(("K", "M", "G", "T", "P", "E"), 1)},
}
_QUANTITY = re.compile(r"([0-9]+(?:[.][0-9]*)?|[.][0-9]+)(?:([eE][+-]?[0-9]+)|([a-zA-Z]*))")


def quantity(value: object) -> float | None:
    """The number; None: it is none, or none that Kubernetes takes."""
    match = _QUANTITY.fullmatch(str(value))
    if match is None or (match[3] or "") not in _SUFFIXES:
        return None
    return float(match[1] + (match[2] or "")) * _SUFFIXES[match[3] or ""]
