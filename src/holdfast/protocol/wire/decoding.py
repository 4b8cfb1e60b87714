"""Reading what did not come from this process's own memory.

Bytes may be cut short, flipped by a disk, or made by a stranger. Of what is read through `decode`, every failure is one
exception and none is forgotten.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import TypeVar

import msgspec

from holdfast.errors import Damaged

MOST_BYTES = 64 << 20
"""Far above all that is read by whole documents, and little enough for untyped JSON of it to fit into memory."""

Given = TypeVar("Given")
T = TypeVar("T")

_NOT_READABLE = (
    msgspec.MsgspecError,
    ValueError,  # also UnicodeError, and what json, tomllib and datetime raise
    OverflowError,
    RecursionError,  # nested deeper than the interpreter goes; msgspec lets it through
    struct.error,
    LookupError,
    TypeError,
    AttributeError,
)
"""The last three: what reading functions raise where a value is of another kind, or lacks a name."""


def decode(
    reader: Callable[[Given], T],
    data: Given,
    what: str,
    *,
    error: type[Exception] = Damaged,
    most: int = MOST_BYTES,
) -> T:
    """What `reader` makes of bytes or text of somebody else.

    Args:
        reader: for example the `decode` of a msgspec decoder, which was made where a module is imported: several
            threads may read at a time. It does nothing but read, for its failures are taken for damage.
        data: bytes, text, or values that were read already and get their types now.
        what: the beginning of the message, such as "/jobs/a/resume.json is damaged".
        error: what the caller has promised to raise.
        most: bytes of `data` that are looked at; more is refused, and nothing is allocated for it.

    Raises:
        Damaged: or `error`: it cannot be read. The message says why.
    """
    if isinstance(data, bytes | bytearray | memoryview | str) and len(data) > most:
        raise error(f"{what}: it has {len(data)} bytes, more than the limit of {most}")
    try:
        return reader(data)
    except _NOT_READABLE as reason:
        raise error(f"{what}: {_why(reason)}") from reason


def _why(reason: BaseException) -> str:
    if isinstance(reason, RecursionError):
        return "it is nested too deeply"
    if isinstance(reason, msgspec.MsgspecError | ValueError):
        return str(reason)
    return f"{type(reason).__name__}: {reason}"


def kebab(name: str) -> str:
    """`NodeJoined` becomes `node-joined`. What was written before is found by these names: a class keeps its own."""
    return re.sub(r"(?<!^)(?=[A-Z])", "-", name).lower()
