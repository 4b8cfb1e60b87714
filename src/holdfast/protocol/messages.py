"""The messages between worker, agent and coordinator: typed, versioned, no behaviour.

Four directions, one union each. A worker talks to its agent over a Unix socket; the agent relays what the
coordinator needs to know, tagged with the worker's name. Times are seconds; steps count from 0, and
`committed` is the number of committed steps, so it is also the index of the next one.
"""

from __future__ import annotations

import msgspec

from holdfast.protocol.faults import ArmedFault
from holdfast.protocol.health import CheckResult, Finding, Remedy
from holdfast.protocol.job import Durable
from holdfast.protocol.phases import Place, Spent
from holdfast.protocol.snapshots import Copy, DurableTier, Holder, Key, Lack, Shard

PROTOCOL_VERSION = 6


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One worker of a generation, and where the others reach it.

    replica: its number; -1: the worker's replica is not complete, so it computes nothing but keeps its shard current.
    shard_index: which shard of the state it holds; 0 where a replica is one worker.
    """

    rank: int
    worker: str
    node: str
    slot: int
    host: str = ""
    vote_port: int = 0
    data_port: int = 0
    replica: int = 0
    shard_index: int = 0


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """One version of the membership. Members are in the order of their ranks: replica by replica, in each by shard,
    then those whose replica is not complete.

    shape: workers of a replica: shard degree, and tensor degree. rows: for every complete replica, the number of the
    generation in which its own process groups were connected; empty where a replica is one worker.
    """

    number: int
    members: tuple[Member, ...]
    start: int = 0
    shape: tuple[int, int] = (1, 1)
    rows: tuple[int, ...] = ()

    @property
    def shard_count(self) -> int:
        """Workers of a replica."""
        return self.shape[0] * self.shape[1]

    @property
    def replicas(self) -> int:
        """Complete ones."""
        return sum(m.replica >= 0 for m in self.members) // self.shard_count

    @property
    def strength(self) -> int:
        """Workers that compute: those of complete replicas."""
        return self.replicas * self.shard_count

    def column(self, shard_index: int) -> tuple[int, ...]:
        """The ranks that hold this shard."""
        return tuple(m.rank for m in self.members if m.shard_index == shard_index)

    def rank_of(self, worker: str) -> int | None:
        """The worker's rank; None when it is not a member."""
        return next((m.rank for m in self.members if m.worker == worker), None)


# ---------------------------------------------------------------- worker -> agent (-> coordinator)


class Warm(msgspec.Struct, frozen=True, tag="warm"):
    """A forked process has imported everything and waits for work (agent only)."""

    pid: int


class Attached(msgspec.Struct, frozen=True, tag="attached"):
    """The script called `holdfast.start`: this job is at level 2."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The script reached `run.steps`: model built, nothing missing but the membership (and the state).

    digest: xxh3 of the protected state as built, so that equal starts need no transfer. micro_batches: in a global
    batch. shape: workers of a replica: shard degree, and tensor degree. shard_index: the shard that it was built for.
    """

    digest: str
    host: str
    vote_port: int
    data_port: int
    micro_batches: int = 0
    shape: tuple[int, int] = (1, 1)
    shard_index: int = 0


class Joined(msgspec.Struct, frozen=True, tag="joined"):
    """The worker is connected to its generation and holds the state of its first step."""

    generation: int
    join_s: float
    restore_s: float | None = None
    restored_bytes: int = 0


class Restoring(msgspec.Struct, frozen=True, tag="restoring"):
    """How far the fetching of the state is. Sent now and then, if it takes longer than two seconds."""

    generation: int
    nbytes: int
    total_bytes: int


MOST_FIGURES = 64
"""So many names may be given to `run.log`: each is a time series for whoever scrapes `/metrics`."""

FIGURE_NAME = 64
"""Characters of the longest of them."""


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """Steps were committed. Sent at most 20 times a second, and always for a generation's first commit.

    losses: (step, loss, seconds it took) of the commits since the last message (rank 0 only). figures: what the script
    logged since then: (step, name to value), likewise. spent: blocks of steps that were completed since then.
    """

    generation: int
    committed: int
    median_s: float | None = None
    losses: tuple[tuple[int, float, float], ...] = ()
    figures: tuple[tuple[int, dict[str, float]], ...] = ()
    spent: tuple[Spent, ...] = ()


