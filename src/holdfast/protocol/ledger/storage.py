"""Snapshots in memory and checkpoints in durable tiers."""

from __future__ import annotations

from holdfast.protocol.ledger.base import LedgerEvent
from holdfast.protocol.units import plural, seconds, size


class Snapshot(LedgerEvent, frozen=True, kw_only=True):
    """A snapshot is complete in the nodes' memory."""

    ROUTINE = True

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

    def sentence(self) -> str:
        took = f"{size(self.nbytes)} after {seconds(self.took_s)}"
        return f"snapshot of step {self.step}: in the memory of {plural(self.nodes, 'node')}, {took}"


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

    def sentence(self) -> str:
        return f"no snapshot of step {self.step} on {self.node}: {self.reason}"


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

    def sentence(self) -> str:
        return f"the copy of step {self.step}, rank {self.rank} on {self.node} is corrupt: {self.reason}"


class SnapshotUnreadable(LedgerEvent, frozen=True, kw_only=True):
    """A snapshot could not be restored from any node."""

    step: int
    """Its step."""
    generation: int
    """The generation that took it."""

    def sentence(self) -> str:
        return f"the snapshot of step {self.step} cannot be read from any node: using an older one"


class SnapshotBack(LedgerEvent, frozen=True, kw_only=True):
    """A snapshot is complete again, because a node came back."""

    step: int
    """Its step."""
    generation: int
    """The generation that took it."""

    def sentence(self) -> str:
        return f"snapshot of step {self.step}: complete again, because a node came back with its shard"


class FewCopies(LedgerEvent, frozen=True, kw_only=True):
    """There are fewer nodes than copies are wanted."""

    nodes: int
    """Nodes that hold every shard."""
    wanted: int
    """Nodes that should."""

    def sentence(self) -> str:
        return f"snapshots are in the memory of {plural(self.nodes, 'node')}, not {self.wanted}: the job has no more nodes"


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

    def sentence(self) -> str:
        more = f" ({plural(self.skipped, 'checkpoint')} skipped meanwhile)" if self.skipped else ""
        return f"step {self.step} is saved in {self.url}{more}"

    def paths(self) -> tuple[str, ...]:
        return (self.url,)


# Written for the first one that is skipped. The event of the checkpoint that they waited for says how many
# there were.
class CheckpointSkipped(LedgerEvent, frozen=True, kw_only=True):
    """A checkpoint was due while an older one was on its way."""

    step: int
    """Its step."""
    url: str
    """The tier."""
    older: int
    """The step of the one that is on its way."""

    def sentence(self) -> str:
        return f"step {self.step} is not saved: step {self.older} is still being written to {self.url}"

    def paths(self) -> tuple[str, ...]:
        return (self.url,)


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

    def sentence(self) -> str:
        then = f"using {self.instead}" if self.instead else "and there is no older one"
        return f"step {self.step} cannot be loaded, {then}: {self.reason}"

    def paths(self) -> tuple[str, ...]:
        return (self.url, self.instead or "")


# Not an error: training goes on, and the checkpoint may still come. It is the first sign of a tier that will
# fail.
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

    def sentence(self) -> str:
        far = "" if self.nbytes is None else f" ({size(self.nbytes)} of {size(self.total_bytes)})"
        return f"no data of step {self.step} has reached {self.url} for {seconds(self.silent_s)}{far}"

    def paths(self) -> tuple[str, ...]:
        return (self.url,)


class TierFailed(LedgerEvent, frozen=True, kw_only=True):
    """A tier did not take a checkpoint."""

    url: str
    """The tier."""
    step: int | None
    """The checkpoint's step."""
    reason: str
    """Why."""

    def sentence(self) -> str:
        return f"step {self.step} was not saved: {self.reason}"

    def paths(self) -> tuple[str, ...]:
        return (self.url,)


class SavingLast(LedgerEvent, frozen=True, kw_only=True):
    """The job ends, and its last state goes to a tier."""

    step: int
    """Its step."""
    url: str
    """The tier."""
    there: int | None
    """The newest step that the tier has."""

    def sentence(self) -> str:
        there = "" if self.there is None else f" (it has step {self.there})"
        return f"saving the last state, step {self.step}, to {self.url}{there}"

    def paths(self) -> tuple[str, ...]:
        return (self.url,)


# The last thing that a person has to know about a job that ended without a tier: whether its result still
# exists, and where.
class OnlyInMemory(LedgerEvent, frozen=True, kw_only=True):
    """The job ends, and no tier has its last state."""

    step: int | None
    """Its step."""
    kept: bool
    """The nodes' memory outlives the job."""
    saved: int | None
    """The newest step in a tier."""

    def sentence(self) -> str:
        if self.kept:
            return f"step {self.step} is only in memory and stays there for the next start of this job"
        saved = "no step is saved" if self.saved is None else f"the newest saved step is {self.saved}"
        return f"step {self.step} was only in memory, which is freed when the job ends: {saved}"


class LastNotSaved(LedgerEvent, frozen=True, kw_only=True):
    """The job ends, and neither a tier nor memory has the newest state that its script gave."""

    step: int
    """Its step."""
    saved: int | None
    """The newest step in a tier."""

    def sentence(self) -> str:
        saved = "no step is saved" if self.saved is None else f"the newest saved step is {self.saved}"
        return f"the last state that the script passed to save, of step {self.step}, was not saved: {saved}"
