"""What `holdfast data build` can be told about its input and its output."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What a file holds."""

    TEXT = "text"
    JSONL = "jsonl"
    PARQUET = "parquet"


class Documents(StrEnum):
    """What a document is in a text file."""

    FILE = "file"
    LINE = "line"


class Format(StrEnum):
    """What is written: Megatron's `.bin` and `.idx`, or `.npy`."""

    MEGATRON = "megatron"
    NPY = "npy"


@dataclass(frozen=True)
class Reading:
    """How documents are found in files.

    Attributes:
        field: of a JSON object, or the column.
        documents: what a document is in a text file.
        kind: what all files hold; None goes by their names.
        skip_bad: pass over lines that cannot be read, and count them.
    """

    field: str = "text"
    documents: Documents = Documents.FILE
    kind: Kind | None = None
    skip_bad: bool = False
