"""Megatron's token files: `PREFIX.bin` holds the tokens, `PREFIX.idx` says where documents begin.

The layout is that of Megatron-LM, megatron/core/datasets/indexed_dataset.py, all numbers little-endian:

    PREFIX.bin   the tokens of all sequences, one after the other, without a header
    PREFIX.idx   9 bytes   magic, "MMIDIDX" and two zeros
                 uint64    version, 1
                 uint8     code of the tokens' dtype, see DTYPES
                 uint64    number of sequences, n
                 uint64    number of document edges, d: one more than there are documents
                 int32[n]  tokens of each sequence
                 int64[n]  where each sequence begins in the .bin, in bytes
                 int64[d]  the sequence with which each document begins, and n: from 0, ascending

Language models have one sequence per document. What follows in the index of a multimodal data set (a mode for each
sequence) is not supported.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

MAGIC = b"MMIDIDX\x00\x00"
LEGACY_MAGIC = b"TNTIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")

DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
CODES = {name: code for code, name in DTYPES.items()}

MOST_TOKENS = 2**31 - 1
"""Limit on the tokens of one document: its length is an int32."""

_AT_ONCE = 1 << 20

Ints = npt.NDArray[np.int64]


class Sink(Protocol):
    """A file-like object to which an index is written."""

    def write(self, data: bytes, /) -> object:
        """Writes all of the data."""


class MegatronIndex:
    """An index that is mapped, not read: opening costs the same for ten documents and for a billion.

    Opening it checks the header, the sizes of both files and the two ends; `check` reads everything.

    Attributes:
        path: the `.idx` file.
        dtype: of the tokens.
        tokens: number of tokens in the `.bin`.
        documents: number of documents.

    Raises:
        ValueError: it is not such an index, is cut short, or does not belong to the `.bin`.
    """

    def __init__(self, path: Path, bin_bytes: int) -> None:
        self.path = path
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(HEADER.size)
        # Named separately, because the advice differs: such a file is not damaged but of a format that is no
        # longer read.
        if head.startswith(LEGACY_MAGIC):
            raise self._broken("has the format used before 2019 (TNTIDX)", "build it again from the text")
        if not head.startswith(MAGIC[: len(head)]) or len(head) < len(MAGIC):
            raise self._broken("is not a Megatron index (it does not begin with MMIDIDX)")
        if len(head) < HEADER.size:
            raise self._broken(f"is cut short: it has {size} bytes, but its header alone needs {HEADER.size}")
        _, version, code, sequences, edges = HEADER.unpack(head)
        if version != VERSION:
            raise self._broken(f"has version {version}; only version {VERSION} is known")
        if code not in DTYPES or "int" not in DTYPES[code]:
            raise self._broken(f"says that tokens have dtype code {code}, which is not an integer type")
        expected = HEADER.size + 12 * sequences + 8 * edges
        if size == expected + sequences and sequences:
            raise self._broken(
                "has a mode for each sequence (a multimodal data set)", "only text is supported"
            )
        # The size follows exactly from the two counts. Comparing it finds a cut index without reading it,
        # whatever its length.
        if size != expected:
            raise self._broken(
                f"is cut short or corrupt: it names {sequences} sequences and {edges} document edges, which take "
                f"{expected} bytes, but it has {size}"
            )
        self.dtype = np.dtype(DTYPES[code]).newbyteorder("<")
        self._nbytes = bin_bytes
        self._sequences = sequences
        raw = np.memmap(path, dtype=np.uint8, mode="r")
        self._lengths: npt.NDArray[np.int32] = np.frombuffer(raw, "<i4", sequences, HEADER.size)
        self._pointers: Ints = np.frombuffer(raw, "<i8", sequences, HEADER.size + 4 * sequences)
        self._firsts: Ints = np.frombuffer(raw, "<i8", edges, HEADER.size + 12 * sequences)
        self._check_ends()
        self.tokens = bin_bytes // self.dtype.itemsize
        self.documents = edges - 1

    @property
    def parts(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """The bytes that determine where documents begin, for a fingerprint."""
        return self._pointers, self._firsts

    def edges(self, documents: Ints) -> Ints:
        """The index of the first token of each of these documents; for number `self.documents`, the end of the last
        one."""
        firsts = self._firsts[documents]
        pointers = self._pointers[np.minimum(firsts, self._sequences - 1)]
        # The end of the last document has no pointer of its own: it is the end of the .bin.
        edges: Ints = np.where(firsts == self._sequences, self._nbytes, pointers) // self.dtype.itemsize
        return edges

    def check(self, seen: Callable[[int], None] = lambda nbytes: None) -> None:
        """Reads the whole index.

        Raises:
            ValueError: sequences do not lie one after the other, or documents do not.
        """
        itemsize = self.dtype.itemsize
        for low in range(0, self._sequences, _AT_ONCE):
            lengths = self._lengths[low : low + _AT_ONCE].astype(np.int64)
            following = np.append(self._pointers[low + 1 : low + _AT_ONCE + 1], self._nbytes)[: len(lengths)]
            wrong = (lengths < 0) | (self._pointers[low : low + _AT_ONCE] + lengths * itemsize != following)
            if wrong.any():
                number = low + int(np.argmax(wrong))
                raise self._broken(f"is corrupt: sequence {number} does not end where the next one begins")
            seen(12 * len(lengths))
        for low in range(0, len(self._firsts) - 1, _AT_ONCE):
            steps = np.diff(self._firsts[low : low + _AT_ONCE + 1])
            if (steps < 0).any():
                number = low + int(np.argmax(steps < 0))
                raise self._broken(f"is corrupt: document {number + 1} begins before document {number}")
            seen(8 * len(steps))

    def _check_ends(self) -> None:
        if not len(self._firsts) or self._firsts[0] != 0 or self._firsts[-1] != self._sequences:
            raise self._broken(f"is corrupt: its documents do not span its {self._sequences} sequences")
        end = 0
        if self._sequences:
            end = int(self._pointers[-1]) + int(self._lengths[-1]) * self.dtype.itemsize
        # Catches the most common mistake, a .bin and an .idx from two different builds, at the cost of
        # reading two numbers.
        if end != self._nbytes or (self._sequences and self._pointers[0] != 0):
            raise self._broken(
                f"describes {end} bytes of tokens, but {self.path.with_suffix('.bin')} has {self._nbytes}: one of "
                "them is cut short, or they do not belong to the same data set"
            )

    def _broken(self, what: str, advice: str = "copy or build it again") -> ValueError:
        return ValueError(f"{self.path} {what}; {advice}")


def write_index(file: Sink, dtype: np.dtype[Any], lengths: npt.NDArray[np.int32]) -> None:
    """Writes the index of documents that have one sequence each.

    Args:
        dtype: of the tokens.
        lengths: tokens of each document, shape [documents].
    """
    count = len(lengths)
    file.write(HEADER.pack(MAGIC, VERSION, CODES[dtype.name], count, count + 1))
    file.write(lengths.astype("<i4").tobytes())
    end = 0
    for low in range(0, count, _AT_ONCE):
        ends = end + np.cumsum(lengths[low : low + _AT_ONCE], dtype=np.int64)
        file.write(((ends - lengths[low : low + _AT_ONCE]) * dtype.itemsize).astype("<i8").tobytes())
        end = int(ends[-1])
    for low in range(0, count + 1, _AT_ONCE):
        file.write(np.arange(low, min(low + _AT_ONCE, count + 1), dtype="<i8").tobytes())
