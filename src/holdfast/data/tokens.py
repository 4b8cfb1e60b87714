"""Training samples cut from one flat file of token numbers.

The file is mapped, not read: opening costs the same for a megabyte and for a terabyte, and all workers of a
node share its pages in the page cache. Two formats that other tools already write are understood, and none
is invented: a 1-D `.npy`, and raw integers without a header (Megatron's and nanoGPT's `.bin`).
"""

import os
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor
from torch.utils.data import Dataset

TOKEN_DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")

_NPY_MAGIC = b"\x93NUMPY"

_END_BYTES = 64 * 1024
_PROBES = 64
_PROBE_BYTES = 4 * 1024


class TokenDataset(Dataset[tuple[Tensor, Tensor]]):
    """A map-style dataset of `seq_len`-token samples for next-token prediction.

    Sample i is `file[i * seq_len : (i + 1) * seq_len + 1]`; its first `seq_len` tokens are the input, its
    last `seq_len` the labels. Neighbouring samples share one token, so every token but the first is a label
    exactly once. Tokens after the last whole sample are left out.

    The file must not change while it is in use. Pickling a dataset (as data-loader workers do) carries its
    path, not its tokens.

    Args:
        path: a `.npy` file with a 1-D array, or any other file as raw integers without a header.
        seq_len: tokens per sample, at least 1.
        dtype: what a raw file holds: "uint8", "uint16", "uint32", "int32" or "int64". A `.npy` file says this
            itself; a dtype given for one must agree.

    Attributes:
        path: the file.
        seq_len: tokens per sample.
        tokens: the whole file, read-only, shape [tokens in the file], in the file's own dtype.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not one of the two formats, is empty, or is shorter than one sample; or
            `seq_len` or `dtype` is not usable. Object arrays are refused: reading one would run pickle.
    """

    def __init__(
        self, path: str | os.PathLike[str], seq_len: int, dtype: npt.DTypeLike | None = None
    ) -> None:
        if seq_len < 1:
            raise ValueError(f"seq_len is {seq_len}; a sample needs at least 1 token")
        self.path = Path(path)
        self.seq_len = seq_len
        self.tokens = _map_tokens(self.path, None if dtype is None else _token_dtype(self.path, dtype))
        if len(self.tokens) < seq_len + 1:
            raise ValueError(
                f"{self.path} holds {len(self.tokens)} tokens, but one sample of seq_len {seq_len} needs "
                f"{seq_len + 1}; choose a smaller seq_len or a longer file"
            )

    def __len__(self) -> int:
        """Whole samples in the file."""
        return (len(self.tokens) - 1) // self.seq_len

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
        rows = self._rows[self._checked(ids)]
        tokens = rows[:, :-1].astype(np.int64)
        labels = rows[:, 1:].astype(np.int64)
        return torch.from_numpy(tokens), torch.from_numpy(labels)

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that tell one data set from another: resume checks that the data is still the same.

        XXH3-64 over the token count, the dtype, `seq_len`, and at most 384 KiB of the tokens: the first and
        last 64 KiB and 64 probes of 4 KiB at even distances. So it is cheap at any size, independent of
        the file's path and format, and blind to an edit in place that falls between the probes.
        """
        digest = xxhash.xxh3_64()
        digest.update(f"{len(self.tokens)} {self.tokens.dtype.str} {self.seq_len};".encode())
        content = self.tokens.view(np.uint8)
        digest.update(content[:_END_BYTES].tobytes())
        digest.update(content[-_END_BYTES:].tobytes())
        for probe in range(_PROBES):
            start = probe * len(content) // _PROBES
            digest.update(content[start : start + _PROBE_BYTES].tobytes())
        return digest.hexdigest()

    def __repr__(self) -> str:
        return f"TokenDataset({str(self.path)!r}, seq_len={self.seq_len}, dtype={self.tokens.dtype.name!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenDataset, (self.path, self.seq_len, self.tokens.dtype.str)

    @cached_property
    def _rows(self) -> npt.NDArray[Any]:
        """The samples as overlapping rows of the map, shape [samples, seq_len + 1]; nothing is copied."""
        windows = np.lib.stride_tricks.sliding_window_view(self.tokens, self.seq_len + 1)
        return windows[:: self.seq_len]

    def _checked(self, ids: npt.ArrayLike) -> npt.NDArray[Any]:
        numbers = np.asarray(ids)
        if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
            raise ValueError(
                f"sample numbers have shape {numbers.shape} and dtype {numbers.dtype}; "
                "give a 1-D array of integers"
            )
        if numbers.size and not (numbers.min() >= 0 and numbers.max() < len(self)):
            raise IndexError(
                f"sample numbers span {numbers.min()} to {numbers.max()}, but {self.path} holds {len(self)} "
                "samples, numbered from 0"
            )
        return numbers.astype(np.int64)


def _map_tokens(path: Path, dtype: np.dtype[Any] | None) -> npt.NDArray[Any]:
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give the token file itself")
    if not path.exists():
        raise FileNotFoundError(f"token file {path} does not exist; check the path, or write the file first")
    if path.stat().st_size == 0:
        raise ValueError(f"token file {path} is empty; write it again")
    with path.open("rb") as file:
        begins_as_npy = file.read(len(_NPY_MAGIC)) == _NPY_MAGIC
    if begins_as_npy or path.suffix == ".npy":
        return _map_npy(path, dtype)
    return _map_raw(path, dtype)


def _map_npy(path: Path, dtype: np.dtype[Any] | None) -> npt.NDArray[Any]:
    try:
        # Unlike np.load, this never falls back to zip or pickle, and it refuses object arrays.
        tokens = np.asarray(np.lib.format.open_memmap(path, mode="r"))
    except ValueError as error:
        raise ValueError(
            f"{path} is not a readable .npy file of integers ({error}); write it again"
        ) from error
    if tokens.ndim != 1:
        raise ValueError(
            f"{path} holds an array of shape {tokens.shape}; tokens must be 1-D, so flatten it first"
        )
    _token_dtype(path, tokens.dtype)
    if dtype is not None and dtype != tokens.dtype:
        raise ValueError(
            f"{path} holds {tokens.dtype}, not {dtype}; leave dtype out, a .npy file states its own"
        )
    return tokens


def _map_raw(path: Path, dtype: np.dtype[Any] | None) -> npt.NDArray[Any]:
    if dtype is None:
        raise ValueError(f"{path} is a raw file; say what it holds, dtype= one of {', '.join(TOKEN_DTYPES)}")
    size_bytes = path.stat().st_size
    if size_bytes % dtype.itemsize:
        raise ValueError(
            f"{path} has {size_bytes} bytes, which is not a whole number of {dtype} tokens "
            f"of {dtype.itemsize} bytes; the file is cut short or the dtype is wrong"
        )
    return np.asarray(np.memmap(path, dtype=dtype, mode="r"))


def _token_dtype(path: Path, dtype: npt.DTypeLike) -> np.dtype[Any]:
    try:
        known = np.dtype(dtype)
    except TypeError:
        known = None
    if known is None or known.name not in TOKEN_DTYPES:
        raise ValueError(f"{path}: tokens cannot be of dtype {dtype}; use one of {', '.join(TOKEN_DTYPES)}")
    return known
