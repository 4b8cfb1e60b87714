"""Combines several data sets into one stream, each with its share.

The source of a position, and the number of earlier samples of that source, are functions of the position: no index
array is built, and the position is the whole state of a mixture.

Construction: the sources are the leaves of a Huffman tree over their weights. At a node whose two sides weigh a and b,
the first m samples give floor(m * a / (a + b) + 1/2) to the left side: Bresenham's line. That number grows by 0 or 1
with m, so it says for every sample which side it goes to, and at the leaf how many came there before. Each node is off
by at most half a sample, of which a leaf has its share. In a Huffman tree a node weighs at most half of what its
grandparent does, so the errors above a leaf halve with every second level: at any point of the stream every source has
its weight's share of samples to within less than two, with two sources to within one half.

Weights are rounded to billionths, and all arithmetic is exact.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from holdfast.data.order import SampleOrder

VERSION = 1
"""Version of a mixture's order; part of its fingerprint."""

TOLERANCE = 1e-6
_UNITS = 10**9

Ints = npt.NDArray[np.int64]


class StreamOrder(Protocol):
    """The order of an endless stream: the sample at each position."""

    def at_many(self, positions: npt.ArrayLike) -> Ints:
        """Sample numbers at these positions, in their shape."""


class MixtureSource(Protocol):
    """A component of a mixture: a `TokenDataset`, another mixture, or an object with the same interface."""

    fingerprint: str

    def __len__(self) -> int: ...

    def batch(self, ids: npt.ArrayLike) -> tuple[torch.Tensor, ...]:
        """The samples of these numbers, stacked."""


@dataclass(frozen=True)
class _Node:
    left: _Tree
    right: _Tree
    left_weight: int
    weight: int


_Tree: TypeAlias = "_Node | int"  # a leaf is the number of its source


