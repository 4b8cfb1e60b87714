"""The least that a check must measure: floors by model of device, each with its public reference."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import msgspec

from holdfast.errors import UsageError
from holdfast.protocol.health import CheckResult, Condition
from holdfast.protocol.wire.decoding import decode


class Floor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The least that a check must measure; the most, where smaller is better."""

    check: str
    value: float
    """In the check's unit."""
    reference: str
    """Where the figure was published."""
    model: str = ""
    """Part of the device's name; the longest that fits counts."""


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    floor: tuple[Floor, ...] = ()


@functools.cache
def read_floors(path: Path | None = None) -> tuple[Floor, ...]:
    """The floors of a file, by default Holdfast's own.

    Raises:
        UsageError: the file cannot be read.
    """
    name = path or resources.files("holdfast.tools.checks") / "floors.toml"
    try:
        data = name.read_bytes()
    except OSError as error:
        raise UsageError(f"the floors in {name} cannot be read: {error}") from error
    return decode(_read, data, f"the floors in {name} cannot be read", error=UsageError)


def _read(data: bytes) -> tuple[Floor, ...]:
    return msgspec.convert(tomllib.loads(data.decode()), _File).floor


def floor_of(result: CheckResult, floors: Sequence[Floor]) -> Floor | None:
    """The floor that fits the result best."""
    model = result.model.lower()
    # Vendors put more into the name from driver to driver (`NVIDIA H100 80GB HBM3`), so a floor names a part
    # of it, and the most exact part wins over a whole series.
    fit = [f for f in floors if f.check == result.name and f.model.lower() in model]
    return max(fit, key=lambda f: len(f.model), default=None)


def against_floor(result: CheckResult, floors: Sequence[Floor]) -> CheckResult:
    """The result with its floor; a healthy one that misses it is faulty."""
    floor = floor_of(result, floors)
    # A check that has a floor of its own (a fixed demand, as free memory) keeps it.
    if floor is None or result.value is None or result.floor is not None:
        return result
    missed = result.value > floor.value if result.lower else result.value < floor.value
    result = msgspec.structs.replace(result, floor=floor.value)
    # The floor never improves a result: what is faulty or unknown for another reason stays so.
    if not missed or result.condition is not Condition.HEALTHY:
        return result
    than = "above" if result.lower else "below"
    why = f"{than} what it must be ({floor.reference})"
    return msgspec.structs.replace(
        result, condition=Condition.FAULTY, detail="; ".join(filter(None, (why, result.detail)))
    )
