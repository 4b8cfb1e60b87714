"""Token files of every known format, mapped.

Three formats that other tools already write are understood, and none is invented: Megatron's pair of `.bin` and
`.idx`, a 1-D `.npy`, and raw integers without a header (nanoGPT's `.bin`).
"""

from __future__ import annotations

import mmap
import os
import tokenize
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from holdfast.data.cache import local_tokens
from holdfast.data.megatron import MegatronIndex
from holdfast.protocol.wire.decoding import decode

TOKEN_DTYPES = ("uint8", "uint16", "uint32", "int8", "int16", "int32", "int64")

Mapped: TypeAlias = "np.memmap[Any, np.dtype[Any]]"

_NPY_MAGIC = b"\x93NUMPY"

_END_BYTES = 64 * 1024
_PROBES = 64
_PROBE_BYTES = 4 * 1024


class TokenFile:
    """One file of tokens, and its documents if the format marks where they begin.

    Args:
        path: a file, or the name without `.bin` and `.idx` or `.npy`. A `.bin` with an `.idx` beside it is Megatron's.
            A URL (`s3://`, `https://`, ...) is fetched into the node's cache, see `holdfast.data.local`.
        dtype: the dtype of a raw file; other files have their own, which must be equal.
        in_order: the file will be read from beginning to end. Otherwise the kernel is advised not to read ahead: samples
            come in random order, and it would read megabytes for each of them.

    Attributes:
        path: the file that holds the tokens.
        tokens: all of them, read-only, shape [tokens], in the file's own dtype.
        index: of a Megatron pair.

    Raises:
        FileNotFoundError: there is no such file, or only one of a pair.
        ValueError: the file is of none of the formats, is empty, cut short or corrupt. Object arrays are refused:
            reading one would run pickle.
    """

    def __init__(
        self, path: str | os.PathLike[str], dtype: npt.DTypeLike | None = None, in_order: bool = False
    ) -> None:
        asked = local_tokens(path)
        wanted = None if dtype is None else token_dtype(asked, dtype)
        self.path, index = _find(asked)
        _check_there(self.path)
        self.index = None if index is None else MegatronIndex(index, self.path.stat().st_size)
        if self.index is not None:
            mapped = _map_indexed(self.path, self.index, wanted)
        elif _is_npy(self.path):
            mapped = _map_npy(self.path, wanted)
        else:
            mapped = _map_raw(self.path, wanted)
        advice = mmap.MADV_SEQUENTIAL if in_order else mmap.MADV_RANDOM
        self._map: mmap.mmap = mapped._mmap  # type: ignore[attr-defined]
        # Samples come in random order. With the kernel's default read-ahead each one would read megabytes
        # that nobody asked for, on every node at once.
        self._map.madvise(advice)
        self.tokens: npt.NDArray[Any] = np.asarray(mapped)

    def read_ahead(self, low: int, high: int) -> None:
        """Tells the kernel that the tokens [low, high) will be read soon, so that reading them does not wait for the
        disk."""
        begin = self._offset_bytes + low * self.tokens.itemsize
        end = self._offset_bytes + high * self.tokens.itemsize
        begin -= begin % mmap.PAGESIZE
        self._map.madvise(mmap.MADV_WILLNEED, begin, end - begin)

    @cached_property
    def _offset_bytes(self) -> int:
        """The offset of the tokens in the mapping."""
        whole: Any = np.frombuffer(self._map, np.uint8)
        return int(self.tokens.ctypes.data - whole.ctypes.data)

    @cached_property
    def probes(self) -> str:
        """16 hex digits: XXH3-64 over the token count, the dtype, and at most 384 KiB of the tokens.

        These are the first and last 64 KiB and 64 probes of 4 KiB at even distances. So it is cheap at any size, and
        independent
        of path and format, but does not detect an edit in place between the probes.
        """
        return _digest(f"{len(self.tokens)} {self.tokens.dtype.str};", self.tokens)

    @cached_property
    def edge_probes(self) -> str:
        """The same for the positions of documents."""
        if self.index is None:
            return ""
        return _digest(f"{self.index.documents};", *self.index.parts)

    def identity(self) -> dict[str, Any]:
        """Plain values that identify this file, for `check_fingerprint`."""
        return {
            "path": str(self.path),
            "bytes": self.path.stat().st_size,
            "dtype": self.tokens.dtype.name,
            "tokens": len(self.tokens),
            "documents": None if self.index is None else self.index.documents,
            "probes": self.probes,
            "edges": self.edge_probes,
        }


