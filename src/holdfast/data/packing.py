"""Cuts a file of tokens into samples: packed across documents, or one document after the other with padding."""

from __future__ import annotations

from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from holdfast.data.files import TokenFile
from holdfast.data.megatron import Ints, MegatronIndex

IGNORE_INDEX = -100
"""The label of padding; `torch.nn.functional.cross_entropy` leaves it out by default."""

_BLOCK = 64
_BLOCKS_AT_ONCE = 1 << 14

Pair: TypeAlias = tuple[Ints, Ints]


class Packed:
    """Sample i is `tokens[i * seq_len : (i + 1) * seq_len + 1]`, across the borders of documents."""

    def __init__(self, file: TokenFile, seq_len: int) -> None:
        self._file, self._tokens, self._seq_len = file, file.tokens, seq_len
        self.samples = max(0, len(file.tokens) - 1) // seq_len

    def take(self, ids: Ints) -> Pair:
        """(tokens, labels) of these samples, each of shape [B, seq_len]."""
        rows = self._rows[ids]
        # Files keep the narrow dtype of their tokens; torch's embeddings and losses want int64.
        return rows[:, :-1].astype(np.int64), rows[:, 1:].astype(np.int64)

    def read_ahead(self, ids: Ints) -> None:
        """Advises the kernel that these samples will be read soon."""
        for sample in ids.tolist():
            self._file.read_ahead(sample * self._seq_len, (sample + 1) * self._seq_len + 1)

    @cached_property
    def _rows(self) -> npt.NDArray[Any]:
        """The samples as overlapping rows of the map, shape [samples, seq_len + 1]; nothing is copied."""
        # A view with strides, not a copy: the rows overlap by the one token that is a label of one sample and
        # an input of the next.
        windows = np.lib.stride_tricks.sliding_window_view(self._tokens, self._seq_len + 1)
        return windows[:: self._seq_len]


class Padded:
    """A document of n tokens is ceil((n - 1) / seq_len) samples, the last one padded.

    The document of a sample is found in two steps: a search in the samples before every 64th document (8 bytes
    for 64 documents, counted once at opening), and a count over the 64, whose edges are read from the index. So
    the memory of ten million documents is 1.25 MB for each process, and the rest is shared in the page cache.
    """

    def __init__(self, file: TokenFile, index: MegatronIndex, seq_len: int, pad_token: int) -> None:
        self._tokens, self._index = file.tokens, index
        self._seq_len, self._pad_token = seq_len, pad_token
        self._before = self._count()
        self.samples = int(self._before[-1])

    def take(self, ids: Ints) -> Pair:
        """(tokens, labels) of these samples, each of shape [B, seq_len]."""
        shape = len(ids), self._seq_len
        tokens, labels = np.full(shape, self._pad_token, np.int64), np.full(shape, IGNORE_INDEX, np.int64)
        for row, (start, end) in enumerate(zip(*self._find(ids), strict=True)):
            tokens[row, : end - start - 1] = self._tokens[start : end - 1]
            labels[row, : end - start - 1] = self._tokens[start + 1 : end]
        return tokens, labels

    def _count(self) -> Ints:
        """Number of samples before each block of documents, and in total: shape [blocks + 1]."""
        blocks = -(-self._index.documents // _BLOCK)
        counts = np.zeros(blocks + 1, np.int64)
        for low in range(0, blocks, _BLOCKS_AT_ONCE):
            high = min(low + _BLOCKS_AT_ONCE, blocks)
            documents = np.arange(low * _BLOCK, min(high * _BLOCK, self._index.documents) + 1)
            lengths = np.diff(self._index.edges(documents))
            # A negative length would give negative counts, which the cumulative sum hides. Samples would be
            # found in the wrong documents without any error.
            if (lengths < 0).any():
                number = int(documents[np.argmax(lengths < 0)])
                raise ValueError(
                    f"{self._index.path} is corrupt: document {number} ends before it begins; copy or build it again"
                )
            at = np.arange(0, len(lengths), _BLOCK)
            counts[low + 1 : high + 1] = np.add.reduceat(self._samples_of(lengths), at)
        return np.cumsum(counts)

    def _find(self, ids: Ints) -> Pair:
        """The positions of the first and the last token of each sample; the last token is only a label."""
        # side="right" with -1 finds the last block that begins at or before the sample, and passes over
        # blocks without any sample.
        blocks = np.searchsorted(self._before, ids, side="right") - 1
        documents = np.minimum(blocks[:, None] * _BLOCK + np.arange(_BLOCK + 1), self._index.documents)
        edges = self._index.edges(documents)
        # Samples of the block up to each document.
        until = np.cumsum(self._samples_of(np.diff(edges)), axis=1)
        within = ids - self._before[blocks]
        column = (until <= within[:, None]).sum(axis=1)
        row = np.arange(len(ids))
        before = np.where(column > 0, until[row, column - 1], 0)
        start = edges[row, column] + (within - before) * self._seq_len
        return start, np.minimum(start + self._seq_len + 1, edges[row, column + 1])

    def _samples_of(self, lengths: Ints) -> Ints:
        samples: Ints = np.maximum(lengths + self._seq_len - 2, 0) // self._seq_len
        return samples
