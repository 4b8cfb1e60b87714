"""What the coordinator knows: plain values, so that a snapshot of them is the coordinator.

Times are seconds on the clock that drives the core (`now` of `Core.handle`); None means unknown.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from holdfast.coordinator.kernel.health_state import Checking, Evidence, Health
from holdfast.protocol.causes import Cause
from holdfast.protocol.health import Remedy, Severity
from holdfast.protocol.job import Durable, JobSpec
from holdfast.protocol.messages import Generation, Ready, Stop
from holdfast.protocol.snapshots import Copy, Holder, Key, Shard


class JobPhase(StrEnum):
    """What the job as a whole is doing."""

    GATHERING = "gathering"  # no generation: waiting for workers to form one
    RUNNING = "running"
    BREAKING = "breaking"  # a generation ended; its members are reporting
    STOPPING = "stopping"  # workers save and leave
    ENDED = "ended"


class WorkerPhase(StrEnum):
    """What one worker is doing, as far as the coordinator was told."""

    STARTING = "starting"
    ATTACHED = "attached"  # the script called holdfast.start
    READY = "ready"  # model built, waiting: a spare
    MEMBER = "member"  # in the running generation
    PARKED = "parked"  # out of a broken generation, holding its state
    DONE = "done"
    GONE = "gone"


ALIVE = frozenset(set(WorkerPhase) - {WorkerPhase.GONE})


class Node(msgspec.Struct, omit_defaults=True):
    """One machine: an agent process, known by its session.

    used: slots that had a worker already. strikes: volleys of workers in a row that died before they were ready.
    fenced: it was told that the job went on without it. refused: why it may not come back, if it may not.
    leaving: why it is to leave, if it is; leaves_until_s: how long it has, if that is limited; excess: only because
    the job is to be smaller. refused_steps: per shard the newest
    step of which it could not keep it. identity, devices: what
    lasts of the machine. held: why it has no workers for now. then: what is done when it has left. checking: its deep
    checks are under way. lemon: it failed in several jobs, and others are taken first. boots_until_s: until when it is to be back
    from a reboot, and for which incident it was ordered. trial: rules that are not
    believed on it. unknown: rule to since when it could not be told.
    """

    name: str
    session: str
    host: str
    slots: int
    last_seen_s: float
    alive: bool = True
    ports: tuple[int, ...] = ()
    failures: int = 0
    used: list[int] = []
    strikes: int = 0
    struck_at_s: float = 0.0
    fenced: bool = False
    refused: str | None = None
    rack: str | None = None
    snapshot_port: int = 0
    snapshot_server: str = ""
    leaving: str | None = None
    leaves_since_s: float = 0.0
    leaves_until_s: float | None = None
    excess: bool = False
    refused_steps: dict[int, int] = {}
    identity: str = ""
    devices: tuple[str, ...] = ()
    held: str | None = None
    then: Remedy | None = None
    checking: Checking | None = None
    lemon: str = ""
    boots_until_s: float | None = None
    boots_for: int = 0
    trial: tuple[str, ...] = ()
    unknown: dict[str, float] = {}

    @property
    def machine(self) -> str:
        """What its history is kept under."""
        return self.identity or self.name


class Worker(msgspec.Struct, omit_defaults=True):
    """One training process. `name` is `node.slot#incarnation` and never used twice.

    joined: the newest generation that it is connected to. restored: bytes of the state that it has, and of how many;
    None while that is not known. vanished_s: since when its agent no longer has it, while
    how it ended is not known yet. shard_index: which shard of the state it holds, or is built for. rebuilds: for which it
    was told to be built again; until it is, what it said before is out of date. begun: as in Parked. aside: it does work
    of the script's own between two steps.
    """

    name: str
    node: str
    slot: int
    started_s: float
    phase: WorkerPhase = WorkerPhase.STARTING
    ready: Ready | None = None
    ready_at_s: float = 0.0
    committed: int | None = None
    prepared: bool = False
    median_s: float | None = None
    log: str = ""
    told_to_end: bool = False
    exited: bool = False
    joined: int = 0
    aside: bool = False
    vanished_s: float | None = None
    digest: str | None = None
    loss: float | None = None
    restored: tuple[int, int] | None = None
    shard_index: int = 0
    begun: int = -1
    rebuilds: int | None = None


class Seat(msgspec.Struct, frozen=True, omit_defaults=True):
    """A member's own part of the newest generation: what its JoinGeneration says beside the generation itself, fields as there.

    The generation is kept once, in the state. In every seat it would make the state grow with the square of the workers.
    fetches: its donors are those of its shard, `CoreState.givers`.
    """

    rank: int
    apply: bool = False
    restore: bool = False
    serve: bool = False
    fetches: bool = False
    copy: Copy | None = None
    holders: tuple[Holder, ...] = ()
    durable: Durable | None = None
    saves: bool = False
    mtbf_s: float = 0.0
    shards: tuple[tuple[Copy, tuple[Holder, ...]], ...] = ()


class Incident(msgspec.Struct, omit_defaults=True):
    """One fault, from its first sign to the first commit at full strength.

    world: members of the generation that it struck, so what full strength means for it. rule: of the finding that
    explains it; firm: one is enough; severity, asked: the worst of all findings. quiet: training was not disturbed.
    evidence: what was seen, oldest first; heard_s: when last. due_s: when it will be decided. does: what is done; verdict:
    that in words. where: of a hang, where all ranks stood. raised: the first sign was an error of a worker at level 0.
    """

    id: int
    cause: Cause
    node: str | None
    ranks: list[int]
    at_step: int | None
    fault_at_s: float | None
    detected_at_s: float
    generation: int
    world: int = 1
    fault: str | None = None
    injected: bool = False
    workers: list[str] = []
    rung: str | None = None
    decided_at_s: float | None = None
    replaced_at_s: float | None = None
    joined_at_s: float | None = None
    join_s: float | None = None
    restore_s: float | None = None
    first_commit_at_s: float | None = None
    full_at_s: float | None = None
    lost_steps: int | None = None
    needs_newcomer: bool = False
    rule: str = ""
    device: str = ""
    source: str = ""
    firm: bool = False
    severity: Severity = Severity.INFO
    asked: Remedy = Remedy.WATCH
    quiet: bool = False
    heard_s: float = 0.0
    due_s: float | None = None
    does: Remedy | None = None
    verdict: str = ""
    evidence: list[Evidence] = []
    where: str = ""
    raised: bool = False
    earlier_stalls: int = 0
    earlier_stall_s: float = 0.0

    @property
    def began_s(self) -> float:
        """The fault if its time is known, else its first sign."""
        return self.detected_at_s if self.fault_at_s is None else self.fault_at_s

    @property
    def open(self) -> bool:
        """Not yet back at full strength."""
        return self.full_at_s is None


class Change(msgspec.Struct):
    """One planned change of the membership, from the last commit before it to the first one after.

    before, after: world sizes. joined: newcomers in it. join_s, restore_s: the longest that a member needed to connect,
    and to get the state.
    """

    id: int
    reason: str
    at_step: int
    before: int
    after: int
    left_at_s: float
    formed_at_s: float
    generation: int
    joined: int = 0
    join_s: float | None = None
    restore_s: float | None = None
    stall_s: float | None = None


class Slow(msgspec.Struct):
    """A worker that computes longer than its peers, so that all wait for it.

    ratio: its time over theirs. part: of a step in which it needs most more. excess_s: more per step. share: of a step's
    time for which the others wait. world: how many they are, with it. pair: it has only one peer. lost_s: of training
    time so far. until_step: since when it is as fast as they are, or gone. asked_s: what was
    lost when its replacement was asked for last.
    """

    worker: str
    node: str
    rank: int | None
    ratio: float
    since_step: int
    found_step: int
    part: str
    excess_s: float
    share: float
    world: int
    pair: bool = False
    lost_s: float = 0.0
    until_step: int | None = None
    asked_s: float = 0.0


class ChangeTotals(msgspec.Struct, omit_defaults=True):
    """Planned changes since the job's start, and for how long they stalled training."""

    count: int = 0
    stall_s: float = 0.0


