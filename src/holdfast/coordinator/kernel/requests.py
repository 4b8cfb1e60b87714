"""What one part of the core asks of another.

Parts do not import each other: whoever wants something done that is another part's to decide makes a request, and the machine
gives it to that part at once. So the one that asked goes on with the state as it is then. What a part only wants to know it
reads itself, with the pure functions in `queries` of the part whose it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from holdfast.coordinator.kernel.history import Remembered
from holdfast.coordinator.kernel.incident_state import Incident
from holdfast.coordinator.kernel.membership_state import Blame, Node, Worker
from holdfast.protocol import messages as m
from holdfast.protocol.causes import Cause, GradientsDiffer
from holdfast.protocol.health import Remedy
from holdfast.protocol.job import Durable
from holdfast.protocol.notices import NoticeCause
from holdfast.protocol.snapshots import Copy

R = TypeVar("R")


class Request(Generic[R]):
    """Asks another part for something; R is what it answers."""


# ---------------------------------------------------------------- of membership


@dataclass(frozen=True)
class RemoveNode(Request[None]):
    """A node cannot be used any more: what runs on it counts as lost, now."""

    node: Node
    cause: Cause


@dataclass(frozen=True)
class RefuseNode(Request[None]):
    """A node is at fault, not what runs on it: it is removed, and it may not come back."""

    node: Node
    cause: Cause


@dataclass(frozen=True)
class DrainNode(Request[None]):
    """A node is to leave at a step's edge, as soon as another takes its place."""

    node: Node
    reason: str


@dataclass(frozen=True)
class JoinAfter(Request[float]):
    """From when on newcomers may join so many workers that stay: seconds on the core's clock."""

    staying: int


@dataclass(frozen=True)
class EvictWorkers(Request[None]):
    """Workers of a node are to end now, and others to take their places."""

    node: Node
    workers: list[Worker]
    cause: Cause


@dataclass(frozen=True)
class LeaveSoon(Request[None]):
    """A node reports that it is to leave, within a time if that is limited."""

    node: str
    reason: str
    within_s: float | None
    """None: without a limit."""


@dataclass(frozen=True)
class HandleReport(Request[None]):
    """What a worker reported may have been missed: it is handled as if it came now."""

    worker: Worker
    message: m.WorkerMessage


@dataclass(frozen=True)
class EndGeneration(Request[None]):
    """Every member leaves the generation and reports what it holds."""

    cause: Cause


@dataclass(frozen=True)
class StopJob(Request[None]):
    """The job ends at the next commit, with what was committed."""

    reason: str
    outcome: str
    """"stopped" or "failed"."""
    blame: Blame | None = None
    """Who or what is at fault, if nobody is named yet; None: nobody."""
    cause: NoticeCause | None = None
    """Why, for programs; None: `failure` or `stop`, as the outcome is."""


@dataclass(frozen=True)
class KeepNode(Request[None]):
    """A node does not leave, and its scripts are told if they had heard that it does."""

    node: Node


@dataclass(frozen=True)
class AwaitReturn(Request[None]):
    """A machine that left was rebooted: it comes back as a node that was asked for."""


@dataclass(frozen=True)
class PauseRequests(Request[None]):
    """The engine is asked for no node before this time."""

    until_s: float
    """On the core's clock."""


# ---------------------------------------------------------------- of storage


@dataclass(frozen=True)
class CompareCopies(Request[None]):
    """A node joined, or came back: its hello says what it holds, and what it has missed is sent again."""

    node: Node
    hello: m.Hello


@dataclass(frozen=True)
class DropCopies(Request[None]):
    """A node is gone, and what it held with it."""

    node: Node


@dataclass(frozen=True)
class SpreadCopies(Request[None]):
    """Copies that are missing may be asked for from others now."""


@dataclass(frozen=True)
class HandOver(Request[bool]):
    """A node is about to leave as planned. True: it still gives on what nobody else holds."""

    node: Node


@dataclass(frozen=True)
class RewindTo(Request[None]):
    """The next generation goes on from this step, and not from live state: what was saved later is void."""

    start: int
    """Committed steps."""


@dataclass(frozen=True)
class ReportUnreadable(Request[None]):
    """A worker could not be restored from a snapshot, or from a checkpoint."""

    source: Copy | Durable
    message: m.CollectiveError


@dataclass(frozen=True)
class AwaitChecksums(Request[None]):
    """A worker has ended, and its node computes the checksums of what it gave."""

    worker: Worker
    message: m.Exited


@dataclass(frozen=True)
class NoteLast(Request[None]):
    """A worker left the state after its last step to its node."""

    worker: Worker


@dataclass(frozen=True)
class ForgetLast(Request[None]):
    """What became of those states is not waited for any more."""


@dataclass(frozen=True)
class StoreLast(Request[bool]):
    """The job ends: its last state goes to every durable tier. False: nothing more comes of it."""


@dataclass(frozen=True)
class ReportUnsaved(Request[None]):
    """The job ends: if its last state is in no tier for a reason that was not recorded, it is recorded now."""


# ---------------------------------------------------------------- of health


@dataclass(frozen=True)
class RefuseAdmission(Request[None]):
    """A node is not let in, because its basic checks found a fault."""

    hello: m.Hello
    reason: str


@dataclass(frozen=True)
class AdmitNode(Request[None]):
    """A node joins as a new one."""

    node: Node
    hello: m.Hello
    past: tuple[Remembered, ...]
    """What is remembered of the machine and its devices, oldest first."""
    known: Node | None
    """The node that had its name before; None: none had."""


@dataclass(frozen=True)
class RepeatOrders(Request[None]):
    """An agent came back: orders that it has not answered are sent again."""

    node: Node


@dataclass(frozen=True)
class NoteNodeLost(Request[None]):
    """A node is gone."""

    node: Node
    incident: Incident | None
    """What it was lost with; None: it was not in use."""


@dataclass(frozen=True)
class ApplyRemedy(Request[None]):
    """A node that was to leave for its health has nobody in the job any more: what was decided about it is done."""

    node: Node


@dataclass(frozen=True)
class DecideIncident(Request[None]):
    """What was done about an incident did not work: it is decided again."""

    incident: Incident


@dataclass(frozen=True)
class Escalate(Request[None]):
    """The next remedy is taken for an incident, because the last one did not work."""

    node: Node
    incident: Incident
    does: Remedy
    """The remedy that is taken."""
    reason: str
    """For people."""


@dataclass(frozen=True)
class NoteStrike(Request[None]):
    """What a rule found has now ended a worker or more."""

    incident: Incident


@dataclass(frozen=True)
class NoteWaits(Request[None]):
    """For so many seconds of the newest steps all waited for the data of one, and for those that are slow."""

    data_s: float
    slow_s: float


@dataclass(frozen=True)
class SwapLemons(Request[None]):
    """The job trains and lacks nobody: a machine with a bad history may be replaced by a better one."""


@dataclass(frozen=True)
class CompareSteps(Request[None]):
    """A member reports where the time of its steps went, and their losses: it is compared with the others."""

    worker: Worker
    message: m.Progress


@dataclass(frozen=True)
class NoteNonFinite(Request[None]):
    """A rank's own part of a step was not finite, before anything was added to it."""

    worker: Worker
    message: m.Failed


@dataclass(frozen=True)
class NoteMiscomputed(Request[None]):
    """A worker is taken out, because others have proven that it computed other bits than they did."""

    worker: Worker
    cause: GradientsDiffer
