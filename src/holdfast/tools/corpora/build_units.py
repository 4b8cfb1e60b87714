"""Finished units of a build: the tokens of one unit of input, in two files of the build's folder.

    KEY.bin   the tokens
    KEY.len   a header, then the tokens of each document, int32

The key is a hash of everything on which the content depends, so a unit is reused exactly if making it again would give the
same. The `.len` is renamed into place last: with it a unit is finished. Neither is forced to disk, because merging
compares the tokens with the sum in the header.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from holdfast.data.megatron import MOST_TOKENS
from holdfast.errors import DataError
from holdfast.tools.corpora.encoding import load_encoder
from holdfast.tools.corpora.inputs import Reader, Unit
from holdfast.tools.corpora.options import InputOptions

HEADER = struct.Struct("<8sQQQQ")  # magic, documents, tokens, skipped, XXH3-64 of the tokens
MAGIC = b"HFUNIT1\n"

BATCH_DOCUMENTS = 256
BATCH_BYTES = 1 << 20
COPY_BYTES = 8 << 20


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are made from the input."""

    reading: InputOptions
    tokenizer: str
    """A path, or "bytes"."""
    tokenizer_key: str
    """Hash of the tokenizer's content when the build began."""
    eod: int | None
    """The token that ends every document; None: none is added."""
    dtype: str
    """Dtype of the tokens."""

    def key_of(self, unit: Unit) -> str:
        """The name of the unit's files."""
        # The leading 1 is the version of this format. A change of what a unit holds must raise it, or old
        # units would be taken for new ones.
        parts = msgspec.json.encode((1, self.reading, self.tokenizer_key, self.eod, self.dtype, unit))
        return xxhash.xxh3_128_hexdigest(parts)


@dataclass(frozen=True, kw_only=True)
class FinishedUnit:
    """The files of one unit, complete."""

    path: Path
    """Path of its files, without their suffixes."""
    documents: int
    tokens: int
    skipped: int
    """Lines and rows that could not be read."""
    sum: int
    """XXH3-64 of the tokens."""

    def lengths(self) -> npt.NDArray[np.int32]:
        """Tokens of each document, shape [documents]."""
        return np.fromfile(_with(self.path, ".len"), "<i4", offset=HEADER.size)

    def content(self) -> Iterator[bytes]:
        """The tokens' bytes.

        Raises:
            DataError: they differ from what was written. The unit is then removed, so that it is made again.
        """
        digest = xxhash.xxh3_64()
        with _with(self.path, ".bin").open("rb") as file:
            while block := file.read(COPY_BYTES):
                digest.update(block)
                yield block
        # Units are not synced when they are written, because a build writes thousands of them. Instead they
        # are verified here, when they are used. The `.len` goes, so that the next run makes the unit again.
        if digest.intdigest() != self.sum:
            _with(self.path, ".len").unlink()
            raise DataError(
                f"{self.path}.bin is damaged; run the same command again to build this part again"
            )


def find_unit(folder: Path, key: str, itemsize: int) -> FinishedUnit | None:
    """The unit, if it is finished."""
    path = folder / key
    try:
        with _with(path, ".len").open("rb") as file:
            magic, documents, tokens, skipped, sum_ = HEADER.unpack(file.read(HEADER.size))
            # Sizes are compared too: after a power failure a file may have its name and only a part of its
            # bytes.
            whole = os.fstat(file.fileno()).st_size == HEADER.size + 4 * documents
        whole = whole and magic == MAGIC and _with(path, ".bin").stat().st_size == tokens * itemsize
    except (FileNotFoundError, struct.error):
        return None
    return (
        FinishedUnit(path=path, documents=documents, tokens=tokens, skipped=skipped, sum=sum_)
        if whole
        else None
    )


def make_unit(
    unit: Unit, recipe: Recipe, folder: Path, seen: Callable[[int], None] = lambda nbytes: None
) -> None:
    """Reads, encodes and writes one unit. Runs in a process of its own, or in the builder's.

    Args:
        seen: called with the number of bytes of documents that were processed so far.

    Raises:
        DataError: the input cannot be read, or changed since the build began; or the disk is full.
    """
    encoder = load_encoder(recipe.tokenizer)
    # Each process loads the tokenizer by itself. One that is replaced during the build would give units of
    # two vocabularies under one key.
    if encoder.key != recipe.tokenizer_key:
        raise DataError(f"{recipe.tokenizer} changed while data was built with it; run the command again")
    readers = [Reader(span, recipe.reading, encoder.needs_utf8) for span in unit.spans]
    documents = chain.from_iterable(reader.documents() for reader in readers)
    end = [] if recipe.eod is None else [recipe.eod]
    dtype = np.dtype(recipe.dtype).newbyteorder("<")
    digest, lengths, nbytes = xxhash.xxh3_64(), array("i"), 0
    path = folder / recipe.key_of(unit)
    part = _with(path, f".{os.getpid()}.part")
    with writing(part), part.open("wb") as file:
        for batch in _batches(documents):
            nbytes += sum(map(len, batch))
            seen(nbytes)
            for tokens in encoder.encode(batch):
                # An empty document would be an end token alone: a sample boundary that teaches nothing, once
                # for every empty line.
                if not len(tokens):
                    continue
                if len(tokens) + len(end) > MOST_TOKENS:
                    raise DataError(
                        f"a document of {unit.spans[0].path} (or files after it) has {len(tokens)} tokens; the limit "
                        f"is {MOST_TOKENS}"
                    )
                lengths.append(len(tokens) + len(end))
                content = np.append(tokens.astype(dtype), np.array(end, dtype)).tobytes()
                digest.update(content)
                file.write(content)
    # Tokens first, lengths second. `find_unit` looks for the lengths, so a process that is killed between the
    # two renames leaves a unit that counts as missing.
    part.rename(_with(path, ".bin"))
    skipped = sum(reader.skipped for reader in readers)
    head = HEADER.pack(MAGIC, len(lengths), sum(lengths), skipped, digest.intdigest())
    with writing(part):
        part.write_bytes(head + np.array(lengths, "<i4").tobytes())
    part.rename(_with(path, ".len"))


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """On an error, reports the file that could not be written, and what to do."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{path} could not be written: {error.strerror or error}; free some space or repair the disk, then run "
            "the same command again: finished parts are kept"
        ) from error


def _batches(documents: Iterator[bytes]) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    nbytes = 0
    for document in documents:
        batch.append(document)
        nbytes += len(document)
        if len(batch) == BATCH_DOCUMENTS or nbytes >= BATCH_BYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def _with(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)
