"""From text to token numbers: bytes as they are, or a Hugging Face `tokenizers` file."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from holdfast.errors import UsageError

BYTES = "bytes"


class Encoder(Protocol):
    """Encodes documents as token numbers."""

    name: str
    """Its name in a data set's description."""
    key: str
    """Identifies its content, whatever its file is called."""
    largest: int
    """The largest token number that it can give."""
    needs_utf8: bool
    """Whether documents must be valid UTF-8."""

    def encode(self, documents: list[bytes]) -> list[npt.NDArray[Any]]:
        """The tokens of each document."""

    def number_of(self, word: str) -> int | None:
        """The number of the token with this text, if there is one."""


class ByteEncoder:
    """One token for every byte."""

    name = key = BYTES
    largest = 255
    needs_utf8 = False

    def encode(self, documents: list[bytes]) -> list[npt.NDArray[Any]]:
        """The tokens of each document."""
        return [np.frombuffer(document, np.uint8) for document in documents]

    def number_of(self, word: str) -> int | None:
        """Bytes have no special tokens."""
        return None


class HuggingFaceEncoder:
    """A `tokenizer.json`. It adds nothing to a document and cuts nothing off, whatever the file is set to.

    Raises:
        UsageError: it cannot be read, or the library is not installed.
    """

    needs_utf8 = True

    def __init__(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise UsageError(
                f"--tokenizer {path} needs a library: pip install 'holdfast-train[data]' ({error})"
            ) from error
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the build already has one process per processor
        try:
            content = path.read_bytes()
            self._tokenizer = Tokenizer.from_buffer(content)
        except OSError as error:
            raise UsageError(
                f"--tokenizer {path} cannot be read ({error.strerror}); specify a tokenizer.json, or bytes"
            ) from error
        except Exception as error:  # the library raises no more specific type
            raise UsageError(
                f"--tokenizer {path} is not a file of the tokenizers library ({error}); specify a tokenizer.json, or "
                "bytes"
            ) from error
        # A tokenizer.json carries the settings of the model that it was trained for. Truncation would
        # silently drop the end of every long document.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.name = str(path)
        self.key = xxhash.xxh3_128_hexdigest(content)
        # Over the added tokens too: they often lie above the vocabulary, and decide whether uint16 suffices.
        self.largest = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=0)

    def encode(self, documents: list[bytes]) -> list[npt.NDArray[Any]]:
        """The tokens of each document."""
        # Cannot fail here: `needs_utf8` made the reader check every document, where file and line are still
        # known.
        texts = [document.decode() for document in documents]
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(one.ids, np.int64) for one in encoded]

    def number_of(self, word: str) -> int | None:
        """The number of the token with this text, if there is one."""
        number: int | None = self._tokenizer.token_to_id(word)
        return number


@lru_cache(maxsize=1)
def load_encoder(tokenizer: str) -> Encoder:
    """The encoder that `--tokenizer` names; loaded once in a process.

    Raises:
        UsageError: there is no such tokenizer.
    """
    return ByteEncoder() if tokenizer == BYTES else HuggingFaceEncoder(Path(tokenizer))
