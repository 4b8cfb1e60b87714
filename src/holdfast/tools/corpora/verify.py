"""Whether a token file is whole: its index, its tokens, and the sums that were kept when it was built."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import xxhash

from holdfast.data.files import TokenFile
from holdfast.errors import DataError
from holdfast.tools.corpora.build import Description, describe

_AT_ONCE_BYTES = 8 << 20


def verify(file: TokenFile, seen: Callable[[int], None] = lambda nbytes: None) -> Description | None:
    """Reads everything of a data set.

    Args:
        seen: is called with the bytes that were read.

    Returns:
        What it was built from, if `holdfast data build` did it; only then are there sums to compare with.

    Raises:
        DataError: it is not complete; the message has the file and what is wrong with it.
    """
    description = describe(file.path.with_suffix(""))
    # The index first: it is small, and when it does not fit the tokens there is no use in reading them.
    if file.index is not None:
        try:
            file.index.check(seen)
        except ValueError as error:
            raise DataError(str(error)) from error
    _check_range(file, description, seen)
    if description is not None:
        paths = [file.path, *([file.index.path] if file.index is not None else [])]
        for path in paths:
            if (recorded := description.sums.get(path.suffix)) is not None and recorded != _sum(path, seen):
                raise DataError(
                    f"{path} differs from what `holdfast data build` wrote; copy or build it again"
                )
    return description


def _check_range(file: TokenFile, description: Description | None, seen: Callable[[int], None]) -> None:
    end = description.vocabulary if description is not None else None
    step = _AT_ONCE_BYTES // file.tokens.dtype.itemsize
    for low in range(0, len(file.tokens), step):
        tokens = file.tokens[low : low + step]
        smallest, largest = int(tokens.min()), int(tokens.max())
        # A token outside of the vocabulary indexes beyond the embedding. On a GPU that is an assertion in a
        # kernel, hours into the run and without the name of a file.
        if smallest < 0 or (end is not None and largest >= end):
            wrong = smallest if smallest < 0 else largest
            at = low + int(np.argmax(tokens == wrong))
            limit = "" if end is None else f" of 0 to {end - 1}"
            raise DataError(
                f"{file.path}: token {at} is {wrong}, which is not a token{limit}; build it again"
            )
        seen(tokens.nbytes)


def _sum(path: Path, seen: Callable[[int], None]) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_AT_ONCE_BYTES):
            digest.update(block)
            seen(len(block))
    return digest.hexdigest()
