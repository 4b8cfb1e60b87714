"""The data plane of one generation: collectives that all members finish, or only some when one dies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.protocol.messages import Generation

if TYPE_CHECKING:
    from simcluster.cluster import Cluster
    from simcluster.worker import Trainer

Key = tuple[str, int, int]
"""A collective: what it is, of which step, and of which row or column (0: of all)."""


class Plane:
    """Who of a generation has come to which collective."""

    def __init__(self, cluster: Cluster, generation: Generation) -> None:
        self.cluster = cluster
        self.number = generation.number
        self.generation = generation
        self._groups: dict[tuple[str, int], frozenset[str]] = {}
        self.present: dict[str, Trainer] = {}
        self.absent: set[str] = set()
        self._arrived: dict[Key, dict[str, Any]] = {}
        self._closed: set[Key] = set()

    def enter(self, worker: Trainer) -> None:
        """A member heard of the generation: from now on it may serve its state."""
        self.present[worker.name] = worker

    def arrive(self, key: Key, worker: Trainer, payload: Any) -> None:
        """A member reached a collective and waits there until it closes, fails or is aborted."""
        worker.waits_for = key
        self._arrived.setdefault(key, {})[worker.name] = payload
        if self.absent & self.group(key):
            self._fail(worker)
        else:
            self.check(key)

    def group(self, key: Key) -> frozenset[str]:
        """Who takes part in a collective: all, the workers of one replica, or all that hold one shard."""
        kind, _, part = key
        if (kind, part) not in self._groups:
            members = self.generation.members
            if kind == "row":
                members = tuple(m for m in members if m.replica == part)
            elif kind == "reduce":
                members = tuple(m for m in members if m.shard_index == part)
            self._groups[kind, part] = frozenset(m.worker for m in members)
        return self._groups[kind, part]

    def check(self, key: Key) -> None:
        """Closes the collective if everyone is there."""
        arrived = self._arrived[key]
        group = self.group(key)
        if len(arrived) < len(group) or self.absent & group or key in self._closed:
            return
        members = [self.present[name] for name in arrived]
        if any(w.agent.cut for w in members) or self.cluster.faults.flaky(self.number):
            return
        if self.cluster.faults.torn_links:
            self._fail(members[-1])
            return
        self._closed.add(key)
        for worker in members:
            self.cluster.clock.after(
                self.cluster.hop_s(), self._close, key, worker, worker.ticket, dict(arrived)
            )

    def _close(self, key: Key, worker: Trainer, ticket: int, payloads: dict[str, Any]) -> None:
        if worker.waits_for != key or worker.ticket != ticket or not worker.running:
            return
        if worker.agent.cut or worker.deaf_in == key[0]:
            return
        if self.cluster.tears_end(key):
            self._fail(worker)
            return
        worker.waits_for = None
        worker.closed(key, payloads)

    def gone(self, worker: Trainer) -> None:
        """A member died or left: whoever waits for it learns so, unless its last word got through."""
        if worker.name in self.absent:
            return
        self.absent.add(worker.name)
        if worker.agent.cut:
            return
        for other in self.present.values():
            if other is worker or other.waits_for is None or other.agent.cut:
                continue
            if worker.name not in self.group(other.waits_for):
                continue
            if other.waits_for in self._closed and self.cluster.rng.random() < 0.5:
                continue
            self._fail(other)

    def _fail(self, worker: Trainer) -> None:
        key, ticket = worker.waits_for, worker.ticket
        if key is None:
            return  # it has left that collective already
        self.cluster.clock.after(self.cluster.rng.uniform(0.0, 0.05), self._failed, worker, key, ticket)

    def _failed(self, worker: Trainer, key: Key, ticket: int) -> None:
        if worker.waits_for == key and worker.ticket == ticket and worker.running and not worker.agent.cut:
            worker.waits_for = None
            worker.collective_failed(key)

    def recheck(self) -> None:
        """The network healed: what everyone had already come to closes now."""
        for key in list(self._arrived):
            self.check(key)

    def donor(self, name: str, start: int) -> Trainer | None:
        """A member that can give the state at `start` now."""
        worker = self.present.get(name)
        if worker is None or not worker.alive or worker.agent.cut or worker.seen != self.number:
            return None
        return worker if worker.held is not None and worker.held[0] == start else None

    def never_serves(self, name: str) -> bool:
        """Waiting for this donor is no use."""
        worker = self.present.get(name) or self.cluster.find_trainer(name)
        return worker is None or not worker.alive or worker.seen > self.number
