"""The messages between worker, agent and coordinator: typed, versioned, no behaviour.

Four directions, with one union for each. A worker talks to its agent over a Unix socket; the agent relays what
the coordinator needs to know, tagged with the worker's name. Times are seconds; steps count from 0, and
`committed` is the number of committed steps, so it is also the index of the next one.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import cached_property
from typing import Annotated, NamedTuple

import msgspec
import xxhash

from holdfast.protocol.faults import ArmedFault
from holdfast.protocol.health import MOST_READINGS, SUBJECT_CHARS, CheckResult, Finding, Remedy
from holdfast.protocol.job import Durable
from holdfast.protocol.notices import Notice
from holdfast.protocol.phases import Groups, PageReading, Spent
from holdfast.protocol.place import NodePlace
from holdfast.protocol.snapshots import Copy, DurableTier, Holder, Key, Lack, Shard

# What several messages are made of.


class LedgerMark(NamedTuple):
    """How far a ledger has been written. Marks are ordered: a later term began with everything that it knew of earlier ones, so
    it is greater."""

    term: int = 0
    batch: int = 0
    """Number of its newest batch, from 1 and over all terms; 0: it has none."""


# Complete replicas have numbers from 0 on. -1 is a worker beside them: it computes no gradient, yet takes
# part in every update, so its shard stays current and can complete a replica at once.
class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One worker of a generation, and where the others reach it."""

    rank: int
    worker: str
    node: str
    slot: int
    host: str = ""
    """Where the two ports are."""
    vote_port: int = 0
    """For the control channel."""
    data_port: int = 0
    """Where it serves its state."""
    replica: int = 0
    """Its replica's number; -1: that is not complete, so the worker computes nothing but keeps its shard
    current."""
    shard_index: int = 0
    """Which shard of the state it holds; 0 where a replica is one worker."""


class Generation(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One version of the membership.

    It is asked for one member at a time, of thousands: what is found for that is kept beside the fields (`dict=True`).
    """

    number: int
    """Counts from 1 on."""
    members: tuple[Member, ...]
    """In the order of their ranks: replica by replica, in each by shard, then those whose replica is not
    complete."""
    start: int = 0
    """Committed steps that it goes on from."""
    shape: tuple[int, int] = (1, 1)
    """Workers of a replica: shard degree, and tensor degree."""
    groups_connected_in: tuple[int, ...] = ()
    """For every complete replica, the number of the generation in which its own process groups were
    connected; empty where a replica is one worker."""

    @property
    def shard_count(self) -> int:
        """Workers of a replica."""
        return self.shape[0] * self.shape[1]

    @cached_property
    def replicas(self) -> int:
        """Complete ones."""
        # Derived and not a field, so that no two fields of a generation can contradict each other. Found by halves: those
        # of complete replicas come first.
        return bisect_left(self.members, True, key=lambda m: m.replica < 0) // self.shard_count

    @property
    def strength(self) -> int:
        """Workers that compute: those of complete replicas."""
        return self.replicas * self.shard_count

    def replica_group(self, shard_index: int) -> tuple[int, ...]:
        """The ranks that hold this shard."""
        # Also those beside the replicas: they hold the same bytes, so they may be donors and savers.
        return self._replica_groups.get(shard_index, ())

    @cached_property
    def _replica_groups(self) -> dict[int, tuple[int, ...]]:
        found: dict[int, list[int]] = {}
        for member in self.members:
            found.setdefault(member.shard_index, []).append(member.rank)
        return {shard_index: tuple(ranks) for shard_index, ranks in found.items()}

    def replica_members(self, replica: int) -> tuple[Member, ...]:
        """Those of a complete replica."""
        return self.members[replica * self.shard_count : (replica + 1) * self.shard_count]

    def member(self, worker: str) -> Member | None:
        """Of this name; None: it is no member."""
        return self._by_worker.get(worker)

    @cached_property
    def _by_worker(self) -> dict[str, Member]:
        return {member.worker: member for member in self.members}

    def rank_of(self, worker: str) -> int | None:
        """The worker's rank; None when it is not a member."""
        found = self.member(worker)
        return None if found is None else found.rank

    @cached_property
    def digest(self) -> str:
        """xxh3 of all of it."""
        return xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode(self))


