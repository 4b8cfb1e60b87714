"""Weights in: a folder of safetensors into a sharded model, every worker its own slices.

A file is mapped, and what a worker does not need is not read: a model of any size never lies whole in one worker.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from holdfast.tensors.dtensor_shards import piece_of
from recipe.errors import Refused

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
RECOMPUTED = "rotary_emb.inv_freq"
"""Older folders have it; it follows from the config."""
SHOWN = 10
ADAPTER = re.compile(r"\.lora_[AB]\.")
EXPERTS = re.compile(r"(?P<at>.*\.experts)\.(?P<what>gate_up_proj|down_proj)$")
BOTH = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""What a tensor of all experts is made of. Most folders have each expert's matrices by themselves."""


@dataclass(frozen=True)
class Part:
    """A tensor of a folder, and where in a parameter of the model it belongs.

    Attributes:
        start: its first element there.
        lone: it has one dimension less: it is that of one expert.
    """

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    lone: bool = False


class Weights:
    """A folder's tensors by name. A context manager: its files are open until the end."""

    def __init__(self, folder: Path) -> None:
        """Raises Refused for a folder without safetensors, or without a file that its index names."""
        self.folder = folder
        self._stack = ExitStack()
        with self._stack:  # closes what was opened if one fails
            files = self._files()
            lacking = [file for file in files if not (folder / file).is_file()]
            if lacking:
                raise Refused(f"{folder / INDEX} names {', '.join(lacking)}, not there: copy all files")
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
        raise Refused(f"{self.folder} has neither {INDEX} nor {FILE}: give a folder with safetensors")

    def check(self, model: torch.nn.Module) -> None:
        """Raises Refused with everything in which the folder and a model (also one on the meta device) differ."""
        wanted = _tensors(model)
        tied = {name for names in wanted.values() for name in names[1:]}
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name, file in self._file_of.items()}
        needed = {
            part.name: part.shape
            for tensor, names in wanted.items()
            for part in self._parts(names[0], tuple(tensor.shape))
        }
        wrong = [f"missing: {n} {list(needed[n])}" for n in sorted(needed.keys() - shapes.keys())]
        wrong += [f"unexpected: {n} {list(shapes[n])}" for n in sorted(shapes.keys() - needed.keys() - tied)]
        wrong += [
            f"{n} is {list(shapes[n])}, the model's is {list(needed[n])}"
            for n in sorted(needed.keys() & shapes.keys())
            if needed[n] != shapes[n]
        ]
        if wrong:
            more = [f"and {len(wrong) - SHOWN} more"] if len(wrong) > SHOWN else []
            raise Refused(
                "\n  ".join([f"{self.folder} does not fit its config.json:", *wrong[:SHOWN], *more])
            )

    @torch.no_grad()
    def load(self, model: torch.nn.Module) -> None:
        """Fills what is here of every parameter, whatever the dtype in the files. Call `check` before."""
        for tensor, (name, *_) in _tensors(model).items():
            piece = piece_of(name, tensor)
            start = piece.start or (0,) * tensor.dim()
            if not piece.local.numel():
                continue
            for part in self._parts(name, tuple(tensor.shape)):
                self._copy(part, piece.local, start)

    def _parts(self, name: str, shape: tuple[int, ...]) -> Iterator[Part]:
        """What the folder has of a parameter: itself, or the matrices of each expert."""
        match = EXPERTS.match(name)
        if match is None or name in self._file_of or f"{match['at']}.0.down_proj.weight" not in self._file_of:
            yield Part(name, shape, (0,) * len(shape))
            return
        kinds = BOTH[match["what"]]
        rows = shape[1] // len(kinds)
        for expert in range(shape[0]):
            for at, kind in enumerate(kinds):
                stored = f"{match['at']}.{expert}.{kind}.weight"
                yield Part(stored, (rows, *shape[2:]), (expert, at * rows, 0), lone=True)

    def _copy(self, part: Part, into: torch.Tensor, start: tuple[int, ...]) -> None:
        """What a part and a piece have in common: the rest of the part is not read."""
        extent = (1, *part.shape) if part.lone else part.shape
        lows = [max(a, b) for a, b in zip(part.start, start, strict=True)]
        highs = [min(a + n, b + m) for a, n, b, m in zip(part.start, extent, start, into.shape, strict=True)]
        if any(low >= high for low, high in zip(lows, highs, strict=True)):
            return
        there = tuple(
            slice(low - at, high - at) for low, high, at in zip(lows, highs, part.start, strict=True)
        )
        here = tuple(slice(low - at, high - at) for low, high, at in zip(lows, highs, start, strict=True))
        there = there[1:] if part.lone else there
        stored = self._file_of[part.name].get_slice(part.name)
        found = stored[there] if there else stored[:]
        into[here].copy_(found[None] if part.lone else found)


def _tensors(model: torch.nn.Module) -> Mapping[torch.Tensor, list[str]]:
    """What a checkpoint holds, with the names that it has there: several where it is tied. Adapters are in none."""
    found: dict[Any, list[str]] = {}
    loose = {name for name, _ in model.named_buffers()} - model.state_dict().keys()
    for name, tensor in [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]:
        if name not in loose and not ADAPTER.search(name):
            found.setdefault(tensor, []).append(name.replace(".base_layer.", "."))
    return found