class Mixture:
    """Data sets with weights: `holdfast.data.Mixture([(web, 0.7), (code, 0.2), (books, 0.1)])`.

    In the first n samples of the stream, for any n, every source has its weight's share to within two samples. Each
    source comes in its own
    keyed permutation, epoch after epoch: no sample of a source is repeated before all of them came. Samples of
    different sources alternate evenly, so every global batch has the same composition.

    Sample numbers count through the sources: those of the first, then those of the second, and so on.

    Args:
        parts: pairs of a data set and its weight. The weights sum to 1. Data sets have `__len__`, `batch(ids)` and
            `fingerprint`; one with an `order(seed)` of its own, such as another mixture, keeps it.

    Attributes:
        sources: the data sets.
        weights: their weights as stored: shares of 1, rounded to billionths.
        seq_len: tokens per sample, if a source has this attribute.

    Raises:
        ValueError: no sources, a weight that is not above 0, weights that do not sum to 1, an empty source, or
            sources with samples of different lengths.
    """

    def __init__(self, parts: Iterable[tuple[MixtureSource, float]]) -> None:
        pairs = list(parts)
        self.sources = [source for source, _ in pairs]
        # Integers from here on. With floats the share of a source at position 10^12 would depend on rounding,
        # and two machines could disagree about a sample.
        self._units = _checked_units([weight for _, weight in pairs])
        self.weights = [units / sum(self._units) for units in self._units]
        self._firsts = np.cumsum([0, *(_checked_length(source, n) for n, source in enumerate(self.sources))])
        self.seq_len = _common_length(self.sources)

    def __len__(self) -> int:
        """Number of samples in all sources. This is the range of sample numbers, not the length of an epoch."""
        return int(self._firsts[-1])

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        """One sample.

        Raises:
            IndexError: `index` is not in [0, len(self)).
        """
        return tuple(part[0] for part in self.batch([index]))

    def batch(self, ids: npt.ArrayLike) -> tuple[torch.Tensor, ...]:
        """Many samples, of one source or of several.

        Args:
            ids: sample numbers in [0, len(self)), shape [B], in any order.

        Returns:
            The tensors of the sources' batches, in the order of `ids`.

        Raises:
            IndexError: a number is out of range.
        """
        numbers = np.asarray(ids, dtype=np.int64)
        if numbers.size and not (numbers.min() >= 0 and numbers.max() < len(self)):
            raise IndexError(
                f"sample numbers span {numbers.min()} to {numbers.max()}, but the mixture has {len(self)} samples"
            )
        # A sample number alone tells its source, so a batch may mix sources in any order, and each source is
        # still asked once, with all of its numbers.
        of = np.searchsorted(self._firsts, numbers, side="right") - 1
        present = np.unique(of).tolist() or [0]
        # One source in the batch: its own tensors are passed on and not copied.
        if len(present) == 1:
            only: tuple[torch.Tensor, ...] = self.sources[present[0]].batch(
                numbers - self._firsts[present[0]]
            )
            return only
        together: tuple[torch.Tensor, ...] = ()
        for source in present:
            rows = np.flatnonzero(of == source)
            parts = self.sources[source].batch(numbers[rows] - self._firsts[source])
            if not together:
                together = tuple(part.new_empty((len(numbers), *part.shape[1:])) for part in parts)
            for whole, part in zip(together, parts, strict=True):
                whole.index_copy_(0, torch.from_numpy(rows), part)
        return together

    def order(self, seed: int) -> MixtureOrder:
        """The order in which a run with this seed takes samples."""
        return MixtureOrder(self, seed)

    def drawn(self, samples: int) -> list[int]:
        """How many of the first `samples` samples of the stream are from each source."""
        counts = [0] * len(self.sources)
        _share(self._tree, samples, counts)
        return counts

    def epochs(self, samples: int) -> list[float]:
        """How often each source has been passed through in the first `samples` samples of the stream; above 1 it
        repeats."""
        return [n / len(source) for n, source in zip(self.drawn(samples), self.sources, strict=True)]

    def summary(self, samples: int) -> str:
        """A line for each source with what a run of `samples` samples takes from it; repeats are pointed out."""
        lines = []
        for source, weight, drawn, epochs in zip(
            self.sources, self.weights, self.drawn(samples), self.epochs(samples), strict=True
        ):
            repeats = f", repeats {math.ceil(epochs) - 1} times" if epochs > 1 else ""
            lines.append(
                f"{weight:.4%}: {drawn:,} samples, {epochs:.2f} epochs of {len(source):,}{repeats}: {source!r}"
            )
        return "\n".join(lines)

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits over the sources' fingerprints, the weights and the version of the order."""
        digest = xxhash.xxh3_64(f"mixture {VERSION};".encode())
        for source, units in zip(self.sources, self._units, strict=True):
            digest.update(f"{source.fingerprint} {units};".encode())
        return digest.hexdigest()

    def identity(self) -> dict[str, Any]:
        """The fingerprint and the values that it is made of, as plain values to be saved: see `check_fingerprint`."""
        sources = []
        for source, weight in zip(self.sources, self.weights, strict=True):
            own = source.identity() if hasattr(source, "identity") else {"fingerprint": source.fingerprint}
            sources.append({"weight": weight} | own)
        return {"fingerprint": self.fingerprint, "mixture": VERSION, "sources": sources}

    def __repr__(self) -> str:
        parts = ", ".join(f"({s!r}, {w:g})" for s, w in zip(self.sources, self.weights, strict=True))
        return f"Mixture([{parts}])"

    @cached_property
    def _tree(self) -> _Tree:
        # Ties are broken by a running number, so that the tree, and with it every sample of the stream, is a
        # function of the weights alone. The order of a heap with equal keys is not.
        heap: list[tuple[int, int, _Tree]] = [(units, n, n) for n, units in enumerate(self._units)]
        heapq.heapify(heap)
        number = len(heap)
        while len(heap) > 1:
            a, _, left = heapq.heappop(heap)
            b, _, right = heapq.heappop(heap)
            heapq.heappush(heap, (a + b, number, _Node(left, right, a, a + b)))
            number += 1
        return heap[0][2]


