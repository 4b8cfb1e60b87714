"""Weights in: a folder of safetensors into a sharded model, every worker its own slices.

A file is mapped, and what a worker does not need is not read: a model of any size never lies whole in one worker.
"""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from holdfast.tensors.dtensor_shards import piece_of

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
RECOMPUTED = "rotary_emb.inv_freq"
"""Older folders have it; it follows from the config."""
SHOWN = 10


class Weights:
    """A folder's tensors by name. A context manager: its files are open until the end."""

    def __init__(self, folder: Path) -> None:
        """Raises ValueError for a folder without safetensors, or without a file that its index names."""
        self.folder = folder
        self._stack = ExitStack()
        with self._stack:  # closes what was opened if one fails
            files = self._files()
            lacking = [file for file in files if not (folder / file).is_file()]
            if lacking:
                raise ValueError(f"{folder / INDEX} names {', '.join(lacking)}, not there: copy all files")
            self._file_of: dict[str, Any] = {}
            for file in files:
                opened = self._stack.enter_context(safe_open(folder / file, framework="pt"))
                self._file_of |= {n: opened for n in set(opened.keys()) if not n.endswith(RECOMPUTED)}
            self._stack = self._stack.pop_all()

    def __enter__(self) -> "Weights":
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _files(self) -> list[str]:
        """Their names. A folder may hold others too, such as the same weights under other names."""
        if (self.folder / INDEX).is_file():
            return sorted(set(json.loads((self.folder / INDEX).read_text())["weight_map"].values()))
        if (self.folder / FILE).is_file():
            return [FILE]
        raise ValueError(f"{self.folder} has neither {INDEX} nor {FILE}: give a folder with safetensors")

    def check(self, model: torch.nn.Module) -> None:
        """Raises ValueError with everything in which the folder and a model (also one on the meta device) differ."""
        wanted = _tensors(model)
        tied = {name for names in wanted.values() for name in names[1:]}
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name, file in self._file_of.items()}
        needed = {names[0]: tuple(tensor.shape) for tensor, names in wanted.items()}
        wrong = [f"missing: {n} {list(needed[n])}" for n in sorted(needed.keys() - shapes.keys())]
        wrong += [f"unexpected: {n} {list(shapes[n])}" for n in sorted(shapes.keys() - needed.keys() - tied)]
        wrong += [
            f"{n} is {list(shapes[n])}, the model's is {list(needed[n])}"
            for n in sorted(needed.keys() & shapes.keys())
            if needed[n] != shapes[n]
        ]
        if wrong:
            more = [f"and {len(wrong) - SHOWN} more"] if len(wrong) > SHOWN else []
            raise ValueError(
                "\n  ".join([f"{self.folder} does not fit its config.json:", *wrong[:SHOWN], *more])
            )

    @torch.no_grad()
    def load(self, model: torch.nn.Module) -> None:
        """Fills what is here of every parameter, whatever the dtype in the files. Call `check` before."""
        for tensor, (name, *_) in _tensors(model).items():
            piece = piece_of(name, tensor)
            box = tuple(
                slice(low, low + length) for low, length in zip(piece.start, piece.local.shape, strict=False)
            )
            if piece.local.numel():
                stored = self._file_of[name].get_slice(name)
                piece.local.copy_(stored[box] if box else stored[:])


def _tensors(model: torch.nn.Module) -> Mapping[torch.Tensor, list[str]]:
    """What a checkpoint holds, with the names under which the model has it: several where it is tied."""
    found: dict[Any, list[str]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        found.setdefault(tensor, []).append(name)
    return found