class Parked(msgspec.Struct, frozen=True, kw_only=True, tag="parked"):
    """The worker is out of a generation that broke or was ended, and waits for the next.

    committed: None when it holds no usable state (it never had it, or an update was torn).
    prepared: it holds the complete reduced gradient of step `committed`.
    begun: collectives of its replica's groups since they were connected, all of them complete; -1: the groups are gone.
    """

    generation: int
    committed: int | None
    prepared: bool = False
    losses: tuple[tuple[int, float, float], ...] = ()
    begun: int = -1


class Halted(msgspec.Struct, frozen=True, tag="halted"):
    """So many collectives of this worker's replica have begun here; no further one does before RunTo."""

    generation: int
    begun: int


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """User code raised. In a step the worker parks next; outside of one it exits. own: this rank's own part of the gradient
    or the loss is not finite."""

    generation: int
    step: int | None
    phase: int
    error: str
    message: str
    traceback: str = ""
    where: str = ""
    own: bool = False

    @property
    def signature(self) -> str:
        """What makes two failures the same."""
        return f"{self.error}@{self.where}" if self.where else f"{self.error}: {self.message}"


class CollectiveError(msgspec.Struct, frozen=True, tag="collective-error"):
    """A collective raised in this worker: evidence, not a verdict. Or it could not be restored (step -1).

    lost: what it was to be restored from is damaged; another try would find the same.
    """

    generation: int
    step: int
    detail: str
    lost: bool = False


class FaultFired(msgspec.Struct, frozen=True, tag="fault-fired"):
    """An injected fault is about to happen here; the worker waits for the agent's Ack before it does."""

    fault: str
    step: int | None = None
    phase: int | None = None


class Saved(msgspec.Struct, frozen=True, tag="saved"):
    """A checkpoint is whole in a durable tier. error: it could not be written, and why."""

    step: int
    url: str
    error: str | None = None


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """The worker has all its steps. params_xxh3: over the parameters of every protected module.

    held: its agent has the last state, and will say SnapshotStored or SnapshotRejected.
    """

    committed: int
    params_xxh3: str
    loss: float | None
    stopped: bool = False
    held: bool = False


class OffStep(msgspec.Struct, frozen=True, tag="off-step"):
    """The script begins (or ends) work of its own between two steps, which may take long."""

    on: bool


class SlotWanted(msgspec.Struct, frozen=True, tag="slot-wanted"):
    """The worker wants to copy its shard, `nbytes` of it, into snapshot memory (agent only).

    waits: until there is room, when older snapshots are still on their way to durable tiers.
    """

    key: Key
    nbytes: int
    waits: bool = False


class SlotFilled(msgspec.Struct, frozen=True, tag="slot-filled"):
    """The copy is complete (agent only). index: msgpack of `tensors.index.Index`; None: it was given up.

    stall_s: how long training stood still for it.
    """

    key: Key
    index: bytes | None
    stall_s: float = 0.0


class StateServed(msgspec.Struct, frozen=True, tag="state-served"):
    """Rank 0's script gave the state that it calls `step` to be saved, after `steps` optimizer steps of this start."""

    generation: int
    step: int
    steps: int


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """Rank 0's script goes on from the state that it calls `step`, `steps` optimizer steps after this start. None: it looked
    for the newest, and there was none."""

    generation: int
    step: int | None
    steps: int


class FindSnapshot(msgspec.Struct, frozen=True, tag="find-snapshot"):
    """A script wants to load: which is the newest whole checkpoint, and who has it?"""

    request: int


WorkerMessage = (
    SlotWanted
    | SlotFilled
    | StateServed
    | Loaded
    | FindSnapshot
    | Warm
    | Attached
    | Ready
    | Joined
    | Restoring
    | Progress
    | Parked
    | Halted
    | Failed
    | CollectiveError
    | FaultFired
    | Saved
    | Done
    | OffStep
)


# ---------------------------------------------------------------- agent -> worker


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """What a warm process becomes."""

    worker: str
    script: str
    args: tuple[str, ...]
    module: bool
    env: dict[str, str]
    cwd: str
    log: str
    page: str
    stacks: str
    token_file: str
    host: str


