"""The input of `holdfast data build`: text, JSON lines and Parquet, in units that can be read in parallel.

A unit is one large span or several small ones. A span is a range of bytes of a file of lines (it contains the lines
that begin in the range), a range of row groups of a Parquet file, or a whole file. The result does not depend on how
files are cut.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from holdfast.errors import DataError, UsageError
from holdfast.tools.corpora.options import Documents, InputKind, InputOptions

MOST_FILE_BYTES = 1 << 30
"""Limit on a file that is a single document, because it is held in memory."""

_MOST_SPANS = 1024


SUFFIXES = {
    ".jsonl": InputKind.JSONL,
    ".ndjson": InputKind.JSONL,
    ".json": InputKind.JSONL,
    ".parquet": InputKind.PARQUET,
    ".pq": InputKind.PARQUET,
}


@dataclass(frozen=True, kw_only=True)
class FilePart:
    """A part of an input file, or all of it.

    The order and the names of these fields go into the keys of finished units: see `Recipe.key_of`.
    """

    path: str
    """Absolute."""
    kind: InputKind
    size: int
    """Bytes of the file when the build began."""
    changed_ns: int
    """Its modification time then, nanoseconds since 1970."""
    begin: int
    """First byte; of Parquet, first row group."""
    end: int
    """The first byte, or row group, after it."""
    nbytes: int
    """Approximate number of bytes to read."""
    whole: bool = False
    """It is one document, or compressed: the span is the whole file."""


class Unit(msgspec.Struct, frozen=True):
    """The part of the input that one process reads at a time."""

    spans: tuple[FilePart, ...] = msgspec.field(name="pieces")
    """Encoded as `pieces`: the keys of finished units and of data sets are hashes of it, and must stay what they are."""

    @property
    def nbytes(self) -> int:
        """Approximate number of bytes to read."""
        return sum(span.nbytes for span in self.spans)


def find_files(inputs: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """The files that the inputs name: for a folder all files below it, sorted, except hidden ones.

    Raises:
        UsageError: an input does not exist, or there are no files.
    """
    files: list[Path] = []
    for name in inputs:
        path = Path(name)
        if path.is_dir():
            # Sorted, since the order of files is the order of documents: folders list themselves in an order
            # that differs between machines, and the data set would too.
            below = sorted(_below(path))
            if not below:
                raise UsageError(f"the folder {path} does not contain any files")
            files += below
        elif path.is_file():
            files.append(path)
        else:
            raise UsageError(
                f"the input {path} does not exist" if not path.exists() else f"the input {path} is not a file"
            )
    if not files:
        raise UsageError("there is no input: specify files or folders")
    return files


def _below(folder: Path) -> Iterator[Path]:
    """The files of a folder and of its subfolders, except hidden ones. Refuses a folder that cannot be listed: its
    files would be missing without notice."""

    def refuse(error: OSError) -> None:
        raise UsageError(
            f"the folder {error.filename} cannot be read: {error.strerror}; check its permissions"
        )

    for at, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (path for n in names if not n.startswith(".") and (path := Path(at, n)).is_file())


def plan_units(files: list[Path], reading: InputOptions, unit_bytes: int) -> list[Unit]:
    """The units of all files, in order.

    Raises:
        UsageError: a file cannot be read in this way; raised before anything is built.
    """
    units: list[Unit] = []
    small: list[FilePart] = []
    for path in files:
        for span in _spans_of(path, reading, unit_bytes):
            small.append(span)
            # Small files share a unit, because each unit costs two files and a task for a process.
            if sum(one.nbytes for one in small) >= unit_bytes or len(small) == _MOST_SPANS:
                units.append(Unit(tuple(small)))
                small = []
    return [*units, Unit(tuple(small))] if small else units


def _spans_of(path: Path, reading: InputOptions, unit_bytes: int) -> Iterator[FilePart]:
    known = path.stat()
    kind, zipped = _kind_of(path, reading)
    whole = kind is InputKind.TEXT and reading.documents is Documents.FILE
    # Before the first unit is read: a build of hours must not end at the one file that it may not open.
    if not os.access(path, os.R_OK):
        raise UsageError(f"the input {path} cannot be read: no permission")
    if whole and known.st_size > MOST_FILE_BYTES:
        raise UsageError(
            f"{path} is one document of {known.st_size >> 20} MiB; cut it into documents with --documents line"
        )
    span = FilePart(
        path=str(path.absolute()),
        kind=kind,
        size=known.st_size,
        changed_ns=known.st_mtime_ns,
        begin=0,
        end=known.st_size,
        nbytes=known.st_size,
    )
    if kind is InputKind.PARQUET:
        for begin, end, nbytes in _row_groups(path, reading.field, unit_bytes):
            yield replace(span, begin=begin, end=end, nbytes=nbytes)
    elif zipped or whole:
        yield replace(span, whole=True)
    else:
        for begin in range(0, known.st_size, unit_bytes):
            end = min(begin + unit_bytes, known.st_size)
            yield replace(span, begin=begin, end=end, nbytes=end - begin)


class Reader:
    """Reads the documents of one span.

    Attributes:
        skipped: lines and rows that were left out.
    """

    def __init__(self, span: FilePart, reading: InputOptions, needs_utf8: bool) -> None:
        self._span, self._reading, self._needs_utf8 = span, reading, needs_utf8
        self.skipped = 0

    def documents(self) -> Iterator[bytes]:
        """The documents, in order.

        Raises:
            DataError: one cannot be read; the message names file and line.
        """
        try:
            known = Path(self._span.path).stat()
            # Compared by every process before it reads. Spans were cut from the file's size at the start; a
            # file that changed since would be cut in the middle of its lines.
            if (known.st_size, known.st_mtime_ns) != (self._span.size, self._span.changed_ns):
                raise DataError(f"{self._span.path} changed while it was being read; run the command again")
            if self._span.kind is InputKind.PARQUET:
                yield from self._rows()
            elif self._span.kind is InputKind.JSONL:
                yield from self._parsed(self._json_text)
            elif self._reading.documents is Documents.LINE:
                yield from self._parsed(self._plain_text)
            else:
                yield from self._whole()
        except (OSError, EOFError, ValueError, zlib.error) as error:  # errors of gzip and pyarrow
            raise DataError(f"{self._span.path} cannot be read: {error}") from error

    def _parsed(self, parse: Callable[[bytes], bytes]) -> Iterator[bytes]:
        for number, line in enumerate(self._lines()):
            try:
                yield parse(line)
            except (ValueError, RecursionError) as error:
                self._bad("line", self._lines_before + number + 1, str(error))

    def _lines(self) -> Iterator[bytes]:
        span = self._span
        with self._opened() as file:
            if span.whole:
                yield from file
                return
            at = 0
            if span.begin:  # the line that contains the preceding byte belongs to the previous span
                file.seek(span.begin - 1)
                at = span.begin - 1 + len(file.readline())
            # A line belongs to the span in which it begins, and is read to its end beyond it. With the rule
            # above, each line is in exactly one span wherever the cut falls.
            while at < span.end and (line := file.readline()):
                at += len(line)
                yield line

    @cached_property
    def _lines_before(self) -> int:
        """Number of lines that begin before this span; only computed when a line has to be named."""
        # Line numbers are for error messages only. Counting them costs a read of everything before the span,
        # so it is done for a line that is bad, and never for a good one.
        count, left, last = 0, self._span.begin, b"\n"
        with Path(self._span.path).open("rb") as file:
            while left and (block := file.read(min(left, 1 << 20))):
                count, left, last = count + block.count(b"\n"), left - len(block), block
        return count + (not last.endswith(b"\n"))

    def _opened(self) -> BinaryIO:
        if _is_zipped(Path(self._span.path)):
            return gzip.open(self._span.path, "rb")  # type: ignore[return-value]
        return Path(self._span.path).open("rb")

    def _whole(self) -> Iterator[bytes]:
        with self._opened() as file:
            content = file.read(MOST_FILE_BYTES + 1)
        if len(content) > MOST_FILE_BYTES:
            raise DataError(
                f"{self._span.path} is one document of more than {MOST_FILE_BYTES >> 20} MiB; cut it into documents "
                "with --documents line"
            )
        try:
            yield self._checked(content)
        except UnicodeDecodeError as error:
            self._bad("line", content.count(b"\n", 0, error.start) + 1, _utf8_trouble(error))

    def _plain_text(self, line: bytes) -> bytes:
        return self._checked(line.rstrip(b"\r\n"))

    def _json_text(self, line: bytes) -> bytes:
        line = line.strip()
        if not line:
            return b""
        try:
            # msgspec finds the one field without building the rest of the line. What it refuses goes to
            # json.loads, which also reads NaN and says where a line is broken.
            return self._decoder.decode(line).text.encode()  # type: ignore[no-any-return]
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from error
        except msgspec.DecodeError:
            parsed = json.loads(line)  # also accepts what Python writes, such as NaN, and says where it fails
        text = parsed.get(self._reading.field) if isinstance(parsed, dict) else None
        if not isinstance(text, str):
            raise ValueError(f"there is no text in the field `{self._reading.field}`")
        return text.encode()

    @cached_property
    def _decoder(self) -> msgspec.json.Decoder[Any]:
        line = msgspec.defstruct("Line", [("text", str)], rename={"text": self._reading.field})
        return msgspec.json.Decoder(line)

    def _checked(self, text: bytes) -> bytes:
        if self._needs_utf8:
            text.decode()
        return text

    def _rows(self) -> Iterator[bytes]:
        span = self._span
        with _parquet().ParquetFile(span.path) as file:
            number = sum(file.metadata.row_group(group).num_rows for group in range(span.begin))
            groups = list(range(span.begin, span.end))
            for batch in file.iter_batches(
                1024, row_groups=groups, columns=[self._reading.field], use_threads=False
            ):
                for value in batch.column(0).to_pylist():
                    number += 1
                    if value is None:
                        self._bad("row", number, f"there is no text in the column `{self._reading.field}`")
                    else:
                        yield value.encode()

    def _bad(self, what: str, number: int, why: str) -> None:
        if not self._reading.skip_bad:
            raise DataError(
                f"{self._span.path}, {what} {number}: {why}; repair the file, or skip records that cannot be read "
                "with --skip-bad"
            )
        self.skipped += 1


def _kind_of(path: Path, reading: InputOptions) -> tuple[InputKind, bool]:
    zipped = _is_zipped(path)
    suffix = path.with_suffix("").suffix if zipped else path.suffix
    return reading.kind or SUFFIXES.get(suffix.lower(), InputKind.TEXT), zipped


def _is_zipped(path: Path) -> bool:
    return path.suffix.lower() == ".gz"


def _utf8_trouble(error: UnicodeDecodeError) -> str:
    return f"byte {error.object[error.start]:#04x} is not UTF-8"


def _row_groups(path: Path, column: str, unit_bytes: int) -> Iterator[tuple[int, int, int]]:
    """(first group, the one after the last, bytes) of units.

    Raises:
        UsageError: it is not a Parquet file, or has no such column of text.
    """
    try:
        with _parquet().ParquetFile(path) as file:
            schema, metadata = file.schema_arrow, file.metadata
    except (ValueError, OSError) as error:
        raise UsageError(f"{path} is not a readable Parquet file: {error}") from error
    if column not in schema.names:
        raise UsageError(
            f"{path} does not have a column {column!r}; choose one of {', '.join(schema.names)} with --field"
        )
    kind = str(schema.field(column).type)
    if kind not in ("string", "large_string", "string_view"):
        raise UsageError(
            f"the column {column!r} of {path} contains {kind}, not text; choose another column with --field"
        )
    first = nbytes = 0
    for group in range(metadata.num_row_groups):
        nbytes += metadata.row_group(group).total_byte_size
        if nbytes >= unit_bytes or group == metadata.num_row_groups - 1:
            yield first, group + 1, nbytes
            first, nbytes = group + 1, 0


def _parquet() -> Any:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise UsageError(
            f"Parquet files need another library: pip install 'holdfast-train[data]' ({error})"
        ) from error
    return parquet
