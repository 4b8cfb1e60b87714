"""What an agent reports to the coordinator."""

from __future__ import annotations

from typing import Annotated

import msgspec

from holdfast.protocol.health import CheckResult, Finding
from holdfast.protocol.ledger_mark import LedgerMark
from holdfast.protocol.messages.from_worker import Done, FaultFired, Parked, Ready, WorkerMessage
from holdfast.protocol.node_figures import MOST_READINGS, SUBJECT_CHARS
from holdfast.protocol.node_place import NodePlace
from holdfast.protocol.phases import Groups, PageReading
from holdfast.protocol.snapshots import Copy, Key, Lack, Shard


# What a coordinator needs that knows nothing: the newest message of each kind, repeated. So no order and no
# report has to be kept for a coordinator that may be gone.
class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent knows of a worker: enough for a coordinator that starts from nothing."""

    worker: str
    slot: int
    pid: int
    formed: int
    """Number of the newest generation whose JoinGeneration the agent passed on; 0: none."""
    page: PageReading
    process: str = "S"
    """Letter of /proc/PID/stat ('T' is stopped); 'X' when it is gone."""
    idle_s: float = 0.0
    """Since the agent last saw its page move."""
    ready: Ready | None = None
    """Its newest one; None: it sent none, or what it sent is out of date."""
    attached: bool = False
    """Its script called `holdfast.start`."""
    parked: Parked | None = None
    """Its newest one, while it is parked."""
    done: Done | None = None
    """None: it has steps to do."""
    median_s: float | None = None
    """Its median time of a step; None: not known."""
    busy: bool = False
    """Since its page last moved it, or a process that it started, has used the processor."""
    groups: Groups | None = None
    """At level 0 and 1, in answer to Inspect: where it is in its collectives; None: not known."""


# From the node itself: a spot machine or Slurm tells the agent first, and every second of the notice counts.
class Leaving(msgspec.Struct, frozen=True, tag="leaving"):
    """The node is about to be taken away (SIGTERM to its agent)."""

    reason: str
    within_s: float
    """How long it has."""


# Enough for a successor to continue. Whatever the coordinator's last state lacks, the agents bring: workers,
# their newest reports, and which copies they hold.
class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """An agent connects, for the first time or again."""

    version: int
    """Of the protocol that it speaks."""
    node: str
    session: str
    """New for every agent process."""
    host: str
    """Where other nodes reach this one."""
    slots: int
    """How many workers it has room for."""
    pid: int
    """Of the agent, in the namespace that `kernel` names."""
    ports: tuple[int, ...] = ()
    """Free ports, for listeners that workers or checks need."""
    workers: tuple[WorkerView, ...] = ()
    """Those that it has, those that have ended left out."""
    snapshot_port: int = 0
    """Where it serves snapshot memory; 0: nowhere."""
    copies: tuple[Copy, ...] = ()
    """Shards that it holds, complete."""
    place: NodePlace = ()
    """Where the node stands; empty: not known."""
    leaving: Leaving | None = None
    """None: it was not told to leave."""
    identity: str = ""
    """Of the machine, the same whenever it comes back (see `health.identity`); empty: unknown."""
    devices: tuple[str, ...] = ()
    """Lasting identities of its devices."""
    checks: tuple[CheckResult, ...] = ()
    """What the basic checks found before it joined."""
    snapshot_server: str = ""
    """The name by which `protocol.proof` knows whoever listens at `snapshot_port`."""
    summing: tuple[Key, ...] = ()
    """As in Exited, of all its workers."""
    kernel: str = ""
    """Where `pid` is a process, as `protocol.processes` says; empty: that cannot be told."""
    term: int = 0
    """The latest term of a coordinator that it has spoken with."""
    ledger: LedgerMark | None = None
    """How far the copy of the ledger goes that it keeps; None: it keeps none."""


# Empty. What an agent has to report has messages of its own, and any of them is a sign of life as well.
class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """The agent lives."""


# The age is added wherever the message waits, so stalls are measured from when something happened and not
# from when it was read.
class FromWorker(msgspec.Struct, frozen=True, tag="from-worker"):
    """A worker's message, passed on."""

    worker: str
    message: WorkerMessage
    age_s: float = 0.0
    """How long it waited in the agent for a coordinator."""


# Brings the path of the log, which is how a lost order to start is recognized: a worker without a log was
# never started.
class Started(msgspec.Struct, frozen=True, tag="started"):
    """A warm process took over as this worker."""

    worker: str
    pid: int
    log: str
    """Path on the node."""


# `killed` tells an end that the agent brought about from one that came from outside: only the latter can be
# the OOM killer's.
class Exited(msgspec.Struct, frozen=True, kw_only=True, tag="exited"):
    """A worker's process ended."""

    worker: str
    code: int
    """Exit status; negative for a signal, as subprocess has it."""
    tail: tuple[str, ...] = ()
    """The last lines of its log."""
    log: str = ""
    """Path on the node; empty: it never started."""
    killed: bool = False
    """By its agent."""
    out_of_memory: bool = False
    """The kernel has killed for want of memory in its control group while it lived."""
    memory_limit: int | None = None
    """Of that group, in bytes; None: it has none."""
    summing: tuple[Key, ...] = ()
    """Shards that it left complete in memory, whose checksums the agent still computes: SnapshotStored or
    SnapshotRejected follows."""
    steps: int = 0
    """Optimizer steps that it made (at level 0 and 1)."""
    script_ended: bool = False
    """Its script came to an end; else `os._exit` or a signal ended the process."""
    groups: Groups | None = None
    """How far it then was in its collectives; None: not known."""


