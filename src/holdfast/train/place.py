"""A worker's place in the running generation: what it computes there, as far as the generation's members tell."""

from __future__ import annotations

from typing import NamedTuple

from holdfast.protocol import messages as m
from holdfast.train.summation_order import Seat, seat, weighs, words


class World(NamedTuple):
    """A generation, as one of its members sees it."""

    rank: int
    """Rank of this worker, from 0; `size` or more if `replica` is -1."""
    size: int
    """Number of workers that compute, which are those of complete replicas. With replicas of several workers it is always a
    multiple of `shard * tensor`."""
    generation: int
    """Number of the generation; grows with every change."""
    micro_batches: range
    """The numbers of the micro-batches of a global batch that this worker computes."""
    replica: int = 0
    """Number of this worker's replica; -1 while other workers of the replica are missing. It computes nothing then."""


class Place:
    """This worker's place in the newest generation that it was told to join.

    Attributes:
        form: what the coordinator said of that generation; None before the first.
        micro_batches: in a global batch; 0 while that is not known.
    """

    def __init__(self, alike: int | None = None) -> None:
        """alike: as in `summation_order.weighs`."""
        self._alike = alike
        self.form: m.JoinGeneration | None = None
        self.micro_batches = 0

    @property
    def rank(self) -> int:
        """Rank in the running generation."""
        return self.form.rank if self.form else 0

    @property
    def world_size(self) -> int:
        """Workers that compute in the running generation."""
        return self.form.generation.strength if self.form else 1

    @property
    def shard_count(self) -> int:
        """Workers of a replica, each of which holds one shard of the state; 0 before the first generation."""
        return self.form.generation.shard_count if self.form else 0

    @property
    def generation(self) -> int:
        """Number of the newest generation that this worker was told to join; 0 before the first."""
        return self.form.generation.number if self.form else 0

    @property
    def world(self) -> World:
        """The running generation, as a script sees it."""
        mine = self.seat().micro_batches if self.form and self.micro_batches else range(0)
        replica = self.form.generation.members[self.rank].replica if self.form else 0
        return World(self.rank, self.world_size, self.generation, mine, replica)

    def seat(self) -> Seat:
        """What this worker computes of the running generation's steps."""
        assert self.form is not None
        return seat(self.micro_batches, self.form.generation, self.rank)

    @property
    def weighs(self) -> bool:
        """Whether this worker says what its micro-batches weigh; in a tensor dimension one does."""
        assert self.form is not None
        return weighs(self.form.generation, self.rank, self._alike)

    def words(self) -> list[int]:
        """How many words every member says of a step under the exact reduction."""
        assert self.form is not None
        return words(self.micro_batches, self.form.generation, self._alike)
