"""A worker's place in the running generation: what it computes there, as far as the generation's members tell.

All of it is pure. The micro-batches 0 to V - 1 are the leaves of a binary tree that splits every range in the middle, and this is the
one order in which their gradients are added. Its sums do not depend on who computes which leaf. A worker adds up the largest subtrees
that lie in its range (one, when the world size is a power of two and V is divisible by it; at most 2 log2 V), and the sums of all
workers' subtrees are added on the way to the root.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from holdfast.protocol import messages as m
from holdfast.protocol.messages import Generation

Node = tuple[int, int]
"""The micro-batches from the first number up to, not including, the second."""


def share(micro_batches: int, rank: int, world: int) -> range:
    """The numbers of a worker's micro-batches: contiguous, and distributed as evenly as possible."""
    # Contiguous, so a worker's leaves form few large subtrees, and each subtree costs one more part to send.
    # The difference between two shares is at most one.
    return range(rank * micro_batches // world, (rank + 1) * micro_batches // world)


def shares(micro_batches: int, world: int) -> list[range]:
    """The micro-batches of all workers, in the order of the ranks."""
    return [share(micro_batches, rank, world) for rank in range(world)]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkShare:
    """The micro-batches that a worker computes, and how gradients are summed over the workers with the same shard."""

    micro_batches: range
    """Numbers of the micro-batches that this worker computes."""
    rank: int
    """Among the workers with the same shard; those that compute come first."""
    world: int
    """Workers with the same shard that compute."""
    idle: int
    """Further workers with the same shard, which compute nothing."""
    leaves: int
    """Leaves of the tree of additions: micro-batches of a global batch, over the shards of a replica."""


def share_of(micro_batches: int, generation: Generation, rank: int) -> WorkShare:
    """The work of a rank. In a replica of several workers that shard their state, those take turns: each micro-batch of a
    round goes to one of them, and the sum over the round is a leaf of the tree."""
    own = generation.members[rank]
    shards, tensor = generation.shape
    group = generation.replica_group(own.shard_index)
    computing = generation.replicas
    leaves = micro_batches // shards
    place = group.index(rank)
    # A member beside the replicas is in the replica group without computing. It counts at the end, so ranks of those
    # that compute stay 0 to `computing` - 1.
    if own.replica < 0:
        return WorkShare(
            micro_batches=range(0), rank=place, world=computing, idle=len(group) - computing, leaves=leaves
        )
    rounds = share(leaves, place, computing)
    first = own.shard_index // tensor
    # The shards of a replica take turns: FSDP2 sums over them at each backward pass, so one round gives one
    # leaf. Which worker computed which micro-batch of it does not matter then.
    numbers = range(rounds.start * shards + first, rounds.stop * shards + first, shards)
    return WorkShare(
        micro_batches=numbers, rank=place, world=computing, idle=len(group) - computing, leaves=leaves
    )


def message_counts(micro_batches: int, generation: Generation, alike: int | None = None) -> list[int]:
    """How many micro-batches every member weighs, in the order of the ranks. alike: as in `weighs`."""
    computing, leaves = generation.replicas, micro_batches // generation.shape[0]
    alike = alike or generation.shape[1]
    counts = [len(mine) for mine in shares(leaves, computing)]
    return [
        counts[m.replica] if m.replica >= 0 and m.shard_index % alike == 0 else 0 for m in generation.members
    ]


def weighs(generation: Generation, rank: int, alike: int | None = None) -> bool:
    """Whether a worker reports the weights of its micro-batches. alike: number of neighbouring ranks that compute exactly the
    same, of which the first reports; None: all ranks with the same micro-batches. Ranks that share each sample report the
    weight of their parts."""
    return generation.members[rank].shard_index % (alike or generation.shape[1]) == 0


def subtrees(micro_batches: int, numbers: range) -> list[Node]:
    """The largest nodes of the tree that lie within the range, in the order of their numbers."""
    found: list[Node] = []
    todo = [(0, micro_batches)]
    while todo:
        low, high = todo.pop()
        if numbers.start <= low and high <= numbers.stop:
            found.append((low, high))
        elif low < numbers.stop and numbers.start < high:
            middle = (low + high) // 2
            todo += [(middle, high), (low, middle)]
    return found


def folds(micro_batches: int, nodes: Sequence[Node]) -> list[int]:
    """How to add up neighbouring nodes with a stack: for each node, how many times the two uppermost sums are replaced by their
    sum after it is pushed."""
    parent = _parents(micro_batches)
    stack: list[Node] = []
    counts = []
    for node in nodes:
        stack.append(node)
        before = len(stack)
        # Two neighbours are added as soon as both are complete, so the stack holds at most one subtree of
        # each height: 1 + log2 of the micro-batches, which bounds the memory.
        while len(stack) > 1 and parent.get(stack[-1]) == parent.get(stack[-2]):
            stack[-2:] = [parent[stack[-1]]]
        counts.append(before - len(stack))
    return counts


@lru_cache(maxsize=64)
def _parents(micro_batches: int) -> dict[Node, Node]:
    """Every node but the root, and what it is a child of."""
    found: dict[Node, Node] = {}
    todo = [(0, micro_batches)]
    while todo:
        low, high = node = todo.pop()
        if high - low > 1:
            middle = (low + high) // 2
            for child in ((low, middle), (middle, high)):
                found[child] = node
                todo.append(child)
    return found


class World(NamedTuple):
    """A generation from the point of view of one of its members."""

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
        """alike: as in `weighs`."""
        self._alike = alike
        self.form: m.JoinGeneration | None = None
        self.micro_batches = 0
        self._found: tuple[m.JoinGeneration, int, WorkShare, list[int]] | None = None

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
        mine = self.share().micro_batches if self.form and self.micro_batches else range(0)
        replica = self.form.generation.members[self.rank].replica if self.form else 0
        return World(self.rank, self.world_size, self.generation, mine, replica)

    @property
    def members(self) -> tuple[m.Member, ...]:
        """Those of the running generation, in the order of their ranks."""
        assert self.form is not None
        return self.form.generation.members

    def share(self) -> WorkShare:
        """What this worker computes of the running generation's steps."""
        return self._of_generation()[0]

    def _of_generation(self) -> tuple[WorkShare, list[int]]:
        # Asked for several times in every step, and the same until the next generation: it is found once, for it takes a look
        # at every member.
        assert self.form is not None
        if self._found is None or self._found[0] is not self.form or self._found[1] != self.micro_batches:
            generation = self.form.generation
            self._found = (
                self.form,
                self.micro_batches,
                share_of(self.micro_batches, generation, self.rank),
                message_counts(self.micro_batches, generation, self._alike),
            )
        return self._found[2:]

    @property
    def weighs(self) -> bool:
        """Whether this worker reports the weights of its micro-batches; within a tensor-parallel dimension one worker does."""
        assert self.form is not None
        return weighs(self.form.generation, self.rank, self._alike)

    def message_counts(self) -> list[int]:
        """Number of control messages that each member sends about a step under the exact reduction, by rank."""
        return self._of_generation()[1]