class MixtureOrder:
    """The order of a mixture: a pure function of (sources, weights, seed, position)."""

    def __init__(self, mixture: Mixture, seed: int) -> None:
        self._mixture = mixture
        self._orders: list[StreamOrder] = []
        for number, source in enumerate(mixture.sources):
            # Each source gets a seed of its own from its number. With a common seed two sources of equal
            # length would be walked in the same permutation.
            own = xxhash.xxh3_64_intdigest(f"source {number} of {seed}".encode())
            self._orders.append(
                source.order(own) if hasattr(source, "order") else SampleOrder(len(source), own)
            )

    def at(self, position: int) -> int:
        """The sample at one position."""
        return int(self.at_many([position])[0])

    def at_many(self, positions: npt.ArrayLike) -> Ints:
        """The samples at many positions.

        Args:
            positions: integers from 0 to 2**62 - 1, any shape, in any order.

        Returns:
            Sample numbers of the mixture, int64, in the shape of `positions`.

        Raises:
            TypeError: the positions are not integers.
            ValueError: a position is out of range.
        """
        asked = np.asarray(positions)
        if asked.size == 0:
            return np.zeros(asked.shape, np.int64)
        if asked.dtype.kind not in "iu":
            raise TypeError(f"positions must be integers (got dtype {asked.dtype})")
        if int(asked.min()) < 0 or int(asked.max()) >= 2**62:
            raise ValueError(
                f"positions span {asked.min()} to {asked.max()}; positions of a mixture run from 0 to 2**62 - 1"
            )
        flat = asked.ravel().astype(np.int64)
        samples = np.empty_like(flat)
        for source, rows, draws in self.draws(flat):
            samples[rows] = self._mixture._firsts[source] + self._orders[source].at_many(draws)
        return samples.reshape(asked.shape)

    def draws(self, positions: Ints) -> list[tuple[int, Ints, Ints]]:
        """Assigns positions to sources: (source, rows of `positions`, how many samples of the source came before)."""
        drawn: list[tuple[int, Ints, Ints]] = []
        open_ = [(self._mixture._tree, np.arange(len(positions)), positions)]
        while open_:
            tree, rows, at = open_.pop()
            if not len(rows):
                continue
            if isinstance(tree, int):
                drawn.append((tree, rows, at))
                continue
            # The count to the left grows by 0 or 1 at each position. Where it grows the position belongs to
            # the left side, and the count before it is the position's number on that side.
            before, after = _left_of(tree, at), _left_of(tree, at + 1)
            left = after > before
            open_.append((tree.left, rows[left], before[left]))
            open_.append((tree.right, rows[~left], (at - before)[~left]))
        return drawn


def _left_of(node: _Node, count: Any) -> Any:
    """How many of the first `count` samples at a node go to the left. Complete turns are computed first, so that 64
    bits suffice."""
    # Multiplying `count` by the weight directly would overflow 64 bits: positions go to 2^62. Complete turns
    # give exactly left_weight each, so only the remainder is multiplied.
    turns, rest = count // node.weight, count % node.weight
    return turns * node.left_weight + (2 * rest * node.left_weight + node.weight) // (2 * node.weight)


def _share(tree: _Tree, count: int, counts: list[int]) -> None:
    open_ = [(tree, count)]
    while open_:
        tree, count = open_.pop()
        if isinstance(tree, int):
            counts[tree] = count
        else:
            left = _left_of(tree, count)
            open_ += [(tree.left, left), (tree.right, count - left)]


def _checked_units(weights: list[float]) -> list[int]:
    """The weights as integers without a common divisor."""
    if not weights:
        raise ValueError("a mixture needs at least one (dataset, weight)")
    for number, weight in enumerate(weights):
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(
                f"weight {number} of the mixture is {weight}; remove the source, or use a weight above 0"
            )
    # fsum, because a naive sum of many weights such as 0.1 misses 1 by more than a careful user should have
    # to think about.
    total = math.fsum(weights)
    if round(abs(total - 1), 9) > TOLERANCE:
        parts = [round(weight / total, 6) for weight in weights]
        largest = parts.index(max(parts))
        parts[largest] = round(1 - math.fsum(parts[:largest] + parts[largest + 1 :]), 6)
        raise ValueError(
            f"the weights of the mixture sum to {total:.9g}, not to 1; in these proportions they are "
            f"{', '.join(f'{part:g}' for part in parts)}"
        )
    units = [round(weight * _UNITS) for weight in weights]
    if 0 in units:
        number = units.index(0)
        raise ValueError(
            f"weight {number} of the mixture, {weights[number]:g}, is less than a billionth; remove the source"
        )
    # Without this, the same proportions written as 0.5, or as 1/2 of other sums, would be different mixtures
    # with different fingerprints.
    common = math.gcd(*units)
    return [each // common for each in units]


def _checked_length(source: MixtureSource, number: int) -> int:
    for name in ("__len__", "batch", "fingerprint"):
        if not hasattr(source, name):
            raise ValueError(
                f"source {number} of the mixture, {source!r}, does not have {name}; mix data sets such as TokenDataset"
            )
    if len(source) < 1:
        raise ValueError(f"source {number} of the mixture, {source!r}, is empty; remove it")
    return len(source)


def _common_length(sources: list[MixtureSource]) -> int | None:
    lengths: set[int] = {getattr(source, "seq_len", None) for source in sources} - {None}  # type: ignore[assignment]
    if len(lengths) > 1:
        raise ValueError(
            f"the sources of the mixture have samples of different lengths ({', '.join(map(str, sorted(lengths)))} "
            "tokens); open all of them with the same seq_len"
        )
    return lengths.pop() if lengths else None
