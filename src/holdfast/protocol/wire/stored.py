"""Files that others may have written or damaged: read whole, and no more of them than is expected."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from holdfast.errors import Damaged, UsageError
from holdfast.protocol.wire.decoding import MOST_BYTES, decode

T = TypeVar("T")

_PIECE_BYTES = 1 << 20
START_ANEW = "the next start of the job writes a new one; checkpoints are not affected"


def decode_file(
    reader: Callable[[bytes], T],
    path: Path,
    what: str = "",
    *,
    error: type[Exception] = Damaged,
    most: int = MOST_BYTES,
) -> T:
    """What `reader` makes of a whole file; arguments as of `decode`.

    Args:
        what: empty: "PATH is damaged".

    Raises:
        OSError: it cannot be read.
        Damaged: or `error`: what is in it cannot be.
    """
    what = what or f"{path} is damaged"
    pieces, left = [], most
    # In pieces and without a look at its size: a pipe has none, and a file may grow while it is read.
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_PIECE_BYTES):
            pieces.append(piece)
            left -= len(piece)
            if left < 0:
                raise error(f"{what}: it has more bytes than the limit of {most}")
    return decode(reader, b"".join(pieces), what, error=error, most=most)


def read_stored(path: Path, decoder: msgspec.json.Decoder[T], advice: str) -> T:
    """Reads a JSON file.

    Args:
        decoder: made once, where a module is imported: several threads may read at a time.
        advice: what a person can do if it is damaged; ends the message.

    Raises:
        FileNotFoundError: it is not there.
        UsageError: it cannot be read, or has something else.
    """
    try:
        return decode_file(decoder.decode, path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}): {advice}") from None
    except Damaged as error:
        raise UsageError(f"{error}; {advice}") from None


def read_stored_word(path: Path, advice: str = START_ANEW) -> str:
    """Reads a file of one short word, a token or an identity, as `read_stored`."""
    try:
        return decode_file(word, path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}): {advice}") from None
    except Damaged:
        raise UsageError(
            f"{path} is damaged (its content is not a value that Holdfast writes): {advice}"
        ) from None


def word(data: bytes) -> str:
    """What is in such a file, for `decode`. Raises ValueError."""
    found = data.decode("ascii").strip()
    # Blocks of a file that was not written before the machine went are zeros, which are ASCII as well.
    if not found or not found.isprintable() or len(found.split()) > 1:
        raise ValueError("no word")
    return found
