"""What a worker is told: by its agent, or by the coordinator through its agent."""

from __future__ import annotations

import msgspec

from holdfast.protocol.faults import ArmedFault
from holdfast.protocol.job import Durable
from holdfast.protocol.messages.from_worker import Names
from holdfast.protocol.messages.generation import Generation
from holdfast.protocol.notices import Notice
from holdfast.protocol.snapshots import Copy, DurableTier, Holder, Key


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
    """Path of its progress page."""
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
class JoinGeneration(msgspec.Struct, frozen=True, kw_only=True, tag="join-generation"):
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
    """So many calls of each of the replica's groups are to begin here, and no more."""

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
    """What stands of the notices: to an agent for all workers of its node, also those that start later; to a
    worker for its script."""

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