class Failure(msgspec.Struct):
    """One failure of user code or of a worker process, for telling the script's faults from the machine's."""

    step: int | None
    signature: str
    worker: str
    node: str
    generation: int


class Blame(msgspec.Struct):
    """What is printed last: the first failing rank, its node, the cause, the last lines and the log."""

    cause: Cause
    rank: int | None = None
    node: str | None = None
    step: int | None = None
    traceback: str = ""
    tail: list[str] = []
    log: str = ""


class Injection(msgspec.Struct):
    """An injected fault that no incident has claimed yet."""

    fault: str
    kind: str
    at_s: float
    node: str | None = None
    worker: str | None = None


class HeldShard(msgspec.Struct):
    """A shard of a snapshot, the nodes that hold it, and those that were asked to hold it too."""

    copy: Copy
    nodes: list[str] = []
    asked: list[str] = []


class Snapshot(msgspec.Struct):
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


class Storing(msgspec.Struct):
    """A checkpoint on its way to a durable tier, or the last one that came there.

    waiting: rank to the node that writes its shard; -1: the manifest. rows: rank to the row that it shares.
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
    rows: dict[int, str] = {}
    shards: list[Shard] = []
    void: bool = False
    written: dict[int, tuple[int, int]] = {}
    moved_s: float = 0.0
    slow: bool = False
    skipped: int = 0
    seen_step: int = 0
    seen_s: float = 0.0
    last: bool = False


class TierTotals(msgspec.Struct):
    """What came to a durable tier since the job's start. failures: checkpoints that it did not take. skipped: those
    that were due while an older one was on its way."""

    checkpoints: int = 0
    nbytes: int = 0
    took_s: float = 0.0
    failures: int = 0
    skipped: int = 0


class SavingTotals(msgspec.Struct):
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


class Counted(msgspec.Struct, omit_defaults=True):
    """Optimizer steps at level 0 and 1; positions are committed steps since the job's start.

    earlier: steps of the starts before this one. base: the position that this start's count begins at; None: not known (yet).
    left_at: where the start before ended. given: the script's own number of a state that it gave to its position. gives:
    it has given one. lost: steps that were done again, as far as is known; known: there are no others.
    """

    earlier: int = 0
    base: int | None = 0
    left_at: int | None = 0
    given: dict[int, int] = {}
    gives: bool = False
    lost: int = 0
    known: bool = True


class CoreState(msgspec.Struct):
    """Everything that the core remembers. Its size is linear in the number of workers.

    seats: of the newest generation's members. givers: for each shard the ranks that its state is fetched from. broke_cause: why the newest generation broke, until an incident explains it. fruitless: generations in a row
    that broke without a commit and without anyone to blame. unheard_s: for so long nobody listened since it broke. bad_starts: volleys of workers in a row that died
    before they were ready. joined: nodes that ever came. stops: who was told to leave, and how. waiting: the ledger
    says that the job waits for workers. asked_nodes, capacity_nodes: what a person wants, and what the engine allows.
    unpaid: nodes that may be asked for beside the restart budget. grows: at level 0, all start again when there are
    nodes for a larger size that was asked for. change_reason: why the generation that ends now does, as planned.
    grew_at_s, join_cost_s: when newcomers came last, and for how long that stalled training. micro_batches: in a
    global batch, once a worker has said so. shape: of a replica: shard degree, and tensor degree, likewise. halting:
    replica to how far its workers said that they are. stored: tier to the last checkpoint that came there (or was tried).
    older: what to go on from if `durable` proves to be damaged, newest first. durable_tries: generations in a row that
    could not be restored from it. unread: why checkpoints that are there will not do. last_from: nodes
    that were given the state after the last step, and the shards of it. summing: node, shard and since when: it is complete
    there and its worker has ended; SnapshotStored or SnapshotRejected follows. last_failed: tiers that did not take the last state.
    last_step: where the job stops, once that is decided; 0: its state is not whole there. keeps_memory: the job ended, and
    the nodes' memory has a state that no durable tier has.
    doubtful: tier to the manifest that could not be written, as far as is known.
    closed: so many of the oldest incidents are closed.
    brought: node to the steps of which its own part was not finite. figures: what the script logs: name to step and value.
    skipped: shards that no node could keep since the last whole snapshot. told_whole: what agents were told last of whole
    snapshots: the newest, and an older one that is kept beside it. rewinds: oldest first, their starts rising.
    """

    spec: JobSpec
    phase: JobPhase = JobPhase.GATHERING
    level: int | None = None
    nodes: dict[str, Node] = {}
    workers: dict[str, Worker] = {}
    incarnations: int = 0
    number: int = 0
    generation: Generation | None = None
    seats: dict[str, Seat] = {}
    givers: tuple[tuple[int, ...], ...] = ()
    yielding: bool = False
    committed: int = 0
    generation_committed: int = 0
    counted: Counted = msgspec.field(default_factory=Counted)
    lost_steps: int = 0
    durable: Durable | None = None
    older: list[Durable] = []
    durable_tries: int = 0
    unread: list[str] = []
    last_from: list[tuple[str, int]] = []
    summing: list[tuple[str, Key, float]] = []
    last_step: int | None = None
    last_failed: list[str] = []
    keeps_memory: bool = False
    snapshots: list[Snapshot] = []
    told_whole: tuple[int, int | None] | None = None
    rewinds: list[Rewind] = []
    buddy_groups: list[list[str]] = []
    short_of_copies: bool = False
    skipped: int = 0
    storing: list[Storing] = []
    stored: dict[str, Storing] = {}
    doubtful: dict[str, Storing] = {}
    failing_tiers: list[str] = []
    totals: SavingTotals = msgspec.field(default_factory=SavingTotals)
    incidents: list[Incident] = []
    closed: int = 0
    failures: list[Failure] = []
    blames: dict[str, Blame] = {}
    injections: list[Injection] = []
    restarts_used: int = 0
    replacing: int = 0
    replaced: int = 0
    joined: int = 0
    asked_at_s: float = 0.0
    ask_after_s: float | None = None
    bad_starts: int = 0
    bad_start_at_s: float = 0.0
    start_after_s: float | None = None
    master_uses: int = 0
    stop_reason: str | None = None
    outcome: str | None = None
    blame: Blame | None = None
    history: list[tuple[float, int]] = []
    began_s: float = 0.0
    formed_at_s: float = 0.0
    broke_cause: Cause | None = None
    broke_at_s: float = 0.0
    unheard_s: float = 0.0
    fruitless: int = 0
    stops: dict[str, Stop] = {}
    break_deadline_s: float | None = None
    form_deadline_s: float | None = None
    form_after_s: float | None = None
    wait_deadline_s: float | None = None
    waiting: bool = False
    asked_nodes: int | None = None
    capacity_nodes: int | None = None
    unpaid: int = 0
    grows: bool = False
    changes: list[Change] = []
    changed: ChangeTotals = msgspec.field(default_factory=ChangeTotals)
    change_reason: str | None = None
    grew_at_s: float = 0.0
    join_cost_s: float = 0.0
    micro_batches: int | None = None
    shape: tuple[int, int] = (1, 1)
    halting: dict[int, dict[str, int]] = {}
    stop_deadline_s: float | None = None
    inspect_request: int = 0
    inspect_deadline_s: float | None = None
    look_again_s: float = 0.0
    stall_rounds: int = 0
    slow: list[Slow] = []
    brought: dict[str, list[int]] = {}
    figures: dict[str, tuple[int, float]] = {}
    health: Health = msgspec.field(default_factory=Health)

    @property
    def step(self) -> int | None:
        """Committed steps of the state that training is at. At level 0 and 1 since the job's start; None: not known."""
        if self.level == 2:
            return self.committed
        return None if self.counted.base is None else self.counted.base + self.committed

    @property
    def wanted_nodes(self) -> int:
        """Nodes to train on: as asked for, and no more than there may be."""
        asked = self.spec.max_nodes if self.asked_nodes is None else self.asked_nodes
        return asked if self.capacity_nodes is None else max(0, min(asked, self.capacity_nodes))

    @property
    def target(self) -> int:
        """Workers at full strength: as many as make whole replicas."""
        workers = self.wanted_nodes * self.spec.nproc
        return workers - workers % self.shard_count

    @property
    def minimum(self) -> int:
        """Fewest workers to train with."""
        return self.target if self.spec.wait_for_spare else self.spec.min_nodes * self.spec.nproc

    @property
    def needed(self) -> int:
        """So many workers that compute make up the smallest job: whole replicas."""
        return -(-max(1, self.minimum) // self.shard_count) * self.shard_count

    @property
    def least_nodes(self) -> int:
        """Nodes that hold the smallest job."""
        return -(-self.needed // self.spec.nproc)

    @property
    def shard_count(self) -> int:
        """Workers of a replica."""
        return self.shape[0] * self.shape[1]
