"""What an agent reports to the coordinator."""

from __future__ import annotations

import msgspec

from holdfast.protocol.health import CheckResult, Finding
from holdfast.protocol.messages.from_worker import Done, FaultFired, Parked, Ready, WorkerMessage
from holdfast.protocol.phases import PageReading
from holdfast.protocol.snapshots import Copy, Key, Lack, Shard


# What a coordinator needs that knows nothing: the newest message of each kind, repeated. So no order and no
# report has to be kept for a coordinator that may be gone.
class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent knows of a worker: enough for a coordinator that starts from nothing.

    state: the message that describes the worker's situation now (Ready, Parked, Done or Attached).
    formed: number of the newest generation whose JoinGeneration the agent passed on.
    process: letter of /proc/PID/stat ('T' is stopped), 'X' when it is gone.
    idle_s: since the agent last saw its page move.
    busy: since then it, or a process that it started, has used the processor.
    """

    worker: str
    slot: int
    pid: int
    formed: int
    page: PageReading
    process: str = "S"
    idle_s: float = 0.0
    ready: Ready | None = None
    attached: bool = False
    parked: Parked | None = None
    done: Done | None = None
    median_s: float | None = None
    busy: bool = False


# From the node itself: a spot machine or Slurm tells the agent first, and every second of the notice counts.
class Leaving(msgspec.Struct, frozen=True, tag="leaving"):
    """The node is about to be taken away (SIGTERM to its agent). within_s: how long it has."""

    reason: str
    within_s: float


# Enough for a successor to continue. Whatever the coordinator's last state lacks, the agents bring: workers,
# their newest reports, and which copies they hold.
class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """An agent connects, for the first time or again. `session` is new for every agent process.

    identity: of the machine, the same whenever it comes back (its serial number, else its machine-id). devices: lasting
    identities of its devices. checks: what the basic checks found before it joined. snapshot_server: the name by which
    `protocol.proof` knows whoever listens at snapshot_port. summing: as in Exited, of all its workers. kernel: where pid is
    a process, as `protocol.processes` says.
    """

    version: int
    node: str
    session: str
    host: str
    slots: int
    pid: int
    ports: tuple[int, ...] = ()
    workers: tuple[WorkerView, ...] = ()
    snapshot_port: int = 0
    copies: tuple[Copy, ...] = ()
    rack: str | None = None
    leaving: Leaving | None = None
    identity: str = ""
    devices: tuple[str, ...] = ()
    checks: tuple[CheckResult, ...] = ()
    snapshot_server: str = ""
    summing: tuple[Key, ...] = ()
    kernel: str = ""


# Empty. What an agent has to report has messages of its own, and any of them is a sign of life as well.
class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """The agent lives."""


# The age is added wherever the message waits, so stalls are measured from when something happened and not
# from when it was read.
class FromWorker(msgspec.Struct, frozen=True, tag="from-worker"):
    """A worker's message, passed on. age_s: how long it waited in the agent for a coordinator."""

    worker: str
    message: WorkerMessage
    age_s: float = 0.0


# Brings the path of the log, which is how a lost order to start is recognized: a worker without a log was
# never started.
class Started(msgspec.Struct, frozen=True, tag="started"):
    """A warm process took over as this worker."""

    worker: str
    pid: int
    log: str


# `killed` tells an end that the agent brought about from one that came from outside: only the latter can be
# the OOM killer's.
class Exited(msgspec.Struct, frozen=True, kw_only=True, tag="exited"):
    """A worker's process ended. code: exit status, negative for a signal (as subprocess does). killed: by its agent.

    summing: shards that it left complete in memory, whose checksums the agent still computes: SnapshotStored or SnapshotRejected follows.
    steps: optimizer steps that it made (at level 0 and 1).
    """

    worker: str
    code: int
    tail: tuple[str, ...] = ()
    log: str = ""
    killed: bool = False
    summing: tuple[Key, ...] = ()
    steps: int = 0


# From a limit that the agent knows. Whether anything is wrong, and whose fault it is, only a look at all
# workers can tell.
class Stalled(msgspec.Struct, frozen=True, tag="stalled"):
    """A worker stands still for longer than it may; says nothing about who is at fault."""

    worker: str
    view: WorkerView


# Numbered like its request: an answer to an earlier one shows the workers as they were before.
class InspectReply(msgspec.Struct, frozen=True, tag="inspect-reply"):
    """The answer to Inspect: every worker of the node, stacks saved in the files named.

    stacks: per worker the main thread's innermost frames, for telling who differs; empty when it cannot say.
    """

    request: int
    workers: tuple[WorkerView, ...]
    stacks: dict[str, str] = {}


# Only after the checksums are known. A shard without them could not be told from a damaged one.
class SnapshotStored(msgspec.Struct, frozen=True, tag="snapshot-stored"):
    """A shard is complete in this node's memory, its checksums known. stall_s: what it cost training (0: a copy
    from a peer). took_s: from its begin on."""

    copy: Copy
    stall_s: float = 0.0
    took_s: float = 0.0


# Also an answer: whoever waits for this shard has to know that it does not come.
class SnapshotRejected(msgspec.Struct, frozen=True, tag="snapshot-rejected"):
    """A shard could not be kept here: no memory, or no holder gave it whole. lack: of what, where it is that."""

    key: Key
    reason: str
    lack: Lack | None = None


# Reported at once, so that another copy is made while a good one still exists.
class SnapshotCorrupt(msgspec.Struct, frozen=True, tag="snapshot-corrupt"):
    """A shard that was held here went bad in memory, and counts no more."""

    key: Key
    reason: str


# `shard` names the files as they were written, with checksums. The manifest is made of these, so it never
# lists what nobody wrote.
class Stored(msgspec.Struct, frozen=True, kw_only=True, tag="stored"):
    """A shard is in a durable tier; `shard` None: it could not be written, and why."""

    tier: str
    key: Key
    shard: Shard | None
    reason: str = ""
    took_s: float = 0.0


class StoreProgress(msgspec.Struct, frozen=True, tag="store-progress"):
    """How far the writing of a shard is. Sent now and then, if it takes longer than two seconds."""

    tier: str
    key: Key
    nbytes: int
    total_bytes: int


# An error does not prove that there is no manifest: a file server may have renamed the file and lost the
# answer.
class Published(msgspec.Struct, frozen=True, tag="published"):
    """The manifest is written: the checkpoint exists. error: it could not be, and why."""

    tier: str
    step: int
    error: str | None = None


class FindingsReported(msgspec.Struct, frozen=True, tag="findings-reported"):
    """Rules matched on this node."""

    findings: tuple[Finding, ...]


class Checked(msgspec.Struct, frozen=True, tag="checked"):
    """The answer to RunChecks."""

    request: int
    results: tuple[CheckResult, ...]


class Repaired(msgspec.Struct, frozen=True, tag="repaired"):
    """The answer to Repair. error: it did not work, and why."""

    request: int
    error: str | None = None


AgentMessage = (
    SnapshotStored
    | FindingsReported
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