def token_dtype(path: Path, dtype: npt.DTypeLike) -> np.dtype[Any]:
    """The dtype, if tokens can have it.

    Raises:
        ValueError: they cannot.
    """
    try:
        known = np.dtype(dtype)
    except TypeError:
        known = None
    if known is None or known.name not in TOKEN_DTYPES:
        raise ValueError(f"{path}: tokens cannot be of dtype {dtype}; use one of {', '.join(TOKEN_DTYPES)}")
    return known


def _find(path: Path) -> tuple[Path, Path | None]:
    """The file with the tokens and, for a pair, its index."""
    if path.suffix == ".idx" and path.exists():
        return path.with_suffix(".bin"), path
    if path.exists():
        beside = path.with_suffix(".idx")
        return path, beside if path.suffix == ".bin" and beside.exists() else None
    tokens, index, npy = (path.with_name(path.name + suffix) for suffix in (".bin", ".idx", ".npy"))
    if index.exists():
        return tokens, index
    if npy.exists():
        return npy, None
    if tokens.exists():
        raise FileNotFoundError(
            f"{tokens} needs {index.name} in the same folder; copy that file, too, or pass {tokens.name} itself and "
            "its dtype"
        )
    return path, None


def _check_there(path: Path) -> None:
    if path.is_dir():
        raise ValueError(f"{path} is a folder; specify the token file itself")
    if not path.exists():
        where = "" if path.is_absolute() else f" in {Path.cwd()}"
        raise FileNotFoundError(
            f"token file {path} does not exist{where}; check the path, or write the file first: holdfast data build TEXT --out NAME"
        )
    if path.stat().st_size == 0:
        raise ValueError(f"token file {path} is empty; write it again")


def _is_npy(path: Path) -> bool:
    with path.open("rb") as file:
        return path.suffix == ".npy" or file.read(len(_NPY_MAGIC)) == _NPY_MAGIC


def _map_indexed(path: Path, index: MegatronIndex, dtype: np.dtype[Any] | None) -> Mapped:
    if dtype is not None and dtype.name != index.dtype.name:
        raise ValueError(
            f"{path} contains {index.dtype.name}, not {dtype}, according to {index.path.name}; remove dtype"
        )
    return np.memmap(path, dtype=index.dtype, mode="r")


def _map_npy(path: Path, dtype: np.dtype[Any] | None) -> Mapped:
    # Unlike np.load, this never falls back to zip or pickle, and it refuses object arrays.
    what = f"{path} is not a readable .npy file of integers; write it again"
    tokens: Mapped = decode(_as_memory, path, what, error=ValueError)
    if tokens.ndim != 1:
        raise ValueError(
            f"{path} contains an array of shape {tokens.shape}, but tokens must be 1-D; flatten it first"
        )
    token_dtype(path, tokens.dtype)
    if dtype is not None and dtype != tokens.dtype:
        raise ValueError(
            f"{path} contains {tokens.dtype}, not {dtype}; remove dtype, because a .npy file states its own"
        )
    return tokens


def _as_memory(path: Path) -> Mapped:
    try:
        return np.lib.format.open_memmap(path, mode="r")
    # The header is parsed as a Python expression, which fails in various ways; MemoryError: it is nested too
    # deeply.
    except (tokenize.TokenError, SyntaxError, MemoryError) as error:
        raise ValueError(str(error) or "its header cannot be read") from None


def _map_raw(path: Path, dtype: np.dtype[Any] | None) -> Mapped:
    if dtype is None:
        raise ValueError(
            f"{path} is a raw file; specify the type of its tokens with dtype=, one of {', '.join(TOKEN_DTYPES)}"
        )
    size_bytes = path.stat().st_size
    # The only check that a raw file allows. A wrong dtype with a fitting size cannot be seen here; the
    # vocabulary check of `verify` finds it.
    if size_bytes % dtype.itemsize:
        raise ValueError(
            f"{path} has {size_bytes} bytes, which is not a whole number of {dtype} tokens "
            f"of {dtype.itemsize} bytes; the file is cut short or the dtype is wrong"
        )
    return np.memmap(path, dtype=dtype, mode="r")


def _digest(head: str, *arrays: npt.NDArray[Any]) -> str:
    digest = xxhash.xxh3_64(head.encode())
    for array in arrays:
        content = array.view(np.uint8)
        # The first and the last 64 KiB are hashed completely: files that were cut short or appended to differ
        # there. The probes between them find an exchanged file of the same length.
        digest.update(content[:_END_BYTES].tobytes())
        digest.update(content[-_END_BYTES:].tobytes())
        for probe in range(_PROBES):
            start = probe * len(content) // _PROBES
            digest.update(content[start : start + _PROBE_BYTES].tobytes())
    return digest.hexdigest()