# A generation is sent to thousands of nodes as what has changed since the one that they have: `generation_difference`.


class Kept(msgspec.Struct, frozen=True, array_like=True, tag="k"):
    """Members of the generation before, with the ranks that follow each other."""

    first: int
    """Their first rank in it."""
    count: int


class NewMember(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Where others reach a worker that was no member."""

    node: int
    """Position in `Came.nodes`."""
    slot: int
    name: int | str
    """Its incarnation, where its name is `NODE.SLOT#INCARNATION`; else the whole name."""
    vote_port: int
    data_port: int
    shard_index: int


class Came(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    """Members that were in no generation before."""

    nodes: tuple[tuple[str, str], ...]
    """Name and host of each, once."""
    members: tuple[NewMember, ...]


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """What makes a generation of the one before."""

    number: int
    base: int
    """Number of the generation before; 0: none."""
    members: tuple[Kept | Came, ...]
    """In the order of their ranks."""
    complete: int
    """Complete replicas, which come first."""
    start: int
    shape: tuple[int, int]
    connected_in: tuple[tuple[int, int], ...] = ()
    """`Generation.groups_connected_in` as runs: the number, and how many replicas have it."""
    digest: str
    """Of the whole, see `Generation.digest`."""


# From a worker to its agent, which passes on what the coordinator needs, tagged with the worker's name.


# Never leaves the node: agents keep their warm processes to themselves.
class Warm(msgspec.Struct, frozen=True, tag="warm"):
    """A forked process has imported everything and waits for work (agent only)."""

    pid: int


MOST_MODULES = 8192
"""So many modules, or variables, may be named in one message."""

MODULE_NAME = 256
"""Characters of the longest of them."""

Names = Annotated[
    tuple[Annotated[str, msgspec.Meta(max_length=MODULE_NAME)], ...], msgspec.Meta(max_length=MOST_MODULES)
]


# After the first step, because by then everything is imported that the next start will need, and because the
# node's processor is needed for the start itself before.
class Imported(msgspec.Struct, frozen=True, tag="imported"):
    """The script has made its first optimizer step in this process. The job's rank 0 says what it imported
    for it."""

    modules: Names = ()
    """Of the standard library and of installed packages, parents first."""
    variables: Names = ()
    """Names of environment variables that differ between starts or were changed by the script."""


# Never leaves the node, as Warm.
class Preloaded(msgspec.Struct, frozen=True, tag="preloaded"):
    """The answer to Preload (agent only)."""

    without: tuple[str, ...] = ()
    """Packages that cannot be imported ahead; the process that found it out ends. Empty: all could be."""
    reason: str = ""
    """Why they cannot; else empty."""


# The first call of `holdfast.start` by any worker moves the whole job to level 2, because a job cannot be
# restarted as a whole and replaced one by one at the same time.
class Attached(msgspec.Struct, frozen=True, tag="attached"):
    """The script called `holdfast.start`: this job is at level 2."""


# The digest lets a job begin without a transfer. Workers that built the same bits from one seed hold the same
# state, and only those that differ fetch it.
class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The script reached `run.steps`: model built, nothing missing but the membership (and the state)."""

    digest: str
    """xxh3 of the protected state as built, so that equal starts need no transfer."""
    host: str
    """Where other workers reach this one."""
    vote_port: int
    """Where it listens for the control channel."""
    data_port: int
    """Where it serves its state to newcomers."""
    micro_batches: int = 0
    """In a global batch."""
    shape: tuple[int, int] = (1, 1)
    """Workers of a replica: those with other micro-batches, and for each of them those with the same."""
    shard_index: int = 0
    """The shard that it was built for."""
    until: int = 0
    """Committed steps after which the script ends; 0: it does not say."""
    samples: str = ""
    """Folder in which its samples are recorded; empty: the script asked for no record."""


class Joined(msgspec.Struct, frozen=True, tag="joined"):
    """The worker is connected to its generation and holds the state of its first step."""

    generation: int
    join_s: float
    """How long it needed to connect."""
    restore_s: float | None = None
    """How long it needed to get the state; None: it had it."""
    restored_bytes: int = 0
    """How much it got."""


# Now and then, so that a long transfer is visible; what moves is no hang.
class Restoring(msgspec.Struct, frozen=True, tag="restoring"):
    """How far the fetching of the state is. Sent now and then, if it takes longer than two seconds."""

    generation: int
    nbytes: int
    """Fetched so far, of `total_bytes`."""
    total_bytes: int


MOST_FIGURES = 64
"""So many names may be given to `run.log`: each is a time series for whoever scrapes `/metrics`."""

FIGURE_NAME = 64
"""Characters of the longest of them."""


class ReportedStep(NamedTuple):
    """A committed step, as a worker that committed it reports it. None: not known."""

    step: int
    loss: float
    """Mean over the global batch."""
    took_s: float
    made_in: int | None = None
    """The generation whose members computed it. All that tell of one commit say the same, and another where the step was
    computed again: so the two are told apart even where they have the same bits."""
    weight: float | None = None
    """Of the global batch: samples, tokens, or what else the script weighs by."""
    grad_norm: float | None = None
    """Of the global gradient before clipping; None where that is not finite."""
    lr: float | None = None
    """The learning rate of the optimizer's first group in the update."""
    skipped: bool | None = None
    """It counts without an update, since its gradient is not finite."""


# At most 20 a second, however short a step is: with a thousand workers the coordinator would otherwise be
# busy with good news. A generation's first commit is always reported at once, because it ends a stall.
class Progress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """Steps were committed. Sent at most 20 times a second, and always for a generation's first commit."""

    generation: int
    committed: int
    """Committed steps; at level 0 and 1 those of this start."""
    median_s: float | None = None
    """Its median time of a step; None: not known."""
    losses: tuple[ReportedStep, ...] = ()
    """The commits since the last message (rank 0 only)."""
    figures: tuple[tuple[int, dict[str, float]], ...] = ()
    """What the script logged since the last message: (step, name to value), likewise."""
    spent: tuple[Spent, ...] = ()
    """Blocks of steps that were completed since the last message."""
    script_s: float = 0.0
    """For how long the script had this worker between two steps, of all steps that it committed in this generation; without
    what it announced by OffStep. At level 0 and 1 not known."""


# The only input of the vote. `committed` is what the worker holds for certain: None after an update that was
# torn in the middle, because half an update is no state at all.
class Parked(msgspec.Struct, frozen=True, kw_only=True, tag="parked"):
    """The worker has left a generation that broke or was ended, and waits for the next one."""

    generation: int
    committed: int | None
    """Committed steps of its state; None: it holds no usable state (it never had it, or an update was
    torn)."""
    prepared: bool = False
    """It holds the complete reduced gradient of step `committed`."""
    losses: tuple[ReportedStep, ...] = ()
    """The commits since its last Progress (rank 0 only)."""
    agreement: int = -1
    """Of the RunTo at which it left its replica's groups, with every call complete; 0: none was needed; -1: the groups are
    gone."""


# Sent while the worker is still in its step, and again whenever it has come to stand or must go further. The peers stop
# where these numbers say.
class Halted(msgspec.Struct, frozen=True, tag="halted"):
    """The number of calls that this worker has begun in each of its replica's groups. It begins one beyond a RunTo only after
    it reported that here."""

    generation: int
    begun: dict[str, int]
    stands: int = -1
    """Number of the RunTo at which it has come to stand; -1: it has not."""


# Sent before the worker parks or exits, so the error is known when its end is judged.
class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """User code raised. In a step the worker parks next; outside of one it exits."""

    generation: int
    """The newest that it joined; 0: none."""
    step: int | None
    """Committed steps before the one that failed; None: it was outside of a step."""
    phase: int
    """A `Phase`."""
    error: str
    """The exception's class."""
    message: str
    traceback: str = ""
    where: str = ""
    """The line of the script; empty: none is in the traceback."""
    own: bool = False
    """This rank's own part of the gradient or the loss is not finite."""
    refused: bool = False
    """The error is a `UsageError`, outside of a step: what the script asks for is refused, and would be again."""

    @property
    def signature(self) -> str:
        """What makes two failures the same."""
        # The line of the script, not the message: messages hold numbers (a loss, a pointer) that differ each
        # time.
        return f"{self.error}@{self.where}" if self.where else f"{self.error}: {self.message}"


# Every member says it, and all say the same: the first one heard is enough, and the others may be lost.
class GradientsDiffer(msgspec.Struct, frozen=True, kw_only=True, tag="gradients-differ"):
    """A micro-batch was computed by several members, and its gradient has not the same bits. All of them left the step."""

    generation: int
    step: int
    """Committed steps before it."""
    micro: int
    """The micro-batch's number in the global batch."""
    digests: dict[str, int]
    """Worker to the checksum of the gradient that it computed: two of them, and the third if there is one."""


# Not a verdict: every peer of a lost worker reports one. Who is at fault is found by whoever reports nothing.
class CollectiveError(msgspec.Struct, frozen=True, tag="collective-error"):
    """A collective raised in this worker: evidence, not a verdict. Or the worker could not be restored."""

    generation: int
    step: int
    """Committed steps before the one that failed; -1: the worker could not be restored."""
    detail: str
    """For people."""
    lost: bool = False
    """What it was to be restored from is damaged; another try would find the same."""


# The worker waits for the Ack. Otherwise it could be dead before its own fault is in the ledger, and the
# fault would look like a real one.
class FaultFired(msgspec.Struct, frozen=True, tag="fault-fired"):
    """An injected fault is about to happen here; the worker waits for the agent's Ack before it does."""

    fault: str
    """Its id, as in ArmedFault."""
    step: int | None = None
    """Committed steps; None: its agent injects it, whatever the worker is at."""
    phase: int | None = None
    """A `Phase`; None in the same case."""


# By the worker itself, where replicas are single workers. With shards the agents write, and report Stored and
# Published.
class Saved(msgspec.Struct, frozen=True, tag="saved"):
    """A checkpoint is complete in a durable tier, or could not be written."""

    step: int
    url: str
    """The tier's."""
    error: str | None = None
    """Why it could not be written; None: it is."""


# Comes before the process ends. So an exit after it is the end of a worker that had everything, whatever its
# code is.
class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """The worker has all its steps."""

    committed: int
    params_xxh3: str
    """Over the parameters of every protected module."""
    loss: float | None
    """Of its last step; None: not known."""
    stopped: bool = False
    """It was told to stop before the script's own last step."""
    held: bool = False
    """Its agent has the last state, and will say SnapshotStored or SnapshotRejected."""
    state_xxh3: str | None = None
    """xxh3 of all that is to be the same in every replica; None: not said."""
    covered: tuple[str, ...] = ()
    """Names of the protected objects that this is over."""
    left_out: tuple[str, ...] = ()
    """Paths of buffers that it is not over."""


# Asked for only where the job stands still: a script at level 0 pays nothing for it while it trains.
class InCollectives(msgspec.Struct, frozen=True, tag="in-collectives"):
    """The answer to WhereInCollectives (agent only)."""

    request: int
    groups: Groups | None
    """None: torch does not say."""


# Never leaves the node, as InCollectives: the agent tells it with the end of the process.
class ScriptEnded(msgspec.Struct, frozen=True, tag="script-ended"):
    """The script is over: by its last line, by `sys.exit`, or by an error (agent only). A process that ends without this was
    left by `os._exit` or was killed."""

    groups: Groups | None
    """How far it came in its collectives; None: torch does not say."""


# Announced by the script: only it knows that it is going to evaluate for ten minutes, and without this it
# would be taken for a hang.
class OffStep(msgspec.Struct, frozen=True, tag="off-step"):
    """The script begins (or ends) work of its own between two steps, which may take long."""

    on: bool
    """It begins; False: it ends."""


# The agent owns the memory. So a copy outlives the worker that made it, which is the point of a snapshot.
class SlotWanted(msgspec.Struct, frozen=True, tag="slot-wanted"):
    """The worker wants to copy its shard into snapshot memory (agent only)."""

    key: Key
    nbytes: int
    """Of the copy."""
    waits: bool = False
    """Until there is room, when older snapshots are still on their way."""
    paced: bool = False
    """Where older snapshots are still on their way all ranks of the script skip this one."""


# Memory that nobody has touched takes ten times as long as the copy into it. The agent needs the size to bring
# it in while the first steps compute, instead of while training waits for its first snapshot.
class SnapshotExpected(msgspec.Struct, frozen=True, tag="snapshot-expected"):
    """This worker will save a shard of about `nbytes`, as `rank` of those that save (agent only). Nothing follows from a
    size that turns out to be another one."""

    rank: int
    nbytes: int


# With the index the agent can serve the copy to others, without torch and without knowing what it is a copy
# of.
class SlotFilled(msgspec.Struct, frozen=True, tag="slot-filled"):
    """The copy is complete, or was given up (agent only)."""

    key: Key
    index: bytes | None
    """msgpack of `tensors.index.StateIndex`; None: the copy was given up."""
    stall_s: float = 0.0
    """How long training stood still for it."""


# Only at level 0 and 1: the script numbers its states as it likes, and this is how its numbers are matched
# with the steps that were counted.
class StateServed(msgspec.Struct, frozen=True, tag="state-served"):
    """Rank 0's script gave a state to be saved."""

    generation: int
    step: int
    """What the script calls it."""
    steps: int
    """Optimizer steps of this start before it."""


# Rank 0's word: all ranks load the same state, and one is enough to know from where the count of steps goes
# on.
class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """Rank 0's script goes on from a state that it loaded."""

    generation: int
    step: int | None
    """What the script calls it; None: it looked for the newest, and there was none."""
    steps: int
    """Optimizer steps of this start before that."""


# Of an unmodified script nobody knows whether it loads something. But one that does loads its optimizer, too.
class BeganAnew(msgspec.Struct, frozen=True, tag="began-anew"):
    """At level 0: rank 0's optimizer keeps state, and had none before the first step of this start."""

    generation: int


# Asked of the coordinator, because only it knows which snapshot is complete over all nodes.
class FindSnapshot(msgspec.Struct, frozen=True, tag="find-snapshot"):
    """A script wants to load: which is the newest complete checkpoint, and who has it?"""

    request: int
    """Numbers the worker's questions: the answer names it."""


WorkerMessage = (
    SnapshotExpected
    | SlotWanted
    | SlotFilled
    | StateServed
    | Loaded
    | BeganAnew
    | FindSnapshot
    | Warm
    | Imported
    | Preloaded
    | Attached
    | Ready
    | Joined
    | Restoring
    | Progress
    | Parked
    | Halted
    | Failed
    | GradientsDiffer
    | CollectiveError
    | FaultFired
    | Saved
    | Done
    | InCollectives
    | ScriptEnded
    | OffStep
)


# To a worker: from its agent, or from the coordinator through its agent.


# The token comes by this socket, which only the two processes have: an argument or a variable could be read by every user of
# the machine, and a file be gone.
class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """What a warm process becomes."""

    worker: str
    script: str
    """A path as it was given, from `cwd`, or a module's name when `module` is set."""
    args: tuple[str, ...]
    module: bool
    env: dict[str, str]
    """Variables that the process sets on top of those that it was forked with."""
    cwd: str
    log: str
    """Path of the file that its output goes to."""
    page: str
    """Path of its progress record."""
    stacks: str
    """Path of the file that its stacks are written to."""
    token: str
    """The job's."""
    host: str
    """Where other nodes reach this one."""


# Nobody waits for the answer. A worker that is needed meanwhile comes from another process, so that an import
# which hangs or fails keeps nobody from starting.
class Preload(msgspec.Struct, frozen=True, kw_only=True, tag="preload"):
    """What the script imports: a process that waits for its start is to import it ahead. To an agent: its
    processes are."""

    modules: Names
    """As in Imported."""
    variables: Names = ()
    """As in Imported."""
    script: str = ""
    """As in Start; empty in what the coordinator says, as are the next two."""
    args: tuple[str, ...] = ()
    cwd: str = "."


# All that a member needs, in one message: it may be the last one that it gets, if the coordinator dies now.
class JoinGeneration(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="join-generation"):
    """Join this generation."""

    generation: Generation
    rank: int
    apply: bool = False
    """Apply the prepared gradient first (the step counts after all)."""
    restore: bool = False
    """Fetch the state at `generation.start`: from `donors`; when there are none from snapshot memory, `copy`
    or `shards`; else from `durable`."""
    serve: bool = False
    """Be a donor, so publish the state; with `restore`, as soon as it is read from the durable checkpoint."""
    donors: tuple[int, ...] = ()
    """Ranks."""
    copy: Copy | None = None
    """The shard in snapshot memory; None: none is there to fetch."""
    holders: tuple[Holder, ...] = ()
    """Who has `copy`, nearest first."""
    durable: Durable | None = None
    """The checkpoint to read; None: none."""
    saves: bool = False
    """Copy snapshots into this node's memory."""
    mtbf_s: float = 0.0
    """The job's mean time between failures, from which the cadence `auto` follows; 0: not known, and `auto`
    never saves."""
    shards: tuple[tuple[Copy, tuple[Holder, ...]], ...] = ()
    """All shards of a snapshot that was taken with another number of shards, each with its holders."""


SHARD_INDEX_VARIABLE = "HOLDFAST_SHARD_INDEX"
"""The environment variable that tells a worker for which shard it is most likely needed."""


# In the same process: imports, the CUDA context and compiled code stay, and only the model is built again.
class Rebuild(msgspec.Struct, frozen=True, tag="rebuild"):
    """Run `main` again, in the same process, as the holder of this shard: a replica lacks it. Ready follows."""

    shard_index: int


# Safe to repeat and safe to miss: it names its generation, and a worker that does not hear it notices the
# broken collective itself.
class Break(msgspec.Struct, frozen=True, tag="break"):
    """The generation is over: abort its collectives, leave the step, park."""

    generation: int
    reason: str
    halt: bool = False
    """The worker's own replica is intact: its groups are not aborted. The worker says Halted, and goes on
    until RunTo tells it where to leave the step."""


# Those that are behind in a group go on, since others wait for them there. One may have to begin a call of another group on
# its way, which raises that group's number: then another RunTo follows. Only when all stand nothing can grow any more, so
# nothing is half sent between them and their connections can be used again.
class RunTo(msgspec.Struct, frozen=True, tag="run-to"):
    """The number of calls of each of the replica's groups after which the worker stops."""

    generation: int
    begun: dict[str, int]
    """By group, since the groups of the replica were connected."""
    agreement: int
    """Number of these limits, from 1 in each generation."""
    leave: bool
    """All workers of the replica stand at them: leave the step."""


# At the commit nothing is in flight and all hold the same state, so a planned change costs no step.
class EndAtCommit(msgspec.Struct, frozen=True, tag="end-at-commit"):
    """The generation ends at the next commit: finish the step together, then park."""

    generation: int


# Not a kill: whoever gets it holds a state that may be the only one, and has the time to give it away.
class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Leave `run.steps`."""

    apply: bool = False
    """As in JoinGeneration."""
    save_to: DurableTier | None = None
    """Write a durable checkpoint there first; None: write none."""
    keep: bool = False
    """Leave the state in the node's memory, from where it becomes a checkpoint."""


# The complete list each time, so an empty one disarms: a worker that lost its rank must not carry out the
# fault of another.
class Arm(msgspec.Struct, frozen=True, tag="arm"):
    """Faults that this worker is to inject into itself."""

    faults: tuple[ArmedFault, ...]


class Ack(msgspec.Struct, frozen=True, tag="ack"):
    """FaultFired was passed on; go ahead."""

    fault: str
    """Its id, as in ArmedFault."""


# Silence without a close is the hardest fault to notice, since no end of a connection reports it. So it can
# be injected.
class DropTraffic(msgspec.Struct, frozen=True, tag="drop-traffic"):
    """Injected: every connection of this worker goes silent without closing."""


# A path in shared memory, not the bytes: the copy goes from the GPU straight into the agent's memory.
class SlotGiven(msgspec.Struct, frozen=True, tag="slot-given"):
    """The slot for a snapshot, or that there is none."""

    key: Key
    path: str | None
    """In shared memory; None: there is no slot."""
    reason: str = ""
    """Why not; else empty."""
    paced: bool = False
    """It was skipped, as older ones are still on their way: the coordinator says so, and counts it."""


# Every shard with all its holders: the worker chooses the nearest, and goes on to the next if one is gone by
# then.
class SnapshotFound(msgspec.Struct, frozen=True, tag="snapshot-found"):
    """The newest complete checkpoint, in memory or in a durable tier."""

    request: int
    """Of the FindSnapshot that it answers."""
    copies: tuple[tuple[Copy, tuple[Holder, ...]], ...] = ()
    """Every shard with its holders; empty: memory has none, or the durable one is newer."""
    durable: Durable | None = None
    """The newest in any durable tier, also where `copies` is taken first; None: there is none."""


# The complete list each time, so an empty one withdraws. Deadlines are relative, because two machines' clocks differ.
class Notify(msgspec.Struct, frozen=True, tag="notify"):
    """The notices in force: to an agent for all workers of its node, also those that start later; to a worker for its script."""

    notices: tuple[Notice, ...]
    """All of them. Their deadlines count from the sending."""


# A thread answers, so also a worker whose main thread waits. One that is stopped or holds the interpreter does not.
class WhereInCollectives(msgspec.Struct, frozen=True, tag="where-in-collectives"):
    """From the agent, of a job that stands still: how far is this script in the collectives of its process groups?"""

    request: int


# Asked first, and by a signal only who does not answer: nothing healthy is signalled.
class WriteStacks(msgspec.Struct, frozen=True, tag="write-stacks"):
    """From the agent: append the stacks of all threads to the file that Start names."""


ToWorker = (
    Notify
    | SlotGiven
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
    | Preload
    | WhereInCollectives
    | WriteStacks
)


# To an agent, from the coordinator.


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


# Once for each node, however many workers it has. What it is made from is what was sent last on the same connection, or what
# the agent's hello names.
class Form(msgspec.Struct, frozen=True, kw_only=True, tag="form"):
    """A generation, for all workers of a node that are in it."""

    change: Difference
    orders: tuple[tuple[str, JoinGeneration], ...]
    """Worker, and what it is told. The generation in it is empty: it is what `change` makes."""


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
    """Training resumes at an earlier step: what was saved of later steps is void."""

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
    """Up to where the ledger is known with this part. Batch 0, with a base: none is to be kept any more."""
    data: bytes
    """Only coordinators read it."""
    base: bool = False
    """A part of a complete copy, which takes the place of what is kept; else of a batch, which is added to it."""
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
    | Form
    | Inspect
    | RunFault
    | Fence
    | Drain
    | Notify
    | Shutdown
)


