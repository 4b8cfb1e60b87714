"""Training samples cut from files of token numbers.

The files are mapped, not read: opening costs the same for a megabyte and for a terabyte, and all workers of a
node share their pages in the page cache.
"""

import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor
from torch.utils.data import Dataset

from holdfast.data.files import TOKEN_DTYPES, TokenFile
from holdfast.data.packing import Packed, Padded

__all__ = ["TOKEN_DTYPES", "TokenDataset"]

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
Documents = Literal["packed", "padded"]


class TokenDataset(Dataset[tuple[Tensor, Tensor]]):
    """A map-style dataset of `seq_len`-token samples for next-token prediction.

    **Packed** documents: sample i of a file is `file[i * seq_len : (i + 1) * seq_len + 1]`; its first `seq_len`
    tokens are the input, its last `seq_len` the labels. Neighbouring samples share one token, so every token but
    the first is a label exactly once. Tokens after the last whole sample are left out. Each of several files is cut separately.

    **Padded** documents (of Megatron's files, which say where documents begin): no sample holds tokens of two. A
    document longer than `seq_len` is several samples, the last of each is padded, and the labels of padding are
    -100, which `cross_entropy` ignores: weigh a step by `(labels != -100).sum()`. Every token but a document's
    first is a label exactly once; a document of one token is no sample.

    Files must not change while they are in use. Pickling a dataset (as data-loader workers do) carries paths, not
    tokens.

    Args:
        path: a file, a prefix of `.bin` and `.idx`, or a list of these: one data set, file after file. Known are
            Megatron's `.bin` and `.idx`, `.npy` with a 1-D array, and any other file as raw integers.
        seq_len: tokens per sample, at least 1.
        dtype: the dtype of raw files, one of TOKEN_DTYPES. Other files have their own, which must be equal.
        documents: "packed" or "padded".
        pad_token: the input token of padding.

    Attributes:
        files: the files, in the given order.
        seq_len: tokens per sample.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a file is not one of the formats, is empty, cut short or corrupt; there is not one whole sample;
            or an argument is not usable. Object arrays are refused: reading one would run pickle.
    """

    deterministic = True

    def __init__(
        self,
        path: Paths,
        seq_len: int,
        dtype: npt.DTypeLike | None = None,
        *,
        documents: Documents = "packed",
        pad_token: int = 0,
    ) -> None:
        if seq_len < 1:
            raise ValueError(f"seq_len must be at least 1 token (got {seq_len})")
        if documents not in ("packed", "padded"):
            raise ValueError(f"documents must be 'packed' or 'padded' (got {documents!r})")
        paths = [path] if isinstance(path, str | os.PathLike) else list(path)
        if not paths:
            raise ValueError("the list of token files is empty; pass at least one")
        self.seq_len = seq_len
        self._asked = paths, dtype, documents, pad_token
        self.files = tuple(TokenFile(one, dtype) for one in paths)
        self._cuts = [self._cut(file) for file in self.files]
        # Sample numbers run through the files in the given order. The order of the list is therefore part of
        # the data set's identity, and of its fingerprint.
        self._firsts = np.cumsum([0, *(cut.samples for cut in self._cuts)])
        if not len(self):
            raise ValueError(self._too_short())

    @property
    def path(self) -> Path:
        """The first file."""
        return self.files[0].path

    @property
    def tokens(self) -> npt.NDArray[Any]:
        """The tokens of the only file, read-only, shape [tokens in the file], in the file's own dtype.

        Raises:
            ValueError: there are several.
        """
        if len(self.files) > 1:
            raise ValueError(
                f"{self!r} has {len(self.files)} files; use the tokens of one of them: data.files[0].tokens"
            )
        return self.files[0].tokens

    def __len__(self) -> int:
        """Samples in all files."""
        return int(self._firsts[-1])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """One sample: (tokens, labels), each int64 of shape [seq_len].

        Raises:
            IndexError: `index` is not in [0, len(self)).
        """
        tokens, labels = self.batch([index])
        return tokens[0], labels[0]

    def batch(self, ids: npt.ArrayLike) -> tuple[Tensor, Tensor]:
        """Many samples in one gather.

        Args:
            ids: sample numbers in [0, len(self)), shape [B], in any order.

        Returns:
            (tokens, labels), each a contiguous int64 CPU tensor of shape [B, seq_len].

        Raises:
            IndexError: a number is out of range.
            ValueError: `ids` is not a 1-D array of integers.
        """
        # Checked once for all files. numpy would accept a negative number and return a sample from the end,
        # which no permutation asks for, so it is a mistake of the caller.
        numbers = self._checked(ids)
        if len(self._cuts) == 1:
            tokens, labels = self._cuts[0].take(numbers)
            return torch.from_numpy(tokens), torch.from_numpy(labels)
        shape = len(numbers), self.seq_len
        tokens, labels = np.empty(shape, np.int64), np.empty(shape, np.int64)
        # Samples are gathered file by file, one vectorized read each. A loop over samples would cost more
        # than the reads.
        of = np.searchsorted(self._firsts, numbers, side="right") - 1
        for number in np.unique(of):
            rows = np.flatnonzero(of == number)
            tokens[rows], labels[rows] = self._cuts[number].take(numbers[rows] - self._firsts[number])
        return torch.from_numpy(tokens), torch.from_numpy(labels)

    def read_ahead(self, ids: npt.NDArray[np.int64]) -> None:
        """Advises the kernel that these samples will be read soon. Padded documents are not read ahead."""
        of = np.searchsorted(self._firsts, ids, side="right") - 1
        for number, cut in enumerate(self._cuts):
            if isinstance(cut, Packed):
                cut.read_ahead(ids[of == number] - self._firsts[number])

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that identify the data set: resuming checks that the data is still the same.

        XXH3-64 over `seq_len`, how documents are cut, and the probes of every file (see `TokenFile.probes`): cheap
        at any size, independent of the files' paths and formats.
        """
        _, _, documents, pad_token = self._asked
        padded = documents == "padded"
        # Everything that decides what sample i is: how samples are cut, then the content of every file. Paths
        # are left out, because data may be moved between two starts.
        digest = xxhash.xxh3_64(f"{self.seq_len} {documents} {pad_token if padded else 0};".encode())
        for file in self.files:
            digest.update((file.probes + (file.edge_probes if padded else "")).encode())
        return digest.hexdigest()

    def identity(self) -> dict[str, Any]:
        """The fingerprint and the values that it is made of, as plain values to be saved: see `check_fingerprint`."""
        _, _, documents, pad_token = self._asked
        return {
            "fingerprint": self.fingerprint,
            "seq_len": self.seq_len,
            "documents": documents,
            "pad_token": pad_token if documents == "padded" else None,
            "files": [file.identity() for file in self.files],
        }

    def __repr__(self) -> str:
        first = self.files[0]
        more = f" and {len(self.files) - 1} more" if len(self.files) > 1 else ""
        padded = ", documents='padded'" if self._asked[2] == "padded" else ""
        return (
            f"TokenDataset({str(first.path)!r}{more}, seq_len={self.seq_len}, "
            f"dtype={first.tokens.dtype.name!r}{padded})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickled as the arguments of its constructor: a pickled mapping would copy the file into each worker
        # of a data loader, a terabyte at a time.
        return _open, (self._asked, self.seq_len)

    def _cut(self, file: TokenFile) -> Packed | Padded:
        _, _, documents, pad_token = self._asked
        if documents == "packed":
            return Packed(file, self.seq_len)
        if file.index is None:
            raise ValueError(
                f"{file.path} does not contain the beginnings of documents, so documents cannot be padded; `holdfast "
                "data build` writes a .bin with an .idx, which contains them"
            )
        return Padded(file, file.index, self.seq_len, pad_token)

    def _too_short(self) -> str:
        if self._asked[2] == "padded":
            return f"no document in {self.path} has the 2 tokens that a sample needs"
        most = max(self.files, key=lambda file: len(file.tokens))
        return (
            f"{most.path} holds {len(most.tokens)} tokens, but one sample of seq_len {self.seq_len} needs "
            f"{self.seq_len + 1}; choose a smaller seq_len or a longer file"
        )

    def _checked(self, ids: npt.ArrayLike) -> npt.NDArray[np.int64]:
        numbers = np.asarray(ids)
        if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
            raise ValueError(
                f"sample numbers must be a 1-D array of integers (got shape {numbers.shape} and dtype {numbers.dtype})"
            )
        if numbers.size and not (numbers.min() >= 0 and numbers.max() < len(self)):
            raise IndexError(
                f"sample numbers span {numbers.min()} to {numbers.max()}, but {self.path} has {len(self)} samples, "
                "numbered from 0"
            )
        return numbers.astype(np.int64)


def _open(asked: tuple[Paths, npt.DTypeLike | None, Documents, int], seq_len: int) -> TokenDataset:
    paths, dtype, documents, pad_token = asked
    return TokenDataset(paths, seq_len, dtype, documents=documents, pad_token=pad_token)
