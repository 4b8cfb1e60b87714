"""What a worker reports to its agent. The agent passes on what the coordinator needs, tagged with the worker's name."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec

from holdfast.protocol.phases import Groups, Spent
from holdfast.protocol.snapshots import Key


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


class StepTold(NamedTuple):
    """A committed step, as whoever committed it tells of it. None: not known."""

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
    losses: tuple[StepTold, ...] = ()
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
    """The worker is out of a generation that broke or was ended, and waits for the next."""

    generation: int
    committed: int | None
    """Committed steps of its state; None: it holds no usable state (it never had it, or an update was
    torn)."""
    prepared: bool = False
    """It holds the complete reduced gradient of step `committed`."""
    losses: tuple[StepTold, ...] = ()
    """The commits since its last Progress (rank 0 only)."""
    agreement: int = -1
    """Of the RunTo at which it left its replica's groups, with every call complete; 0: none was needed; -1: the groups are
    gone."""


# Sent while the worker is still in its step, and again whenever it has come to stand or must go further. The peers stop
# where these numbers say.
class Halted(msgspec.Struct, frozen=True, tag="halted"):
    """So many calls of each of its replica's groups has this worker begun; what is beyond a RunTo only where it says so here."""

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
    """msgpack of `tensors.index.Index`; None: the copy was given up."""
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
