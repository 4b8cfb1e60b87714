"""What the core remembers of snapshots and checkpoints. Times are on the core's clock; None is unknown."""

from __future__ import annotations

import msgspec

from holdfast.protocol.job import Durable
from holdfast.protocol.snapshots import Copy, Key, Shard


class HeldShard(msgspec.Struct):
    """One shard of a snapshot, and where it is."""

    copy: Copy
    nodes: list[str] = []
    """Those that hold it."""
    asked: list[str] = []
    """Those that were asked to hold it too, and have not answered."""


class Snapshot(msgspec.Struct, kw_only=True):
    """What workers copied at one step. Replicas whose bytes differ (in buffers) give several shards of one
    rank."""

    step: int
    generation: int
    """Of the workers that took it."""
    world: int
    """How many shards a complete one has, numbered by the `rank` of their keys."""
    began_s: float
    """When its first shard was heard of."""
    shards: list[HeldShard] = []
    """Those that some node holds, or was asked to."""
    refused: list[tuple[str, int]] = []
    """Nodes that could not keep a shard of it, and the shard's rank. They are not asked again."""
    busy: list[tuple[str, int]] = []
    """Nodes that had no slot for a shard at that moment, and its rank. They are asked again when one is
    free."""
    passed: list[tuple[str, int]] = []
    """Nodes whose own worker could not leave its shard there, and its rank: that worker will not bring it any
    more."""
    no_room: bool = False
    """A copy is missing because memory is short."""
    lost: list[int] = []
    """Ranks of shards that went with the nodes that held them, which may come back."""
    complete: bool = False
    """Every shard came to be held by as many nodes as the job asks for, or as could be had, and none was lost
    since."""
    given_up: bool = False
    """A shard is missing, and nobody will bring it."""
    unread: int = 0
    """Generations in a row that could not be restored from it."""
    complete_s: float | None = None
    """When it was complete for the first time; None: it never was."""
    stall_s: float = 0.0
    """For how long it held up the worker that it held up longest."""


class Rewind(msgspec.Struct):
    """A generation that did not go on from live state: later steps of those before it never happened."""

    number: int
    """The generation's."""
    start: int
    """The committed steps that it went on from."""


class Storing(msgspec.Struct, kw_only=True):
    """A checkpoint on its way to a durable tier, or the last one that came there."""

    tier: str
    """Its URL."""
    step: int
    """Of the snapshot; of an attempt that failed, the step of the last checkpoint that came there (0:
    none)."""
    began_s: float
    """When it was begun; of an attempt that failed, when it failed."""
    generation: int = 0
    """Of the workers that took the snapshot."""
    world: int = 1
    """How many shards it has."""
    took_s: float | None = None
    """From its begin until its manifest was written; None: that is not written."""
    waiting: dict[int, str] = {}
    """Rank to the node that writes its shard; -1 to the node that writes the manifest."""
    shared_blobs: dict[int, str] = {}
    """Rank to the name of the blob of another rank with equal bytes."""
    shards: list[Shard] = []
    """Those that are written."""
    void: bool = False
    """Training went back behind it. It is only waited for, so that nothing of it is taken for a later
    one's."""
    written: dict[int, tuple[int, int]] = {}
    """Rank to the bytes of its shard that are there, and of how many, where that is known."""
    moved_s: float = 0.0
    """When something of it last came there."""
    slow: bool = False
    """People were told that nothing comes there."""
    skipped: int = 0
    """Checkpoints that were due meanwhile."""
    seen_step: int = 0
    """Step of the newest of those; its own without any."""
    seen_s: float = 0.0
    """When that was due; when this one began without any."""
    last: bool = False
    """Nobody has steps to do any more, so a tier that does not take it is not tried again."""


class TierTotals(msgspec.Struct, kw_only=True):
    """What came to a durable tier since the job's start."""

    checkpoints: int = 0
    nbytes: int = 0
    """Each blob once, however many ranks share it."""
    took_s: float = 0.0
    """All checkpoints together, from the begin of each until its manifest was written."""
    failures: int = 0
    """Checkpoints that it did not take."""
    skipped: int = 0
    """Checkpoints that were due while an older one was on its way."""


class SavingTotals(msgspec.Struct, kw_only=True):
    """What was saved since the job's start."""

    snapshots: int = 0
    """Those that were complete."""
    nbytes: int = 0
    """Theirs, without copies on other nodes."""
    took_s: float = 0.0
    """From the first worker's copy until each snapshot was complete, all together."""
    stall_s: float = 0.0
    """For which training stood still."""
    copies: int = 0
    """Shards that came into the memory of nodes that did not save them."""
    copied_bytes: int = 0
    """Theirs."""
    skipped: int = 0
    """Shards that a node could not keep."""
    unread: int = 0
    """Snapshots and checkpoints that proved to be unreadable."""
    tiers: dict[str, TierTotals] = {}
    """By URL."""


class StorageState(msgspec.Struct, kw_only=True):
    """Snapshots in memory and checkpoints in durable tiers. Written by `storage`."""

    durable: Durable | None = None
    """The newest checkpoint in any tier."""
    older: list[Durable] = []
    """What to go on from if `durable` proves to be damaged, newest first."""
    durable_tries: int = 0
    """Generations in a row that could not be restored from it."""
    unread: list[str] = []
    """Why checkpoints that are there will not do."""
    last_from: list[tuple[str, int]] = []
    """Nodes that were given the state after the last step, and the shards of it."""
    summing: list[tuple[str, Key, float]] = []
    """Node, shard and since when: it is complete there and its worker has ended; SnapshotStored or SnapshotRejected
    follows."""
    last_failed: list[str] = []
    """Tiers that did not take the last state."""
    snapshots: list[Snapshot] = []
    told_complete: tuple[int, int | None] | None = None
    """What agents were told last of complete snapshots: the newest, and an older one that is kept beside it."""
    rewinds: list[Rewind] = []
    """Oldest first, their starts rising."""
    buddy_groups: list[list[str]] = []
    """Nodes that keep copies for each other: kept, so that a new node moves as few of them as possible."""
    short_of_copies: bool = False
    """The newest complete snapshot has fewer copies than were asked for, and the ledger says so."""
    skipped: int = 0
    """Shards that no node could keep since the last complete snapshot."""
    given: tuple[int, int] = (0, 0)
    """Generation and step of the newest state that a script gave by itself, whatever became of it."""
    storing: list[Storing] = []
    stored: dict[str, Storing] = {}
    """Tier to the last checkpoint that came there, or was tried."""
    doubtful: dict[str, Storing] = {}
    """Tier to the manifest that could not be written, as far as is known."""
    failing_tiers: list[str] = []
    """Tiers that did not take the newest checkpoint, and the ledger says so."""
    totals: SavingTotals = msgspec.field(default_factory=SavingTotals)
