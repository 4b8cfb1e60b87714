"""Safetensors files, in the layout in which Hugging Face's libraries find them.

    model.safetensors                        one file, or
    model-00001-of-00003.safetensors ...     several, and
    model.safetensors.index.json             which of them has which tensor

The library's own writer takes all tensors of a file at once. A file is written here from one tensor after the other:
8 bytes that give the header's length, the header (JSON), and the tensors' bytes. Files are read by the library.
https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from holdfast.errors import UsageError
from holdfast.protocol.wire.decoding import decode
from holdfast.tensors.tree import buffer_of
from holdfast.tools.conversion.consolidate import MergedTensor

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
INDEX = f"model{INDEX_SUFFIX}"

DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    **({torch.float8_e8m0fnu: "F8_E8M0"} if hasattr(torch, "float8_e8m0fnu") else {}),  # since torch 2.7
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
}
"""In the library's order, by which it sorts the tensors of a file, the last dtype first, so that all of them are
aligned."""

_ORDER = {dtype: number for number, dtype in enumerate(DTYPES)}
_METADATA = "__metadata__"
WRITE_BYTES = 8 << 20
MOST_NAMED = 3


class _WeightMap(msgspec.Struct):
    """The part of an index that is read."""

    weight_map: dict[str, str]


_weight_maps = msgspec.json.Decoder(_WeightMap)


def check_names(tensors: Iterable[MergedTensor]) -> None:
    """Raises UsageError for a tensor that the format cannot hold."""
    for tensor in tensors:
        if tensor.dtype not in DTYPES:
            raise UsageError(
                f"{tensor.name}: safetensors does not support {str(tensor.dtype)[6:]}; export with --format torch, "
                "or exclude it with --only"
            )
        if tensor.name == _METADATA:
            raise UsageError(
                f"a tensor cannot be named {_METADATA} in safetensors; export with --format torch"
            )


def plan_files(tensors: Iterable[MergedTensor], most_bytes: int) -> dict[str, list[MergedTensor]]:
    """Which file gets which tensors: in their order, up to `most_bytes` of tensors in each; a larger tensor gets a
    file of its own. A checkpoint without tensors is one file without."""
    groups: list[list[MergedTensor]] = [[]]
    room = most_bytes
    for tensor in tensors:
        if groups[-1] and tensor.nbytes > room:
            groups.append([])
            room = most_bytes
        groups[-1].append(tensor)
        room -= tensor.nbytes
    if len(groups) == 1:
        return {f"model{SUFFIX}": groups[0]}
    return {f"model-{n:05}-of-{len(groups):05}{SUFFIX}": group for n, group in enumerate(groups, 1)}


def index_of(files: dict[str, list[MergedTensor]]) -> str:
    """The index of several files, as JSON."""
    weight_map = {t.name: name for name, group in files.items() for t in group}
    total = sum(t.nbytes for group in files.values() for t in group)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n"


def in_file_order(tensors: Iterable[MergedTensor]) -> list[MergedTensor]:
    """The tensors in their order within a file."""
    # The widest first. So every tensor begins at a multiple of its own width, and a reader can map the file
    # instead of copying it.
    return sorted(tensors, key=lambda t: (-_ORDER[t.dtype], t.name))


def header_of(ordered: Sequence[MergedTensor]) -> bytes:
    """The part of a file before the tensors' bytes."""
    entries: dict[str, Any] = {_METADATA: {"format": "pt"}}  # without it transformers refuses a file
    at = 0
    for tensor in ordered:
        offsets = [at, at + tensor.nbytes]
        entries[tensor.name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": offsets,
        }
        at = offsets[1]
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    # The format requires the tensors' bytes to be aligned to 8, and allows padding the header with spaces.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_file(
    path: Path, ordered: Sequence[MergedTensor], tensors: Iterable[torch.Tensor], seen: Callable[[int], None]
) -> None:
    """Writes a file from tensors that come one after the other.

    Raises:
        OSError: the disk cannot take it.
        UsageError: the library cannot read what was written.
    """
    with path.open("wb") as file:
        file.write(header_of(ordered))
        for tensor in tensors:
            data = buffer_of(tensor)
            for low in range(0, len(data), WRITE_BYTES):
                seen(file.write(data[low : low + WRITE_BYTES]))
    # Read back with the library that others will use. The header is written by our own code, and a mistake in
    # it should fail here and not for another user.
    Opened(path).check()


