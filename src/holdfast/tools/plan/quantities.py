"""Reads times, rates, sizes and prices as people write them. Errors name the field and show an example."""

from __future__ import annotations

import math
import re

from holdfast.errors import UsageError

_TIMES = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_SIZES = {"B": 1.0, "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "GiB": 2.0**30, "TiB": 2.0**40}
_FORM = re.compile(r"\s*([-+]?[0-9][0-9_,]*\.?[0-9]*(?:[eE][-+]?[0-9]+)?|[-+]?\.[0-9]+)\s*([A-Za-z%]*)\s*")

HIGHEST_RATE = 0.02
"""The highest rate, in failures per node-hour: a node that fails every 50 hours. A higher figure is probably a
percentage without its sign."""


def as_given(name: str, value: str, as_flags: bool) -> str:
    """A field as a person writes it: `--nodes 256`, or in a file `nodes: 256`."""
    return f"--{name.replace('_', '-')} {value}" if as_flags else f"{name}: {value}"


def time_s(field: str, given: float | str, zero: bool = False) -> float:
    """`90`, `90s`, `15m`, `4h`, `54d` in seconds."""
    number, unit = _parts(field, given, "90s, 15m, 4h or 54d")
    if unit and unit not in _TIMES:
        raise UsageError(f"{field} must be a time (got {given!r}), for example 90s, 15m, 4h or 54d")
    return _positive(field, given, number * _TIMES.get(unit, 1.0), "90s", zero)


def nbytes(field: str, given: float | str) -> float:
    """`840GB`, `2TB` in bytes."""
    number, unit = _parts(field, given, "840GB")
    if unit not in _SIZES:
        raise UsageError(f"{field} must be a size with a unit (got {given!r}), for example 840GB or 2TB")
    return _positive(field, given, number * _SIZES[unit], "840GB")


def rate(field: str, given: float | str) -> float:
    """Failures per node-hour: `0.016%` or `0.00016`; 0: none."""
    number, unit = _parts(field, given, "0.016% (per node-hour)")
    if unit not in ("", "%"):
        raise UsageError(
            f"{field} must be a rate (got {given!r}), for example 0.016% (failures per node-hour)"
        )
    found = _positive(field, given, number / 100 if unit else number, "0.016%", zero=True)
    if found > HIGHEST_RATE:
        hint = "" if unit else f"; if a percentage is meant, write {number:g}%"
        raise UsageError(
            f"{field}: {given!r} means that every node fails after {1 / found:.1f} hours{hint}; for example 0.016%"
        )
    return found


def count(field: str, given: float | str, least: int = 1, example: str = "256") -> int:
    """A whole number."""
    number, unit = _parts(field, given, example)
    if unit or number != int(number):
        raise UsageError(f"{field} must be a whole number (got {given!r}), for example {example}")
    if number < least:
        raise UsageError(f"{field} must be at least {least} (got {given!r}), for example {example}")
    return int(number)


def amount(field: str, given: float | str, example: str, zero: bool = False) -> float:
    """A plain number: GPU-hours, tokens (`15e12`), a price."""
    number, unit = _parts(field, given, example)
    factor = {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(unit)
    if factor is None:
        raise UsageError(f"{field} must be a number (got {given!r}), for example {example}")
    return _positive(field, given, number * factor, example, zero)


def _parts(field: str, given: float | str, example: str) -> tuple[float, str]:
    # YAML reads `yes` and `on` as True, and to Python a bool is an int: without this, `nodes: yes` would be
    # one node.
    if isinstance(given, bool) or not isinstance(given, (int, float, str)):
        raise UsageError(f"{field} must be a number (got {given!r}), for example {example}")
    if not isinstance(given, str):
        return float(given), ""
    found = _FORM.fullmatch(given)
    if found is None:
        raise UsageError(f"{field} must be a number (got {given!r}), for example {example}")
    return float(found[1].replace(",", "").replace("_", "")), found[2]


def _positive(field: str, given: object, number: float, example: str, zero: bool = False) -> float:
    if math.isnan(number) or math.isinf(number) or number < 0 or (number == 0 and not zero):
        what = "is negative" if number < 0 else "is zero" if number == 0 else "is no number"
        raise UsageError(f"{field}: {given!r} {what}; for example {example}")
    return number
