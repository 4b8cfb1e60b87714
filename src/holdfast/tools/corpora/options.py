"""The options of `holdfast data build` for its input and its output.

`holdfast --help` imports this module, so it must not need numpy or msgspec. It has no `from __future__ import annotations`
because the command line evaluates its annotations (see `protocol/options.py`).
"""

import dataclasses
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from holdfast.protocol.options import Argument, Option, OptionGroup


class InputKind(StrEnum):
    """The format of an input file."""

    TEXT = "text"
    JSONL = "jsonl"
    PARQUET = "parquet"


class Documents(StrEnum):
    """The unit of a text file that is one document."""

    FILE = "file"
    LINE = "line"


class TokenFormat(StrEnum):
    """The format of the result: Megatron's `.bin` and `.idx`, or `.npy`."""

    MEGATRON = "megatron"
    NPY = "npy"


@dataclass(frozen=True, kw_only=True)
class InputOptions:
    """How documents are found in files."""

    field: Annotated[
        str,
        Option(
            metavar="NAME", help="Field of a JSON line, or column of a Parquet file, that contains the text."
        ),
    ] = "text"
    documents: Annotated[Documents, Option(help="What counts as one document in a text file.")] = (
        Documents.FILE
    )
    kind: Annotated[
        InputKind | None,
        Option(
            names=("--input-format",),
            default="determined by the files' names",
            help="Format of all inputs.",
        ),
    ] = None
    skip_bad: Annotated[bool, Option(help="Skip and count lines and rows that cannot be read.")] = False


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """What `holdfast data build` is to build."""

    inputs: Annotated[
        tuple[str, ...],
        Argument(
            metavar="INPUT",
            help="Files or folders of files: text, .jsonl or .parquet; text and .jsonl also compressed as .gz.",
        ),
    ]
    prefix: Annotated[
        Path, Option(names=("--out",), metavar="PREFIX", help="Name of the new files, without a suffix.")
    ]
    reading: Annotated[InputOptions, OptionGroup("Input")] = dataclasses.field(default_factory=InputOptions)
    tokenizer: Annotated[
        str,
        Option(
            group="Tokens",
            metavar="FILE|bytes",
            help="A tokenizer.json of Hugging Face's tokenizers, or bytes for one token per byte.",
        ),
    ] = "bytes"
    eod: Annotated[
        str | None,
        Option(
            group="Tokens",
            metavar="TOKEN",
            help="Token that ends every document, for example '<|endoftext|>'.",
        ),
    ] = None
    eod_id: Annotated[
        int | None, Option(group="Tokens", metavar="ID", help="Number of the token that ends every document.")
    ] = None
    dtype: Annotated[
        str | None,
        Option(
            group="Tokens",
            default="the smallest that can hold every token",
            help="Type of the tokens, for example uint16.",
        ),
    ] = None
    format: Annotated[
        TokenFormat,
        Option(
            help="Format of the output. megatron writes PREFIX.bin and PREFIX.idx; npy writes PREFIX.npy."
        ),
    ] = TokenFormat.MEGATRON
    overwrite: Annotated[
        bool, Option(help="Replace existing data of the same name that was built differently.")
    ] = False
    unit_bytes: int | None = None
    """Input bytes of one unit of work, for tests. None: 4 MiB, up to 32 MiB where that would be more than 4,096 units."""