# From a limit that the agent knows. Whether anything is wrong, and whose fault it is, only a look at all
# workers can tell.
class Stalled(msgspec.Struct, frozen=True, tag="stalled"):
    """A worker stands still for longer than it may; says nothing about who is at fault."""

    worker: str
    view: WorkerView


# Numbered like its request: an answer to an earlier one shows the workers as they were before.
class InspectReply(msgspec.Struct, frozen=True, tag="inspect-reply"):
    """The answer to Inspect: every worker of the node, stacks saved in the files named."""

    request: int
    """Of the Inspect that it answers."""
    workers: tuple[WorkerView, ...]
    stacks: dict[str, str] = {}
    """Per worker the main thread's innermost frames, for telling who differs; empty when it cannot say."""


# Only after the checksums are known. A shard without them could not be told from a damaged one.
class SnapshotStored(msgspec.Struct, frozen=True, tag="snapshot-stored"):
    """A shard is complete in this node's memory, its checksums known."""

    copy: Copy
    stall_s: float = 0.0
    """What it cost training; 0: a copy from a peer."""
    took_s: float = 0.0
    """From its begin on."""


# Also an answer: whoever waits for this shard has to know that it does not come.
class SnapshotRejected(msgspec.Struct, frozen=True, tag="snapshot-rejected"):
    """A shard could not be kept here: no memory, or no holder gave all of it."""

    key: Key
    reason: str
    lack: Lack | None = None
    """Of what the node has too little; None: the reason is another one."""
    paced: bool = False
    """The ones before are still on their way, and all ranks of the script skip it: no trouble."""


# Reported at once, so that another copy is made while a good one still exists.
class SnapshotCorrupt(msgspec.Struct, frozen=True, tag="snapshot-corrupt"):
    """A shard that was held here went bad in memory, and counts no more."""

    key: Key
    reason: str


# `shard` names the files as they were written, with checksums. The manifest is made of these, so it never
# lists what nobody wrote.
class Stored(msgspec.Struct, frozen=True, kw_only=True, tag="stored"):
    """A shard is in a durable tier, or could not be written."""

    tier: str
    """Its URL."""
    key: Key
    shard: Shard | None
    """The files as they were written; None: they could not be."""
    reason: str = ""
    """Why not; else empty."""
    took_s: float = 0.0
    """How long the writing took."""


class StoreProgress(msgspec.Struct, frozen=True, tag="store-progress"):
    """How far the writing of a shard is. Sent now and then, if it takes longer than two seconds."""

    tier: str
    """Its URL."""
    key: Key
    nbytes: int
    """Written so far, of `total_bytes`."""
    total_bytes: int


# An error does not prove that there is no manifest: a file server may have renamed the file and lost the
# answer.
class Published(msgspec.Struct, frozen=True, tag="published"):
    """The manifest is written: the checkpoint exists."""

    tier: str
    """Its URL."""
    step: int
    error: str | None = None
    """Why it could not be written, as far as is known; None: it is."""


class FindingsReported(msgspec.Struct, frozen=True, tag="findings-reported"):
    """Rules matched on this node."""

    findings: tuple[Finding, ...]


_Named = tuple[
    Annotated[str, msgspec.Meta(max_length=64)], Annotated[str, msgspec.Meta(max_length=SUBJECT_CHARS)], float
]


# For people alone: no decision depends on it, and none may come to.
class NodeReadings(msgspec.Struct, frozen=True, tag="node-readings"):
    """The newest readings of the machine that are in `node_figures.NODE_FIGURES`."""

    readings: Annotated[tuple[_Named, ...], msgspec.Meta(max_length=MOST_READINGS)]
    """Name, subject and value of each."""


class Checked(msgspec.Struct, frozen=True, tag="checked"):
    """The answer to RunChecks."""

    request: int
    """Of the RunChecks that it answers."""
    results: tuple[CheckResult, ...]


class Repaired(msgspec.Struct, frozen=True, tag="repaired"):
    """The answer to Repair."""

    request: int
    """Of the Repair."""
    error: str | None = None
    """Why it did not work; None: it did."""


class LedgerKept(msgspec.Struct, frozen=True, kw_only=True, tag="ledger-kept"):
    """A part of the answer to SendLedger: the parts of a base, in order, and then those of each page."""

    mark: LedgerMark
    data: bytes
    base: bool = False
    more: bool = False
    """The next part belongs to this one."""
    last: bool = False
    """There is no more. A copy that cannot be read ends without a base."""


AgentMessage = (
    LedgerKept
    | SnapshotStored
    | FindingsReported
    | NodeReadings
    | Checked
    | Repaired
    | SnapshotRejected
    | SnapshotCorrupt
    | Stored
    | StoreProgress
    | Published
    | Hello
    | Leaving
    | Heartbeat
    | FromWorker
    | Started
    | Exited
    | Stalled
    | InspectReply
    | FaultFired
)
