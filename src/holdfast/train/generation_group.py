"""The connections of one generation: a control channel of all members, gloo for the gradients of those that hold the
same shard, and, where a replica has several workers, its own groups (`reconnectable_group`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined, unused-ignore]

from holdfast.errors import CollectiveFault
from holdfast.protocol.messages import Generation, Member
from holdfast.train.control_channel import ChannelListener, ControlChannel, MeshChannel
from holdfast.train.gloo_group import GlooGroup
from holdfast.train.member_tree import fan_out_for
from holdfast.train.tree_channel import TreeChannel

if TYPE_CHECKING:
    from holdfast.train.reconnectable_group import ReplicaGroups


@dataclass(frozen=True)
class _Failed:
    """In the place of a Work: the collective did not even begin."""

    error: CollectiveFault


def channel_of(generation: Generation, rank: int, fan_out: int | None = None) -> ControlChannel:
    """The control channel of a member. fan_out: of a tree also of few members; None: many are a tree, and few are not."""
    found = fan_out_for(len(generation.members), fan_out)
    return MeshChannel(generation, rank) if found is None else TreeChannel(generation, rank, found)


def _shard_label(member: Member) -> str:
    return f"shard-{member.shard_index}"


def _replica_label(member: Member) -> str:
    return f"replica-{member.replica}"


class GenerationGroup(GlooGroup):
    """The connections of one generation. Built in two parts, so that `abort` works while `connect` runs.

    Attributes:
        rank, size: among the workers that hold the same shard of the state, which sum their gradients.
        channel: of all members of the generation.
    """

    def __init__(
        self,
        generation: Generation,
        rank: int,
        host: str,
        listener: ChannelListener,
        replica: ReplicaGroups | None = None,
        device: torch.device | None = None,
        fan_out: int | None = None,
    ) -> None:
        """replica: the groups of this worker's replica, if it has several workers. device: where the gradients are. fan_out: as in
        `channel_of`."""
        own = generation.members[rank]
        group = list(generation.replica_group(own.shard_index))
        # The sum of gradients runs over the workers with the same shard: the others hold different
        # parameters. Within a replica FSDP2 has summed already, so adding over replicas completes the sum.
        super().__init__(group.index(rank), len(group), host, device)
        self.generation = generation.number
        self.channel = channel_of(generation, rank, fan_out)
        self._listener = listener
        self._own = own
        self._replica_groups = replica if generation.shard_count > 1 else None
        self._connects_replica = (
            self._replica_groups is not None
            and generation.groups_connected_in[own.replica] == generation.number
        )
        # A worker that raised while it sends would leave the step between two collectives of its replica,
        # where the others still wait for it. What it receives next comes behind all of them, so it fails
        # there.
        self.channel.fails_on_receive = self._replica_groups is not None

    def join(self, token: str) -> None:
        """Connects to the members. Raises CollectiveFault when one is gone or the generation breaks."""
        if self.channel.size == 1:
            return
        # The control channel comes first because gloo's addresses travel over it. No store server is needed,
        # and no key of a former generation can be read, because the sockets are new.
        self.channel.connect(self._listener, token)
        store = self.channel.store(lambda member: (_shard_label(member), _replica_label(member)))
        try:
            if self.size > 1:
                self.connect(PrefixStore(_shard_label(self._own), store))
            if self._replica_groups is not None and self._connects_replica:
                where = _replica_label(self._own)
                self._replica_groups.connect(
                    lambda name: PrefixStore(f"{where}/{name}", store), self.generation
                )
            # After this the same sockets carry messages. A key that still came would be read as one, so every
            # member waits until every other one has said that it sends none.
            store.finish()
        finally:
            store.close()
        # `abort` may have run while `store.finish` was the only thing going on. Its caller believes that
        # everything is closed, so what was connected meanwhile is closed here.
        if self._aborted:
            self.abort()
            raise CollectiveFault("the generation broke while its members connected")

    def start(self, call: Callable[[Any], Any]) -> Any:
        """As in GlooGroup. A replica of several workers leaves a step together (`ReplicaGroups`), so what fails here in the middle of
        one is said when it is waited for."""
        try:
            return super().start(call)
        except CollectiveFault as error:
            if self._replica_groups is None:
                raise
            return _Failed(error)

    def wait(self, work: Any) -> None:
        """As in GlooGroup."""
        if isinstance(work, _Failed):
            raise work.error
        super().wait(work)

    def drain(self, work: Any) -> bool:
        """As in GlooGroup."""
        return isinstance(work, _Failed) or super().drain(work)

    def intact(self) -> None:
        """As in GlooGroup, also for the replica's own groups."""
        super().intact()
        if self._replica_groups is not None and self._device is not None and self._replica_groups.aborted:
            raise CollectiveFault("the generation broke")

    def abort(self) -> None:
        """Frees every call that waits for a peer in another replica. Safe from any thread, more than once."""
        super().abort()
        self._listener.release(self.generation)
        self.channel.abort()

    def abort_all(self) -> None:
        """Ends every wait, also for workers of this replica."""
        self.abort()
        if self._replica_groups is not None:
            self._replica_groups.abort()

    def halt(self) -> dict[str, int]:
        """Frees calls to other replicas; this one is intact, see `ReplicaGroups.halt`."""
        self.abort()
        return self._replica_groups.halt() if self._replica_groups is not None else {}

    def leave(self, broken: bool) -> int:
        """The main thread is out of every call; see `ReplicaGroups.leave`."""
        return self._replica_groups.leave(broken) if self._replica_groups is not None else -1

    def close(self) -> None:
        """Gives everything back, after `abort` or when no member needs the group any more. Not the replica's own groups,
        which the next generation may use."""
        super().close()
        self.channel.close()
        self._listener.release(self.generation)
