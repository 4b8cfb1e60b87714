"""Snapshots in memory and checkpoints in durable tiers."""

from __future__ import annotations

from holdfast.protocol.ledger.base import LedgerEvent


class Snapshot(LedgerEvent, frozen=True, kw_only=True):
    """A snapshot is complete in the nodes' memory."""

    step: int
    """Committed steps that it holds."""
    generation: int
    """The generation that took it."""
    world: int
    """Shards of it."""
    nbytes: int
    """Its size."""
    nodes: int
    """Every shard is in the memory of so many nodes."""
    took_s: float
    """Seconds from the first copy."""


class SnapshotSkipped(LedgerEvent, frozen=True, kw_only=True):
    """A node could not keep a shard."""

    node: str
    """The node's name."""
    step: int
    """The snapshot's step."""
    rank: int
    """The shard."""
    reason: str
    """Why."""


class SnapshotSpoiled(LedgerEvent, frozen=True, kw_only=True):
    """A copy of a shard was damaged in memory."""

    node: str
    """The node's name."""
    step: int
    """The snapshot's step."""
    rank: int
    """The shard."""
    reason: str
    """What is wrong."""


class SnapshotUnreadable(LedgerEvent, frozen=True, kw_only=True):
    """A snapshot could not be restored from any node."""

    step: int
    """Its step."""
    generation: int
    """The generation that took it."""


class SnapshotBack(LedgerEvent, frozen=True, kw_only=True):
    """A snapshot is complete again, because a node came back."""

    step: int
    """Its step."""
    generation: int
    """The generation that took it."""


class FewCopies(LedgerEvent, frozen=True, kw_only=True):
    """There are fewer nodes than copies are wanted."""

    nodes: int
    """Nodes that hold every shard."""
    wanted: int
    """Nodes that should."""


class Saved(LedgerEvent, frozen=True, kw_only=True):
    """A checkpoint is complete in a durable tier."""

    step: int
    """Its step."""
    url: str
    """The tier, or the checkpoint."""
    took_s: float | None = None
    """Seconds since it began; None: a worker wrote it itself."""
    skipped: int | None = None
    """Checkpoints that were skipped meanwhile."""
    worker: str | None = None
    """The worker that wrote it, if one did."""


class CheckpointSkipped(LedgerEvent, frozen=True, kw_only=True):
    """A checkpoint was due while an older one was on its way."""

    step: int
    """Its step."""
    url: str
    """The tier."""
    older: int
    """The step of the one that is on its way."""


class CheckpointUnread(LedgerEvent, frozen=True, kw_only=True):
    """A checkpoint cannot be loaded."""

    step: int
    """Its step."""
    url: str
    """Where it is."""
    reason: str
    """Why."""
    instead: str | None
    """What is loaded instead; None: nothing."""


class TierSlow(LedgerEvent, frozen=True, kw_only=True):
    """Nothing of a checkpoint has arrived for long."""

    step: int
    """Its step."""
    url: str
    """The tier."""
    silent_s: float
    """For so many seconds."""
    nbytes: int | None
    """Bytes that have arrived."""
    total_bytes: int | None
    """Bytes of the checkpoint."""


class TierFailed(LedgerEvent, frozen=True, kw_only=True):
    """A tier did not take a checkpoint."""

    url: str
    """The tier."""
    step: int | None
    """The checkpoint's step."""
    reason: str
    """Why."""


class SavingLast(LedgerEvent, frozen=True, kw_only=True):
    """The job ends, and its last state goes to a tier."""

    step: int
    """Its step."""
    url: str
    """The tier."""
    there: int | None
    """The newest step that the tier has."""


class OnlyInMemory(LedgerEvent, frozen=True, kw_only=True):
    """The job ends, and no tier has its last state."""

    step: int | None
    """Its step."""
    kept: bool
    """The nodes' memory outlives the job."""
    saved: int | None
    """The newest step in a tier."""
