"""What the core remembers of snapshots and checkpoints. Times are on the core's clock; None is unknown."""

from __future__ import annotations

import msgspec

from holdfast.protocol.job import Durable
from holdfast.protocol.snapshots import Copy, Key, Shard


class HeldShard(msgspec.Struct):
    """A shard of a snapshot, the nodes that hold it, and those that were asked to hold it too."""

    copy: Copy
    nodes: list[str] = []
    asked: list[str] = []


class Snapshot(msgspec.Struct, kw_only=True):
    """What workers copied at one step. Replicas whose bytes differ (in buffers) give several of one rank.

    refused: nodes that could not keep a shard of it, and which. busy: those that had no slot for one at that moment; passed:
    of which that was their own worker's, so nobody saves it there any more. no_room: a copy is missing because memory is
    short. lost: shards that went with the nodes that held them, which
    may come back. given_up: a shard is missing and nobody will bring it.
    unread: generations in a row that could not be restored from it. whole_s: when it was whole for the first time.
    stall_s: of the worker that it held up longest.
    """

    step: int
    generation: int
    world: int
    began_s: float
    shards: list[HeldShard] = []
    refused: list[tuple[str, int]] = []
    busy: list[tuple[str, int]] = []
    passed: list[tuple[str, int]] = []
    no_room: bool = False
    lost: list[int] = []
    whole: bool = False
    given_up: bool = False
    unread: int = 0
    whole_s: float | None = None
    stall_s: float = 0.0


class Rewind(msgspec.Struct):
    """Generation `number` did not go on from live state but from step `start`: later steps of those before it never
    happened."""

    number: int
    start: int


class Storing(msgspec.Struct, kw_only=True):
    """A checkpoint on its way to a durable tier, or the last one that came there.

    waiting: rank to the node that writes its shard; -1: the manifest. shared_blobs: rank to the blob of another rank with equal bytes.
    void: training went back behind it; it is only waited for, so that nothing of it is taken for a later one's.
    written: rank to the bytes that are there, and of how many, where that is known.
    moved_s: when something of it last came there. slow: people were told that nothing does.
    last: nobody has steps to do any more, so a tier that does not take it is not tried again.
    skipped: checkpoints that were due meanwhile; seen_step, seen_s: the newest of them, or this one.
    """

    tier: str
    step: int
    began_s: float
    generation: int = 0
    world: int = 1
    took_s: float | None = None
    waiting: dict[int, str] = {}
    shared_blobs: dict[int, str] = {}
    shards: list[Shard] = []
    void: bool = False
    written: dict[int, tuple[int, int]] = {}
    moved_s: float = 0.0
    slow: bool = False
    skipped: int = 0
    seen_step: int = 0
    seen_s: float = 0.0
    last: bool = False


class TierTotals(msgspec.Struct, kw_only=True):
    """What came to a durable tier since the job's start. failures: checkpoints that it did not take. skipped: those
    that were due while an older one was on its way."""

    checkpoints: int = 0
    nbytes: int = 0
    took_s: float = 0.0
    failures: int = 0
    skipped: int = 0


class SavingTotals(msgspec.Struct, kw_only=True):
    """What was saved since the job's start.

    took_s: from the first worker's copy until each snapshot was whole. stall_s: for which training stood still.
    copies, copied_bytes: of shards, in the memory of nodes that did not save them. skipped: shards that a node could
    not keep. unread: snapshots and checkpoints that proved to be unreadable.
    """

    snapshots: int = 0
    nbytes: int = 0
    took_s: float = 0.0
    stall_s: float = 0.0
    copies: int = 0
    copied_bytes: int = 0
    skipped: int = 0
    unread: int = 0
    tiers: dict[str, TierTotals] = {}


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
    told_whole: tuple[int, int | None] | None = None
    """What agents were told last of complete snapshots: the newest, and an older one that is kept beside it."""
    rewinds: list[Rewind] = []
    """Oldest first, their starts rising."""
    buddy_groups: list[list[str]] = []
    """Nodes that keep copies for each other: kept, so that a new node moves as few of them as possible."""
    short_of_copies: bool = False
    """The newest complete snapshot has fewer copies than were asked for, and the ledger says so."""
    skipped: int = 0
    """Shards that no node could keep since the last complete snapshot."""
    storing: list[Storing] = []
    stored: dict[str, Storing] = {}
    """Tier to the last checkpoint that came there, or was tried."""
    doubtful: dict[str, Storing] = {}
    """Tier to the manifest that could not be written, as far as is known."""
    failing_tiers: list[str] = []
    """Tiers that did not take the newest checkpoint, and the ledger says so."""
    totals: SavingTotals = msgspec.field(default_factory=SavingTotals)
