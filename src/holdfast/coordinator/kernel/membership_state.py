"""What the core remembers of nodes, workers and generations. Times are on the core's clock; None is unknown."""

from __future__ import annotations

import msgspec

from holdfast.coordinator.kernel.health_state import Checking
from holdfast.coordinator.kernel.phases import JobPhase, NodePhase, WorkerPhase
from holdfast.protocol.causes import Cause
from holdfast.protocol.health import Remedy
from holdfast.protocol.job import Durable
from holdfast.protocol.messages import Generation, Ready, Stop
from holdfast.protocol.notices import NoticeCause
from holdfast.protocol.snapshots import Copy, Holder
from holdfast.protocol.time_classes import TimeClass


class Standing(msgspec.Struct, frozen=True):
    """A notice that the scripts were told and that was not withdrawn. until_s: when what it is about goes away, at the latest."""

    number: int
    cause: NoticeCause
    reason: str
    until_s: float | None


class Node(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One machine: an agent process, known by its session.

    used: slots that had a worker already. strikes: volleys of workers in a row that died before they were ready.
    fenced: it was told that the job went on without it. refused: why it may not come back, if it may not.
    leaving: why it is to leave, if it is; leaves_until_s: how long it has, if that is limited; excess: only because
    the job is to be smaller. refused_steps: per shard the newest
    step of which it could not keep it. identity, devices: what
    lasts of the machine. held: why it has no workers for now. then: what is done when it has left. checking: its deep
    checks are under way. lemon: it failed in several jobs, and others are taken first. boots_until_s: until when it is to be back
    from a reboot, and for which incident it was ordered. trial: rules that are not
    believed on it. unknown: rule to since when it could not be told. notice: what its scripts were told of its leaving.
    """

    name: str
    session: str
    host: str
    slots: int
    last_seen_s: float
    phase: NodePhase = NodePhase.IN_SERVICE
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
    notice: Standing | None = None

    @property
    def alive(self) -> bool:
        """It is not lost."""
        return self.phase is not NodePhase.LOST

    @property
    def machine(self) -> str:
        """What its history is kept under."""
        return self.identity or self.name


class Worker(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One training process. `name` is `node.slot#incarnation` and never used twice.

    joined_generation: the newest generation that it is connected to. restored: bytes of the state that it has, and of how many;
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
    joined_generation: int = 0
    aside: bool = False
    vanished_s: float | None = None
    digest: str | None = None
    loss: float | None = None
    restored: tuple[int, int] | None = None
    shard_index: int = 0
    begun: int = -1
    rebuilds: int | None = None


class Seat(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
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


class Change(msgspec.Struct, kw_only=True):
    """One planned change of the membership, from the last commit before it to the first one after.

    before, after: world sizes. newcomers: workers that came with it. join_s, restore_s: the longest that a member needed to connect,
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
    newcomers: int = 0
    join_s: float | None = None
    restore_s: float | None = None
    stall_s: float | None = None


class ChangeTotals(msgspec.Struct, omit_defaults=True):
    """Planned changes since the job's start, and for how long they stalled training."""

    count: int = 0
    stall_s: float = 0.0


class Failure(msgspec.Struct, kw_only=True):
    """One failure of user code or of a worker process, for telling the script's faults from the machine's."""

    step: int | None
    signature: str
    worker: str
    node: str
    generation: int


class Blame(msgspec.Struct, kw_only=True):
    """What is printed last: the first failing rank, its node, the cause, the last lines and the log."""

    cause: Cause
    rank: int | None = None
    node: str | None = None
    step: int | None = None
    traceback: str = ""
    tail: list[str] = []
    log: str = ""


class Counted(msgspec.Struct, omit_defaults=True, kw_only=True):
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


class TimeAccount(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Where the job's wall time went, each second in one class. The newest stretch is open: its class is `doing`. Written by
    `wall_time`."""

    spent_s: dict[TimeClass, float] = {}
    """Seconds of each class, without the open stretch."""
    doing: TimeClass = TimeClass.UNEXPLAINED
    since_s: float | None = None
    """When the open stretch began; None: an older version wrote this state, and all until now is unexplained."""
    torn: tuple[float, float] | None = None
    """The newest stretch that a fault ended, until it is divided at the time of the fault."""
    join_s: float | None = None
    """The longest that a member of the newest generation needed to connect; None: none has."""
    restore_s: float = 0.0
    """The longest that one needed to get the state."""
    rolled_back_s: float = 0.0
    """Seconds of steps that had to be done again."""
    within_s: dict[TimeClass, float] = {}
    """Of the steps that stayed, the seconds that were lost in them, by class."""
    away: list[str] = []
    """Workers that do work of the script's own between two steps."""
    told: list[tuple[int, float]] = msgspec.field(default_factory=lambda: [(0, 0.0)])
    """Of some positions (committed steps), rising, the seconds of the steps before it that stayed; thinner the older they are."""


class MembershipState(msgspec.Struct, kw_only=True):
    """Nodes, workers and generations, and how the job goes on. Written by `membership`; phases by `transitions` alone."""

    phase: JobPhase = JobPhase.GATHERING
    level: int | None = None
    """2 once a script called `holdfast.start`; None while no worker has."""
    nodes: dict[str, Node] = {}
    """By name, in the order in which they joined; those that are gone are kept for a while."""
    workers: dict[str, Worker] = {}
    """By name, oldest first; those that are gone are kept for a while."""
    incarnations: int = 0
    """Workers that were ever started: makes their names unique."""
    number: int = 0
    """Of the newest generation; 0: there was none."""
    generation: Generation | None = None
    seats: dict[str, Seat] = {}
    """Of the newest generation's members, by worker."""
    givers: tuple[tuple[int, ...], ...] = ()
    """Of each position, the ranks that its state is fetched from."""
    yielding: bool = False
    """The newest generation ends at its next commit."""
    committed: int = 0
    """Steps; at level 0 and 1 those of this start."""
    generation_committed: int = 0
    """Steps that the newest generation was seen to have committed; its start while it has committed none."""
    counted: Counted = msgspec.field(default_factory=Counted)
    wall: TimeAccount = msgspec.field(default_factory=TimeAccount)
    lost_steps: int = 0
    """Steps that were committed and had to be done again, at level 2."""
    last_step: int | None = None
    """Where the job stops, once that is decided; 0: its state is not complete there."""
    keeps_memory: bool = False
    """The job ended, and the nodes' memory has a state that no durable tier has."""
    failures: list[Failure] = []
    blames: dict[str, Blame] = {}
    """By worker."""
    blame: Blame | None = None
    """What is printed last."""
    restarts_used: int = 0
    """Workers that were started again, or at level 0 starts of all, against `JobSpec.max_restarts`."""
    replacing: int = 0
    """Nodes that the engine was asked for and that have not come."""
    replaced: int = 0
    """Nodes that the engine was ever asked for."""
    nodes_joined: int = 0
    """Nodes that ever came."""
    asked_at_s: float = 0.0
    """When the engine was last asked for a node."""
    bad_starts: int = 0
    """Volleys of workers in a row that died before they were ready."""
    bad_start_at_s: float = 0.0
    master_uses: int = 0
    """Starts at level 0: each uses another of the first node's ports."""
    stop_reason: str | None = None
    """Why the job was asked to end, or gave up; None: it was not."""
    notice: Standing | None = None
    """What all scripts were told of the end of the job."""
    notices: int = 0
    """Notices that were ever given: numbers them."""
    outcome: str | None = None
    history: list[tuple[float, int]] = []
    """World sizes, and when they began: seconds since the job's start."""
    formed_at_s: float = 0.0
    broke_cause: Cause | None = None
    """Why the newest generation broke, until an incident explains it."""
    broke_at_s: float = 0.0
    unheard_s: float = 0.0
    """For so long nobody listened since it broke."""
    fruitless: int = 0
    """Generations in a row that broke without a commit and without anyone to blame."""
    stops: dict[str, Stop] = {}
    """Who was told to leave, and how."""
    waiting: bool = False
    """The ledger says that the job waits for workers."""
    asked_nodes: int | None = None
    """What a person wants."""
    capacity_nodes: int | None = None
    """What the engine allows."""
    unpaid: int = 0
    """Nodes that may be asked for beside the restart budget."""
    grows: bool = False
    """At level 0: all start again when there are nodes for a larger size that was asked for."""
    changes: list[Change] = []
    changed: ChangeTotals = msgspec.field(default_factory=ChangeTotals)
    change_reason: str | None = None
    """Why the generation that ends now does, as planned."""
    grew_at_s: float = 0.0
    """When newcomers came last."""
    join_cost_s: float = 0.0
    """For how long that stalled training."""
    micro_batches: int | None = None
    """In a global batch, once a worker has said so."""
    shape: tuple[int, int] = (1, 1)
    """Of a replica: shard degree and tensor degree, once a worker has said so."""
    halting: dict[int, dict[str, int]] = {}
    """Replica to how many collectives each of its workers said that it has begun."""
    inspect_request: int = 0
    """Number of the newest Inspect."""
    look_again_s: float = 0.0
    """At level 0: a stall is not looked at before."""
    stall_rounds: int = 0
    """Hangs in a row that were met by another attempt."""
    figures: dict[str, tuple[int, float]] = {}
    """What the script logs: name to step and value."""

    @property
    def counts_steps(self) -> bool:
        """Workers commit their steps through Holdfast, so `committed` counts from the job's start. At level 0 and 1 only the
        script knows where a start went on from: see `step_accounting`."""
        return self.level == 2

    @property
    def shard_count(self) -> int:
        """Workers of a replica."""
        return self.shape[0] * self.shape[1]
