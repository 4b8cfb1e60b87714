"""What the coordinator tells an agent."""

from __future__ import annotations

import msgspec

from holdfast.protocol.faults import ArmedFault
from holdfast.protocol.health import Remedy
from holdfast.protocol.ledger_mark import LedgerMark
from holdfast.protocol.messages.to_worker import Notify, Preload, ToWorker
from holdfast.protocol.snapshots import Copy, DurableTier, Holder, Key, Shard


# With everything that the process needs, so an agent starts the same worker whether or not it has met this
# coordinator before.
class StartWorker(msgspec.Struct, frozen=True, kw_only=True, tag="start-worker"):
    """Start a worker from a warm process."""

    worker: str
    slot: int
    script: str
    """A path, or a module's name when `module` is set."""
    args: tuple[str, ...]
    module: bool
    cwd: str
    env: dict[str, str]


# The grace is for a copy that the worker is just making: killed in the middle, it would cost the snapshot its
# shard.
class KillWorker(msgspec.Struct, frozen=True, tag="kill-worker"):
    """End a worker now, or soon."""

    worker: str
    grace_s: float = 0.0
    """Above 0: SIGTERM first; before that, for as long at most, it completes the copy into snapshot memory
    that it is at."""


# By way of the agent, which has the only connection to the worker.
class Relay(msgspec.Struct, frozen=True, tag="relay"):
    """A message for one worker."""

    worker: str
    message: ToWorker


# Of all nodes at once: who holds the others up can only be told by comparing pictures of one moment.
class Inspect(msgspec.Struct, frozen=True, tag="inspect"):
    """Look at every worker of the node and save its stacks."""

    request: int
    """Numbers the coordinator's questions: the answer names it."""


class RunFault(msgspec.Struct, frozen=True, tag="run-fault"):
    """Injected from outside the worker, now."""

    fault: ArmedFault
    worker: str | None = None
    """None: the fault is the whole node's."""


# Its workers may believe that they are members. They are killed first, then the agent comes back with a new
# session, so nothing of the old one can be mistaken.
class Fence(msgspec.Struct, frozen=True, tag="fence"):
    """The job went on without this node: kill its workers, then come back as a new one."""

    reason: str


# The node trains on until it can leave; this only lets its hook prepare.
class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """The node is to leave, and trains on until it can. For its on-drain hook."""

    reason: str


# `keeps` only where the machine stays ours: memory on a node that goes back to a cluster belongs to the next
# user.
class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """The job is over: end the workers and leave."""

    reason: str
    keeps: bool = False
    """The snapshot memory stays, for the next start of the job."""


# With all holders, so the copy can be fetched from another one if the first is lost meanwhile.
class Replicate(msgspec.Struct, frozen=True, tag="replicate"):
    """Keep a copy of this shard, too."""

    copy: Copy
    holders: tuple[Holder, ...]
    """Who has it."""


# What may be forgotten, said by whoever knows all nodes. An agent that decided this by itself could drop the
# last copy of a shard.
class SnapshotComplete(msgspec.Struct, frozen=True, tag="snapshot-complete"):
    """The snapshot of this step is complete: older ones are not needed."""

    step: int
    kept: int | None = None
    """But for this step's, of which more nodes hold each shard; None: none is kept beside it."""


# After a rewind. Kept, a shard of a later step could be found by the next start, and be taken for the newest
# state of a past that never was.
class ForgetSnapshots(msgspec.Struct, frozen=True, tag="forget-snapshots"):
    """Training goes on from an earlier step: what was saved of later ones never happened."""

    above_step: int
    """The step that it goes on from."""
    until: int | None = None
    """Only snapshots up to this one go: a shard of it is missing that nobody will bring. None: all later ones
    go."""


class StoreShard(msgspec.Struct, frozen=True, tag="store-shard"):
    """Write a shard that is held here to a durable tier."""

    tier: str
    """Its URL."""
    key: Key
    blob: str = ""
    """Name of the blob with equal bytes that another node writes: only the head is written here. Empty: both
    are."""


# Ordered when every shard was reported: the manifest makes the checkpoint exist, so it comes last.
class Publish(msgspec.Struct, frozen=True, tag="publish"):
    """Every shard is in the tier: write the manifest, then remove what need not be kept."""

    tier: DurableTier
    step: int
    shards: tuple[Shard, ...]


class Peer(msgspec.Struct, frozen=True):
    """Another node, as the other end of a check."""

    node: str
    host: str
    port: int


class RunChecks(msgspec.Struct, frozen=True, kw_only=True, tag="run-checks"):
    """Check this node and answer with Checked."""

    request: int
    deep: bool = False
    """The deep checks too, which need the node to itself."""
    peers: tuple[Peer, ...] = ()
    """Of checks between nodes: the other one of `pair`, the whole group of `all-reduce` in the order of
    ranks."""
    only: tuple[str, ...] = ()
    """Names of checks; empty: all that concern the node alone."""
    port: int = 0
    """Where this node listens in a `pair`; 0: it connects."""
    seconds: float = 0.0
    """About how long each check lasts; 0: as usual."""


# Numbered and repeated until it is answered; the agent does each number once. A reset of a device must not
# happen twice because an answer was lost.
class Repair(msgspec.Struct, frozen=True, tag="repair"):
    """Do what an agent can do itself (`reset-device`), and answer with Repaired. Nothing of the job runs on it now."""

    request: int
    remedy: Remedy
    device: str = ""
    """Lasting identity; empty: the remedy names none."""
    reason: str = ""
    """For people."""


# Where no folder is shared, a coordinator on another machine goes on from what agents kept of the ledger.
class KeepLedger(msgspec.Struct, frozen=True, kw_only=True, tag="keep-ledger"):
    """A part of the coordinator's ledger, to be kept for its successor."""

    mark: LedgerMark
    """Up to where the ledger is known with this part. Page 0, with a base: none is to be kept any more."""
    data: bytes
    """Only coordinators read it."""
    base: bool = False
    """A part of a complete copy, which takes the place of what is kept; else of a page, which is added to it."""
    begins: bool = True
    """Else it belongs to the part before."""
    more: bool = False
    """The next part belongs to this one."""


class SendLedger(msgspec.Struct, frozen=True, tag="send-ledger"):
    """Send what is kept of the ledger, as LedgerKept."""


ToAgent = (
    KeepLedger
    | SendLedger
    | Replicate
    | RunChecks
    | Repair
    | SnapshotComplete
    | ForgetSnapshots
    | StoreShard
    | Publish
    | StartWorker
    | Preload
    | KillWorker
    | Relay
    | Inspect
    | RunFault
    | Fence
    | Drain
    | Notify
    | Shutdown
)
