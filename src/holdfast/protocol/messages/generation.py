"""One version of the membership, as messages carry it."""

from __future__ import annotations

from bisect import bisect_left

import msgspec


# Complete replicas have numbers from 0 on. -1 is a worker beside them: it computes no gradient, yet takes
# part in every update, so its shard stays current and can complete a replica at once.
class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One worker of a generation, and where the others reach it."""

    rank: int
    worker: str
    node: str
    slot: int
    host: str = ""
    """Where the two ports are."""
    vote_port: int = 0
    """For the control channel."""
    data_port: int = 0
    """Where it serves its state."""
    replica: int = 0
    """Its replica's number; -1: that is not complete, so the worker computes nothing but keeps its shard
    current."""
    shard_index: int = 0
    """Which shard of the state it holds; 0 where a replica is one worker."""


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """One version of the membership."""

    number: int
    """Counts from 1 on."""
    members: tuple[Member, ...]
    """In the order of their ranks: replica by replica, in each by shard, then those whose replica is not
    complete."""
    start: int = 0
    """Committed steps that it goes on from."""
    shape: tuple[int, int] = (1, 1)
    """Workers of a replica: shard degree, and tensor degree."""
    groups_connected_in: tuple[int, ...] = ()
    """For every complete replica, the number of the generation in which its own process groups were
    connected; empty where a replica is one worker."""

    @property
    def shard_count(self) -> int:
        """Workers of a replica."""
        return self.shape[0] * self.shape[1]

    @property
    def replicas(self) -> int:
        """Complete ones."""
        # Derived and not stored, so that no two fields of a generation can contradict each other.
        # Found by halves, because the core asks at every event: those of complete replicas come first.
        return bisect_left(self.members, True, key=lambda m: m.replica < 0) // self.shard_count

    @property
    def strength(self) -> int:
        """Workers that compute: those of complete replicas."""
        return self.replicas * self.shard_count

    def column(self, shard_index: int) -> tuple[int, ...]:
        """The ranks that hold this shard."""
        # Also those beside the replicas: they hold the same bytes, so they may be donors and savers.
        return tuple(m.rank for m in self.members if m.shard_index == shard_index)

    def rank_of(self, worker: str) -> int | None:
        """The worker's rank; None when it is not a member."""
        return next((m.rank for m in self.members if m.worker == worker), None)