class JoinGeneration(msgspec.Struct, frozen=True, kw_only=True, tag="join-generation"):
    """Join this generation.

    apply: apply the prepared gradient first (the step counts after all).
    restore: fetch the state at `generation.start`: from the ranks in `donors`; when there are none from snapshot
    memory, `copy` held by `holders`, nearest first; else from the durable checkpoint.
    serve: be a donor, so publish the state; with `restore`, as soon as it is read from the durable checkpoint.
    saves: copy snapshots into this node's memory; mtbf_s: what `auto` goes by.
    shards: all shards of a snapshot that was taken with another number of shards, each with its holders.
    """

    generation: Generation
    rank: int
    apply: bool = False
    restore: bool = False
    serve: bool = False
    donors: tuple[int, ...] = ()
    copy: Copy | None = None
    holders: tuple[Holder, ...] = ()
    durable: Durable | None = None
    saves: bool = False
    mtbf_s: float = 0.0
    shards: tuple[tuple[Copy, tuple[Holder, ...]], ...] = ()


SHARD_INDEX_VARIABLE = "HOLDFAST_SHARD_INDEX"
"""The environment variable that tells a worker for which shard it is most likely needed."""


class Rebuild(msgspec.Struct, frozen=True, tag="rebuild"):
    """Run `main` again, in the same process, as the holder of this shard: a replica lacks it. Ready follows."""

    shard_index: int


class Break(msgspec.Struct, frozen=True, tag="break"):
    """The generation is over: abort its collectives, leave the step, park. halt: the worker's own replica is whole; its
    groups are not aborted, the worker says Halted and goes on until RunTo tells it where to leave the step."""

    generation: int
    reason: str
    halt: bool = False


class RunTo(msgspec.Struct, frozen=True, tag="run-to"):
    """Leave the step when so many collectives of this worker's replica have begun here."""

    generation: int
    begun: int


class EndAtCommit(msgspec.Struct, frozen=True, tag="end-at-commit"):
    """The generation ends at the next commit: finish the step together, then park."""

    generation: int


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Leave `run.steps`. apply: as in JoinGeneration. save_to: write a durable checkpoint there first. keep: leave the state in the
    node's memory, from where it becomes a checkpoint."""

    apply: bool = False
    save_to: DurableTier | None = None
    keep: bool = False


class Arm(msgspec.Struct, frozen=True, tag="arm"):
    """Faults that this worker is to inject into itself."""

    faults: tuple[ArmedFault, ...]


class Ack(msgspec.Struct, frozen=True, tag="ack"):
    """FaultFired was passed on; go ahead."""

    fault: str


class DropTraffic(msgspec.Struct, frozen=True, tag="drop-traffic"):
    """Injected: every connection of this worker goes silent without closing."""


class SlotGiven(msgspec.Struct, frozen=True, tag="slot-given"):
    """The slot for a snapshot. path: None when there is none, and why."""

    key: Key
    path: str | None
    reason: str = ""


class SnapshotFound(msgspec.Struct, frozen=True, tag="snapshot-found"):
    """The newest whole checkpoint: in memory, every shard with its holders; else the durable one; else neither."""

    request: int
    copies: tuple[tuple[Copy, tuple[Holder, ...]], ...] = ()
    durable: Durable | None = None


ToWorker = (
    SlotGiven
    | SnapshotFound
    | JoinGeneration
    | Rebuild
    | RunTo
    | Break
    | EndAtCommit
    | Stop
    | Arm
    | Ack
    | DropTraffic
    | Start
)


# ---------------------------------------------------------------- agent -> coordinator


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
    place: Place
    process: str = "S"
    idle_s: float = 0.0
    ready: Ready | None = None
    attached: bool = False
    parked: Parked | None = None
    done: Done | None = None
    median_s: float | None = None
    busy: bool = False


class Leaving(msgspec.Struct, frozen=True, tag="leaving"):
    """The node is about to be taken away (SIGTERM to its agent). within_s: how long it has."""

    reason: str
    within_s: float


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


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """The agent lives."""


class FromWorker(msgspec.Struct, frozen=True, tag="from-worker"):
    """A worker's message, passed on. age_s: how long it waited in the agent for a coordinator."""

    worker: str
    message: WorkerMessage
    age_s: float = 0.0


class Started(msgspec.Struct, frozen=True, tag="started"):
    """A warm process took over as this worker."""

    worker: str
    pid: int
    log: str


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


class Stalled(msgspec.Struct, frozen=True, tag="stalled"):
    """A worker stands still for longer than it may; says nothing about who is at fault."""

    worker: str
    view: WorkerView


