"""What the core remembers of nodes, workers and generations. Times are on the core's clock; None is unknown."""

from __future__ import annotations

import msgspec

from holdfast.coordinator.kernel.health_state import Checking
from holdfast.coordinator.kernel.phases import JobPhase, NodePhase, WorkerPhase
from holdfast.coordinator.kernel.restart_budget import Daily, InARow
from holdfast.protocol.causes import Cause
from holdfast.protocol.health import CLUSTER_NAME, Remedy
from holdfast.protocol.job import Durable
from holdfast.protocol.messages import Generation, Ready, Stop
from holdfast.protocol.notices import NoticeCause
from holdfast.protocol.phases import Groups, TimeClass
from holdfast.protocol.place import NodePlace
from holdfast.protocol.snapshots import Copy, Holder

SIZES_KEPT = 512
"""Changes of the world's size that a report can tell of."""


class Standing(msgspec.Struct, frozen=True):
    """A notice that the scripts were told and that was not withdrawn."""

    number: int
    """Counts the job's notices from 1 on."""
    cause: NoticeCause
    reason: str
    """For people."""
    until_s: float | None
    """When what it is about goes away, at the latest; None: nobody said."""


class Node(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One machine: an agent process, known by its session."""

    name: str
    session: str
    """New for every agent process: another one under this name is a node that starts anew."""
    host: str
    slots: int
    """How many workers it has room for."""
    last_seen_s: float
    """When its agent was last heard of."""
    phase: NodePhase = NodePhase.IN_SERVICE
    ports: tuple[int, ...] = ()
    """On which the masters of starts at level 0 may listen, if this is the job's first node."""
    failures: int = 0
    """Failures of its workers so far, under this name; of two nodes, the one with fewer is taken first."""
    used: list[int] = []
    """Slots that had a worker already."""
    strikes: int = 0
    """Volleys of workers in a row that died before they were ready."""
    struck_at_s: float = 0.0
    """When the last volley counted: a worker that was started before is of that volley."""
    fenced: bool = False
    """It was told that the job went on without it."""
    refused: str | None = None
    """Why it may not come back; None: it may."""
    place: NodePlace = ()
    """Where it stands; empty: not known."""
    snapshot_port: int = 0
    """Where its agent serves snapshot memory to other nodes; 0: nowhere."""
    snapshot_server: str = ""
    """The name that whoever listens at that port must prove."""
    leaving: str | None = None
    """Why it is to leave; None: it stays."""
    left: bool = False
    """It is gone as planned: nothing of the job was on it any more."""
    leaves_since_s: float = 0.0
    """When that was decided."""
    leaves_until_s: float | None = None
    """When it goes away at the latest; None: no limit is known."""
    excess: bool = False
    """It is to leave only because the job is to be smaller: it is kept if the job grows again meanwhile."""
    refused_steps: dict[int, int] = {}
    """Per shard (the rank of its key) the newest step of which it could not keep that shard."""
    identity: str = ""
    """What lasts of the machine, whatever its name is; empty: nothing is known."""
    devices: tuple[str, ...] = ()
    """Lasting identities of its devices."""
    held: str | None = None
    """Why it has no workers for now; None: it may have some."""
    then: Remedy | None = None
    """The remedy that is begun once nothing of the job runs on it; None: none."""
    checking: Checking | None = None
    """Its deep checks are under way, or still to be begun; None: neither."""
    lemon: str = ""
    """Why others are taken first: it failed in several jobs. Empty: it did not."""
    boots_until_s: float | None = None
    """When it should be back from a reboot, at the latest; None: none was ordered."""
    boots_for: int = 0
    """Number of the incident for which that reboot was ordered; 0: for none."""
    trial: tuple[str, ...] = ()
    """Rules that are not believed on this machine: their findings are only recorded."""
    unknown: dict[str, float] = {}
    """Rule to since when it could not be told whether it matches."""
    notice: Standing | None = None
    """What its scripts were told of its leaving; None: nothing that still stands."""

    @property
    def alive(self) -> bool:
        """It is not lost."""
        return self.phase is not NodePhase.LOST

    @property
    def machine(self) -> str:
        """What its history within this job is kept under."""
        return self.identity or self.name

    @property
    def lasting(self) -> str:
        """What its history is kept under for other jobs; empty: it cannot be told again."""
        return "" if self.identity.startswith(CLUSTER_NAME) else self.identity


class Worker(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One training process."""

    name: str
    """`node.slot#incarnation`, never used twice."""
    node: str
    slot: int
    started_s: float
    phase: WorkerPhase = WorkerPhase.STARTING
    ready: Ready | None = None
    """What it said when it was ready last; None: it has not been, or is being built again."""
    ready_at_s: float = 0.0
    committed: int | None = None
    """Committed steps that its state has; None: no usable state, or it has not said."""
    prepared: bool = False
    """As it parked, it held the complete reduced gradient of step `committed`."""
    median_s: float | None = None
    """Its median time of a step; None: not known."""
    log: str = ""
    """Path on its node; empty: it is not known to have been started."""
    told_to_end: bool = False
    """It was ordered to leave or was killed, so its end is no fault."""
    exited: bool = False
    """Its end was handled: agents may report it again."""
    joined_generation: int = 0
    """The newest generation that it is connected to; 0: none."""
    aside: bool = False
    """It does work of the script's own between two steps."""
    left: bool = False
    """It ended with exit code 0 while the job trained, without having been told to: at level 0 and 1 it may be done."""
    script_ended: bool = False
    """By the end of its script, and not by `os._exit`."""
    groups: Groups | None = None
    """How far it then was in its collectives; None: not known."""
    vanished_s: float | None = None
    """Since when its agent no longer has it, while how it ended is not known yet; None: its agent has it."""
    digest: str | None = None
    """xxh3 of the parameters after its last step; None: it has not done all steps."""
    state_digest: str | None = None
    """xxh3 of all that is to be the same in every replica after its last step; None: not said."""
    covered: tuple[str, ...] = ()
    """Names of the protected objects that this is over."""
    left_out: tuple[str, ...] = ()
    """Paths of buffers that it is not over."""
    loss: float | None = None
    """The last one that it told of; None: none yet."""
    restored: tuple[int, int] | None = None
    """Bytes of the state that it has, and of how many; None while that is not known."""
    shard_index: int = 0
    """Which shard of the state it holds, or is built for; 0 where a replica is one worker."""
    agreement: int = -1
    """As in Parked."""
    counts_until: int | None = None
    """At this step the job went on without it, at level 2: what it tells of this step and later ones happened in no training that
    counts. None: all counts."""
    rebuilds: int | None = None
    """The shard for which it was told to be built again. Until it is, what it said before is out of date.
    None: it was not told."""


class Seat(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A member's own part of the newest generation: what its JoinGeneration says beside the generation
    itself, fields as there.

    The generation is kept once, in the state. In every seat it would make the state grow with the square of
    the workers."""

    rank: int
    apply: bool = False
    restore: bool = False
    serve: bool = False
    fetches: bool = False
    """Its donors are those of its shard, `MembershipState.givers`."""
    copy: Copy | None = None
    """The shard in snapshot memory that it fetches; None: none is there to fetch."""
    holders: tuple[Holder, ...] = ()
    durable: Durable | None = None
    """The checkpoint that it reads; None: none."""
    saves: bool = False
    mtbf_s: float = 0.0
    shards: tuple[tuple[Copy, tuple[Holder, ...]], ...] = ()


class Change(msgspec.Struct, kw_only=True):
    """One planned change of the membership, from the last commit before it to the first one after."""

    id: int
    reason: str
    at_step: int
    """Committed steps when it was made."""
    before: int
    """World size before it."""
    after: int
    """World size after it."""
    left_at_s: float
    """When the last commit before it was."""
    formed_at_s: float
    """When the generation after it was formed."""
    generation: int
    """The number of the generation after it."""
    for_incidents: list[int] = []
    """Numbers of the incidents for which nodes left with it."""
    newcomers: int = 0
    """Workers that came with it."""
    join_s: float | None = None
    """The longest that a member needed to connect; None: none has."""
    restore_s: float | None = None
    """The longest that a member needed to get the state; None: none had to."""
    stall_s: float | None = None
    """Between the two commits, less the time of a usual step; None: the second has not come."""


class ChangeTotals(msgspec.Struct, omit_defaults=True):
    """Planned changes since the job's start, and for how long they stalled training."""

    count: int = 0
    stall_s: float = 0.0


class Failure(msgspec.Struct, kw_only=True):
    """One failure of user code or of a worker process, for telling the script's faults from the machine's."""

    step: int | None
    """Committed steps before the one that failed; None: it was outside of a step."""
    signature: str
    """Equal for two failures at the same place of the script, whatever numbers their messages have."""
    worker: str
    node: str
    generation: int
    also_on: tuple[str, ...] = ()
    """Other nodes whose workers had raised the same in this attempt; known at level 0 only."""
    lasted_s: float = 0.0
    """For how long its process had run; known at level 0 only."""


class Blame(msgspec.Struct, kw_only=True):
    """What is printed last: the first failing rank, its node, the cause, the last lines and the log."""

    cause: Cause
    rank: int | None = None
    """The first that failed; None: nobody in particular."""
    node: str | None = None
    """None: no node in particular."""
    step: int | None = None
    """Committed steps at that time; None: not known."""
    traceback: str = ""
    """Of the worker; empty: it left none."""
    tail: list[str] = []
    """The last lines of the log."""
    log: str = ""
    """Path on the node; empty: not known."""


class Counted(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Optimizer steps at level 0 and 1; positions are committed steps since the job's start."""

    earlier: int = 0
    """Steps of the starts before this one, those that were done again included."""
    before: int = 0
    """Of those, the steps of the last one."""
    asked: bool = False
    """It was said that the script does not seem to resume."""
    base: int | None = 0
    """The position that this start's count begins at; None: not known (yet)."""
    left_at: int | None = 0
    """The position at which the start before ended; None: not known."""
    given: dict[int, int] = {}
    """The script's own number of a state that it gave, to its position."""
    gives: bool = False
    """It has given one."""
    lost: int = 0
    """Steps that were done again, as far as is known."""
    known: bool = True
    """No others were."""
    loaded_first: int | None = None
    """Of which state the first start went on, by the script's own number, as `step_accounting` has it; None: not known."""


class TimeMark(msgspec.Struct, omit_defaults=True, kw_only=True):
    """What the account held at one moment. What is learned later moves seconds in it as in the account itself."""

    at_s: float
    """When, on the coordinator's clock."""
    spent_s: dict[TimeClass, float] = {}
    rolled_back_s: float = 0.0
    within_s: dict[TimeClass, float] = {}
    """Snapshots' stalls included."""


class TimeAccount(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Where the job's wall time went, each second in one class. The newest stretch is open: its class is `doing`. Written by
    `wall_time`."""

    spent_s: dict[TimeClass, float] = {}
    """Seconds of each class, without the open stretch."""
    doing: TimeClass = TimeClass.UNEXPLAINED
    since_s: float | None = None
    """When the open stretch began; None: the job has not begun."""
    torn: tuple[float, float] | None = None
    """The newest stretch that a fault ended, until it is divided at the time of the fault."""
    join_s: float | None = None
    """The longest that a member of the newest generation needed to connect; None: none has."""
    restore_s: float = 0.0
    """The longest that one needed to get the state."""
    rolled_back_s: float = 0.0
    """Seconds of steps that had to be done again."""
    strength: int = 0
    """Workers that compute in the newest generation; 0: there was none."""
    within_s: dict[TimeClass, float] = {}
    """Of the steps that stayed, the seconds that were lost in them, by class."""
    away: set[str] = set()
    """Workers that do work of the script's own between two steps."""
    resumes: TimeClass = TimeClass.COMPUTED
    """While `doing` is PAUSED: what goes on after it."""
    script_s: float = 0.0
    """In the newest generation, the most that a member has told of `Progress.script_s`."""
    settled_s: float = 0.0
    """How much of that is in its class, or cannot be any more."""
    open_s: float = 0.0
    """COMPUTED since the newest step."""
    step_s: float = 0.0
    """COMPUTED that led to the newest step: what late words of it may still move to PAUSED."""
    told: list[tuple[int, float]] = msgspec.field(default_factory=lambda: [(0, 0.0)])
    """Of some positions (committed steps), rising, the seconds of the steps before it that stayed; thinner the older they are."""
    marks: list[TimeMark] = []
    """Every few minutes of the last hour, and one from before, oldest first: what a sliding goodput is counted from."""


class Halting(msgspec.Struct, omit_defaults=True, kw_only=True):
    """How far the workers of one replica agree on where they leave a broken step."""

    begun: dict[str, int] = {}
    """By group, the most calls that any of them has begun: where all are to stand."""
    stands: dict[str, int] = {}
    """Of each worker that has answered, the number of the agreement at which it stands; -1: it does not."""
    first: dict[str, int] = {}
    """What the first one that answered had begun."""
    alike: bool = True
    """All first answers were the same, so nobody has to go on."""
    agreement: int = 0
    """Number of the newest RunTo; 0: none yet."""
    left: bool = False
    """It told all to leave."""


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
    """The newest; None: there was none at this level."""
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
    pace: list[tuple[float, int]] = []
    """When the job stood at which position, oldest first: what its rate is counted from. Written by `pace`."""
    lost_steps: int = 0
    """Steps that were committed and had to be done again, at level 2."""
    last_step: int | None = None
    """Where the job stops, once that is decided; 0: its state is not complete there."""
    keeps_memory: bool = False
    """The job ended, and the nodes' memory has a state that no durable tier has."""
    unsaved: int | None = None
    """The job ended with the state of this step, and no durable tier has it."""
    failures: list[Failure] = []
    blames: dict[str, Blame] = {}
    """By worker."""
    blame: Blame | None = None
    """What is printed last."""
    restarts_used: int = 0
    """Workers that were started again, or at level 0 starts of all."""
    in_a_row: InARow = msgspec.field(default_factory=InARow)
    """Of those, against `JobSpec.max_restarts`."""
    replacing: int = 0
    """Nodes that the engine was asked for and that have not come."""
    replaced: int = 0
    """Nodes that the engine was ever asked for."""
    asked_daily: Daily = msgspec.field(default_factory=Daily)
    """Of those, the ones in the place of others that failed."""
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
    """Why the job was asked to end, or gave up, in words; None: it was not."""
    stop_cause: NoticeCause | None = None
    """The same for programs; None: it was not stopped."""
    notice: Standing | None = None
    """What all scripts were told of the end of the job."""
    notices: int = 0
    """Notices that were ever given: numbers them."""
    outcome: str | None = None
    """"finished", "stopped" or "failed"; None: that is not decided."""
    history: list[tuple[float, int]] = []
    """World sizes, and when they began, in seconds since the job's start: the newest, and of a long past every so many."""
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
    until: int | None = None
    """Committed steps after which the job is done, once a worker has said so. For people alone: the script decides."""
    samples: str | None = None
    """Folder in which workers record their samples, as the newest one named it. For people alone."""
    shape: tuple[int, int] = (1, 1)
    """Of a replica: shard degree and tensor degree, once a worker has said so."""
    halting: dict[int, Halting] = {}
    """Replicas that leave a broken step together."""
    inspect_request: int = 0
    """Number of the newest Inspect."""
    look_again_s: float = 0.0
    """At level 0: a stall is not looked at before."""
    stall_rounds: int = 0
    """Hangs in a row that were met by another attempt."""
    figures: dict[str, tuple[int, float]] = {}
    """What the script logs: name to step and value."""

    def resized(self, t_s: float, world: int) -> None:
        """A generation of so many workers begins."""
        self.history.append((t_s, world))
        # The state is written with each decision, and a report tells how the size went, not each of a thousand changes.
        if len(self.history) > SIZES_KEPT:
            del self.history[1 : SIZES_KEPT // 2 : 2]

    @property
    def counts_steps(self) -> bool:
        """Workers commit their steps through Holdfast, so `committed` counts from the job's start. At level 0 and 1 only the
        script knows where a start went on from: see `step_accounting`."""
        return self.level == 2

    @property
    def most_workers(self) -> int | None:
        """So many workers have a micro-batch of each global batch; None: not known, or level 0 or 1."""
        # A replica computes as many at a time as its shard degree.
        return max(1, self.micro_batches // self.shape[0]) * self.shard_count if self.micro_batches else None

    @property
    def shard_count(self) -> int:
        """Workers of a replica."""
        return self.shape[0] * self.shape[1]