# From an agent to the coordinator.


# What a coordinator needs that knows nothing: the newest message of each kind, repeated. So no order and no
# report has to be kept for a coordinator that may be gone.
class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent knows of a worker, sufficient for a coordinator that starts without any state."""

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
    """The name by which `protocol.network.proof` knows whoever listens at `snapshot_port`."""
    summing: tuple[Key, ...] = ()
    """As in Exited, of all its workers."""
    kernel: str = ""
    """Where `pid` is a process, as `protocol.machine.processes` says; empty: that cannot be told."""
    term: int = 0
    """The latest term of a coordinator that it has spoken with."""
    ledger: LedgerMark | None = None
    """How far the copy of the ledger goes that it keeps; None: it keeps none."""
    generation: tuple[int, str] = (0, "")
    """Number and digest of the newest one that it was sent, for `Form`."""


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
    """A worker makes no progress for longer than it may. Says nothing about which worker is at fault."""

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
    """A shard that was held here was corrupted in memory, and does not count any more."""

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
    """The newest readings of the machine that are in `protocol.health.NODE_FIGURES`."""

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
    """A part of the answer to SendLedger: the parts of a base, in order, and then those of each batch."""

    mark: LedgerMark
    data: bytes
    base: bool = False
    more: bool = False
    """The next part belongs to this one."""
    last: bool = False
    """There is no more. A copy that cannot be read ends without a base."""


NodeMessage = (
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
    | Started
    | Exited
    | Stalled
    | InspectReply
    | FaultFired
)
"""Of an agent itself."""
AgentMessage = NodeMessage | FromWorker


# One number for all messages. Agents of a job start from one installation as a rule; where they do not, a
# clear refusal at the hello is better than a field that means something else on the other side.
PROTOCOL_VERSION = 8
"""Of all messages. Agents and coordinators of different versions refuse each other."""
