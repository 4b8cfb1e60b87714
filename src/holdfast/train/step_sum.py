"""Sums of plain numbers over all workers, within a step: as messages of the control channel, of three numbers each.

Every worker adds up all numbers in the order of the ranks, so all get the same bits. `math.fsum` rounds once. A list is sent as
a few numbers whose sum is that of the list without any rounding (Shewchuk, Adaptive Precision Floating-Point Arithmetic, 1997,
section 2.4). So a sum over lists does not depend on which worker had which number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from holdfast.errors import UsageError
from holdfast.train.control_channel import OF_A_SUM, ControlChannel, ControlMessage

MOST_NUMBERS = 1024
"""So few numbers fit into the buffers of every connection: nobody waits in `send` for one who waits in it as well."""


def summed(values: Mapping[str, Any], step: int, channel: ControlChannel, counts: bool) -> dict[str, Any]:
    """As `Step.sum`. counts: this worker's numbers are added; others say theirs, and nobody counts them."""
    own = addends(values)
    messages, tag = own.messages(), step | OF_A_SUM
    head = (own.fingerprint, float(len(messages)), float(counts))
    channel.send(tag, head, *messages)
    heads = channel.receive_heads(tag, head, messages)
    # Compared before anything is added: with other names on one worker, all would sum different things
    # and get the same bits.
    for rank, (theirs, _) in enumerate(heads):
        if theirs[0] != own.fingerprint:
            raise UsageError(
                f"step {step}: step.sum({list(values)}) has different names or shapes on rank {rank} and on rank "
                f"{channel.rank}; pass the same names and shapes on every worker"
            )
    return own.total(messages for theirs, messages in heads if theirs[2])


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

    def total(self, reports: Iterable[Sequence[ControlMessage]]) -> dict[str, Any]:
        """The sums of what every worker said, in the order of the ranks."""
        found: dict[str, list[list[float]]] = {name: [] for name in self.numbers}
        for messages in reports:
            flat = [x for message in messages for x in message]
            at = 0
            for name in self.numbers:
                count = int(flat[at])
                found[name].append(flat[at + 1 : at + 1 + count])
                at += 1 + count
        return {name: self._sum(name, by_rank) for name, by_rank in found.items()}

    def _sum(self, name: str, by_rank: list[list[float]]) -> float | torch.Tensor:
        shape = self.shapes[name]
        if shape is None:
            return _fsum([x for numbers in by_rank for x in numbers])
        sums = [_fsum(column) for column in zip(*by_rank, strict=True)]
        return torch.tensor(sums, dtype=torch.float64).reshape(shape)


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
                numbers[name] = _without_rounding([float(x) for x in value])
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


def _without_rounding(terms: list[float]) -> list[float]:
    """A few numbers with exactly the sum of these."""
    parts: list[float] = []
    for term in terms:
        x, kept = term, 0
        for part in parts:
            big, small = (x, part) if abs(x) >= abs(part) else (part, x)
            x = big + small
            # Exact: the larger one first, so what the sum lost is a floating-point number itself. In the
            # other order the rest would be rounded too.
            if rest := small - (x - big):
                parts[kept] = rest
                kept += 1
        parts[kept:] = [x]
    # NaN, infinity and overflow have no exact parts.
    return parts if all(map(math.isfinite, parts)) else [sum(terms)]


def _fsum(numbers: Sequence[float]) -> float:
    try:
        return math.fsum(numbers)
    except (OverflowError, ValueError):  # a sum beyond the largest number, or of infinities of both signs
        return sum(numbers)