class Opened:
    """An existing file, opened. Its tensors are mapped from it: they take no memory of their own until they are changed.

    Raises (on opening):
        UsageError: it is not a complete safetensors file.
    """

    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self.path = path
        try:
            self._file: Any = safe_open(path, framework="pt")
        except (SafetensorError, OSError, ValueError) as error:
            raise UsageError(
                f"{path} is not a complete safetensors file: it may be cut short; copy it again ({error})"
            ) from error

    def names(self) -> list[str]:
        """Names of its tensors."""
        return list(self._file.keys())

    def check(self) -> None:
        """Raises UsageError for a tensor that this version of torch cannot hold."""
        for name in self.names():
            dtype = self._file.get_slice(name).get_dtype()
            if dtype not in DTYPES.values():
                raise UsageError(
                    f"{self.path}: {name}: this version of torch does not have the dtype {dtype}; convert the tensor "
                    f"to one of {', '.join(DTYPES.values())}"
                )

    def tensors(self) -> dict[str, torch.Tensor]:
        """All of them, by name."""
        self.check()
        return {name: self._file.get_tensor(name) for name in self.names()}


def read_files(source: Path) -> dict[str, torch.Tensor]:
    """All tensors of a file, or of a folder with or without an index.

    Raises:
        UsageError: none are there, one is not complete, or the index does not fit the files.
    """
    folder = source if source.is_dir() else source.parent
    if source.name.endswith(INDEX_SUFFIX):
        return _by_index(source)
    indices = sorted(folder.glob(f"*{INDEX_SUFFIX}"))
    if not source.is_dir():
        for index in indices:
            others = set(_weight_map(index).values())
            if source.name in others and len(others) > 1:
                raise UsageError(f"{source} is one of {len(others)} files: pass {index}, or the folder")
        return Opened(source).tensors()
    if len(indices) > 1:
        raise UsageError(
            f"{source} contains several models: pass one of {', '.join(i.name for i in indices)}"
        )
    if indices:
        return _by_index(indices[0])
    tensors: dict[str, torch.Tensor] = {}
    files = sorted(folder.glob(f"*{SUFFIX}"))
    if not files:
        raise UsageError(
            f"{source} does not contain a {SUFFIX} file: pass the folder that contains them, or a file written by "
            "torch.save"
        )
    for path in files:
        part = Opened(path).tensors()
        twice = next(iter(part.keys() & tensors.keys()), None)
        if twice is not None:
            raise UsageError(
                f"{source}: {twice} is in two files, and there is no index that says which of them to use: pass one "
                "file"
            )
        tensors |= part
    return tensors


def _by_index(index: Path) -> dict[str, torch.Tensor]:
    by_file: dict[str, set[str]] = {}
    for name, file in _weight_map(index).items():
        by_file.setdefault(file, set()).add(name)
    tensors: dict[str, torch.Tensor] = {}
    for file, names in sorted(by_file.items()):
        if not (index.parent / file).is_file():
            raise UsageError(f"{index} names {file}, which does not exist: copy all of its files")
        part = Opened(index.parent / file).tensors()
        # In both directions. A tensor too many is as wrong as one too few: the index then belongs to other
        # files, and the rest may be of another model as well.
        different = sorted(part.keys() ^ names)
        if different:
            named = ", ".join(different[:MOST_NAMED])
            raise UsageError(
                f"{index} does not match {file}: only one of them contains {named}; copy all files again"
            )
        tensors |= part
    return tensors


def _weight_map(index: Path) -> dict[str, str]:
    what = f"{index} is not an index of safetensors files"
    try:
        data = index.read_bytes()
    except OSError as error:
        raise UsageError(f"{what}: {error}") from error
    weight_map: dict[str, str] = decode(_weight_maps.decode, data, what, error=UsageError).weight_map
    # Only names of files, no paths: the index may come from anybody, and could otherwise have any file of
    # this machine read.
    if not all(Path(f).name == f for f in weight_map.values()):
        raise UsageError(f"{index} names files outside its own folder: correct its weight_map")
    return weight_map
