"""Sums of plain numbers over all workers, within a step: as they travel over the control channel.

`math.fsum` rounds once, so all workers get the same bits. A list is sent as a few numbers whose sum is that of the list without
any rounding (`member_tree.without_rounding`). So a sum over lists does not depend on which worker had which number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from holdfast.errors import UsageError
from holdfast.train.member_tree import without_rounding

ControlMessage = tuple[float, float, float]
"""What two members that are connected directly say to each other in one message."""

Column = Sequence[float]
"""Numbers that are added up to one."""

MOST_NUMBERS = 1024
"""So few numbers fit into the buffers of every connection: nobody waits in `send` for one who waits in it as well."""


def mismatch(values: Iterable[str], step: int, first: int, second: int) -> UsageError:
    """The error of all workers when two ranks sum other things. values: the names of the one that raises it."""
    return UsageError(
        f"step {step}: step.sum({list(values)}) has different names or shapes on rank {first} and on rank "
        f"{second}; pass the same names and shapes on every worker"
    )


@dataclass(frozen=True)
class Addends:
    """What this worker adds."""

    numbers: dict[str, list[float]]
    """For each name its numbers, a tensor's in row-major order."""
    shapes: dict[str, torch.Size | None]
    """For each name the tensor's; None: it is one number."""

    @property
    def fingerprint(self) -> float:
        """The same on workers that sum the same names and shapes."""
        shapes = repr(
            [(name, None if shape is None else tuple(shape)) for name, shape in self.shapes.items()]
        )
        return float(xxhash.xxh32_intdigest(shapes.encode()))

    def messages(self) -> list[ControlMessage]:
        """Counts and numbers, name by name."""
        flat = [x for numbers in self.numbers.values() for x in (float(len(numbers)), *numbers)]
        # Filled up to whole messages. The counts in front tell numbers from filling, so the zeros are never
        # added.
        flat += [0.0] * (-len(flat) % 3)
        return [(a, b, c) for a, b, c in zip(flat[::3], flat[1::3], flat[2::3], strict=True)]

    def columns(self) -> list[Column]:
        """What is added up: for each name one column, or for a tensor one for each of its elements."""
        return self._columns({name: [numbers] for name, numbers in self.numbers.items()})

    def columns_of(self, reports: Iterable[Sequence[ControlMessage]]) -> list[Column]:
        """The columns of what every worker said, in the order of the ranks."""
        found: dict[str, list[list[float]]] = {name: [] for name in self.numbers}
        for messages in reports:
            flat = [x for message in messages for x in message]
            at = 0
            for name in self.numbers:
                count = int(flat[at])
                found[name].append(flat[at + 1 : at + 1 + count])
                at += 1 + count
        return self._columns(found)

    def _columns(self, found: Mapping[str, list[list[float]]]) -> list[Column]:
        columns: list[Column] = []
        for name, by_rank in found.items():
            if self.shapes[name] is None:
                columns.append([x for numbers in by_rank for x in numbers])
            else:
                columns += zip(*by_rank, strict=True)
        return columns

    def total(self, columns: Iterable[Column]) -> dict[str, Any]:
        """The sums of the columns of all workers, by name."""
        sums, found = iter([_fsum(column) for column in columns]), dict[str, Any]()
        for name, shape in self.shapes.items():
            if shape is None:
                found[name] = next(sums)
            else:
                flat = [next(sums) for _ in self.numbers[name]]
                found[name] = torch.tensor(flat, dtype=torch.float64).reshape(shape)
        return found


def addends(values: Mapping[str, Any]) -> Addends:
    """What `Step.sum` was given.

    Raises:
        UsageError: something that is neither a number, a list of numbers nor a tensor, or too many numbers.
    """
    numbers: dict[str, list[float]] = {}
    shapes: dict[str, torch.Size | None] = {}
    for name, value in values.items():
        shapes[name] = None
        try:
            if isinstance(value, torch.Tensor):
                shapes[name] = value.shape
                numbers[name] = value.detach().double().cpu().flatten().tolist()
            elif isinstance(value, list | tuple):
                numbers[name] = _few([float(x) for x in value])
            else:
                numbers[name] = [float(value)]
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(
                f"step.sum({name}=...): {error}; pass numbers, lists of numbers, or tensors"
            ) from error
    count = sum(1 + len(part) for part in numbers.values())
    if count > MOST_NUMBERS:
        raise UsageError(
            f"step.sum(): {count} numbers are too many for the control channel, whose limit is {MOST_NUMBERS} per call"
        )
    return Addends(numbers, shapes)


def _few(terms: list[float]) -> list[float]:
    """A few numbers with exactly the sum of these."""
    parts = without_rounding(terms)
    # NaN, infinity and overflow have no exact parts.
    return parts if all(map(math.isfinite, parts)) else [sum(terms)]


def _fsum(numbers: Sequence[float]) -> float:
    try:
        return math.fsum(numbers)
    except (OverflowError, ValueError):  # a sum beyond the largest number, or of infinities of both signs
        return sum(numbers)
