"""What the coordinator knows: plain values, so that a snapshot of them is the coordinator.

Times are seconds on the clock that drives the core (`now` of `Core.handle`); None means unknown.
"""

from __future__ import annotations

import msgspec

from holdfast.coordinator.kernel.deadlines import Timers
from holdfast.coordinator.kernel.health_state import Health
from holdfast.coordinator.kernel.incident_state import Incident, Injection
from holdfast.coordinator.kernel.membership_state import MembershipState
from holdfast.coordinator.kernel.open_orders import OpenOrders
from holdfast.coordinator.kernel.storage_state import StorageState
from holdfast.protocol.job import JobSpec


class CoreState(msgspec.Struct, kw_only=True):
    """Everything that the core remembers. Its size is linear in the number of workers.

    Each part is written by the folder that it is named after, and read by all."""

    spec: JobSpec
    """Never changes."""
    membership: MembershipState = msgspec.field(default_factory=MembershipState)
    storage: StorageState = msgspec.field(default_factory=StorageState)
    health: Health = msgspec.field(default_factory=Health)
    deadlines: Timers = msgspec.field(default_factory=Timers)
    orders: OpenOrders = msgspec.field(default_factory=OpenOrders)
    """What the engine was ordered to do and has not acknowledged."""
    began_s: float = 0.0
    """When the first event came. Written by the machine."""
    incidents: list[Incident] = []
    """The newest of the job, in the order of their numbers. Written by `kernel.incidents`, as are the next three."""
    closed: int = 0
    """So many of the job's oldest incidents are closed."""
    forgotten: int = 0
    """So many of the job's oldest are not in `incidents` any more. What a report tells of them is in the ledger."""
    forgotten_kinds: dict[str, int] = {}
    """Of these, how many of each kind."""
    injections: list[Injection] = []
    """Injected faults that no incident has claimed yet, oldest first."""

    @property
    def step(self) -> int | None:
        """Committed steps of the state that training is at. At level 0 and 1 since the job's start; None: not known."""
        if self.membership.counts_steps:
            return self.membership.committed
        return (
            None
            if self.membership.counted.base is None
            else self.membership.counted.base + self.membership.committed
        )

    @property
    def wanted_nodes(self) -> int:
        """Nodes to train on: as asked for, and no more than there may be."""
        asked = self.spec.max_nodes if self.membership.asked_nodes is None else self.membership.asked_nodes
        return (
            asked
            if self.membership.capacity_nodes is None
            else max(0, min(asked, self.membership.capacity_nodes))
        )

    @property
    def target(self) -> int:
        """Workers at full strength: as many as make whole replicas, and no more than have a micro-batch each."""
        workers = self.wanted_nodes * self.spec.nproc
        most = self.membership.most_workers
        if most is not None:
            workers = min(workers, most)
        return workers - workers % self.membership.shard_count

    @property
    def minimum(self) -> int:
        """Fewest workers to train with."""
        return self.target if self.spec.wait_for_spare else self.spec.min_nodes * self.spec.nproc

    @property
    def needed(self) -> int:
        """So many workers that compute make up the smallest job: whole replicas."""
        return -(-max(1, self.minimum) // self.membership.shard_count) * self.membership.shard_count

    @property
    def least_nodes(self) -> int:
        """Nodes that hold the smallest job."""
        return -(-self.needed // self.spec.nproc)