class InspectReply(msgspec.Struct, frozen=True, tag="inspect-reply"):
    """The answer to Inspect: every worker of the node, stacks saved in the files named.

    stacks: per worker the main thread's innermost frames, for telling who differs; empty when it cannot say.
    """

    request: int
    workers: tuple[WorkerView, ...]
    stacks: dict[str, str] = {}


class SnapshotStored(msgspec.Struct, frozen=True, tag="snapshot-stored"):
    """A shard is complete in this node's memory, its checksums known. stall_s: what it cost training (0: a copy
    from a peer). took_s: from its begin on."""

    copy: Copy
    stall_s: float = 0.0
    took_s: float = 0.0


class SnapshotRejected(msgspec.Struct, frozen=True, tag="snapshot-rejected"):
    """A shard could not be kept here: no memory, or no holder gave it whole. lack: of what, where it is that."""

    key: Key
    reason: str
    lack: Lack | None = None


class SnapshotCorrupt(msgspec.Struct, frozen=True, tag="snapshot-corrupt"):
    """A shard that was held here went bad in memory, and counts no more."""

    key: Key
    reason: str


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


# ---------------------------------------------------------------- coordinator -> agent


class StartWorker(msgspec.Struct, frozen=True, kw_only=True, tag="start-worker"):
    """Start a worker from a warm process."""

    worker: str
    slot: int
    script: str
    args: tuple[str, ...]
    module: bool
    cwd: str
    env: dict[str, str]


class KillWorker(msgspec.Struct, frozen=True, tag="kill-worker"):
    """End a worker now. grace_s > 0: SIGTERM first; before that, for as long at most, it completes the copy into snapshot
    memory that it is at."""

    worker: str
    grace_s: float = 0.0


class Relay(msgspec.Struct, frozen=True, tag="relay"):
    """A message for one worker."""

    worker: str
    message: ToWorker


class Inspect(msgspec.Struct, frozen=True, tag="inspect"):
    """Look at every worker of the node and save its stacks."""

    request: int


class RunFault(msgspec.Struct, frozen=True, tag="run-fault"):
    """Injected from outside the worker, now. worker: None for a fault of the whole node."""

    fault: ArmedFault
    worker: str | None = None


class Fence(msgspec.Struct, frozen=True, tag="fence"):
    """The job went on without this node: kill its workers, then come back as a new one."""

    reason: str


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """The node is to leave, and trains on until it can. For its on-drain hook."""

    reason: str


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """The job is over: end the workers and leave. keeps: the snapshot memory stays, for the next start of the job."""

    reason: str
    keeps: bool = False


class Replicate(msgspec.Struct, frozen=True, tag="replicate"):
    """Keep a copy of this shard, too; `holders` have it."""

    copy: Copy
    holders: tuple[Holder, ...]


class SnapshotComplete(msgspec.Struct, frozen=True, tag="snapshot-complete"):
    """The snapshot of this step is whole: older ones are not needed, but for `kept`, of which more nodes hold each shard."""

    step: int
    kept: int | None = None


class ForgetSnapshots(msgspec.Struct, frozen=True, tag="forget-snapshots"):
    """Training goes on from this step: what was saved of later ones never happened. until: only up to this one, of which
    a shard is missing that nobody will bring."""

    above_step: int
    until: int | None = None


class StoreShard(msgspec.Struct, frozen=True, tag="store-shard"):
    """Write a shard that is held here to a durable tier. row: of equal bytes, written by another; only the head."""

    tier: str
    key: Key
    row: str = ""


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
    """Check this node and answer with Checked. only: names of checks; empty: all that concern the node alone.

    peers: of checks between nodes: the other one of `pair`, the whole group of `all-reduce` in the order of ranks.
    port: where this node listens in a `pair`; 0: it connects. seconds: about how long each check lasts; 0: as usual.
    """

    request: int
    deep: bool = False
    peers: tuple[Peer, ...] = ()
    only: tuple[str, ...] = ()
    port: int = 0
    seconds: float = 0.0


class Repair(msgspec.Struct, frozen=True, tag="repair"):
    """Do what an agent can do itself (`reset-device`), and answer with Repaired. Nothing of the job runs on it now."""

    request: int
    remedy: Remedy
    device: str = ""
    reason: str = ""


ToAgent = (
    Replicate
    | RunChecks
    | Repair
    | SnapshotComplete
    | ForgetSnapshots
    | StoreShard
    | Publish
    | StartWorker
    | KillWorker
    | Relay
    | Inspect
    | RunFault
    | Fence
    | Drain
    | Shutdown
)
