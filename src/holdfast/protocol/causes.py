"""Why something was lost or broke: one frozen struct for each cause, with its kind and its wording.

Code compares a cause's type or `kind` and never reads its words, so another wording changes no metric, rate or decision. There
is no default kind: a cause that nobody classified cannot be made.
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

import msgspec

from holdfast.protocol import units
from holdfast.protocol.wire.decoding import kebab


class CauseKind(StrEnum):
    """The label `kind` of `holdfast_incidents_total`, see `docs/metrics.md`."""

    NODE = "node"
    """A node was lost, or the job gave it up."""
    RECLAIMED = "reclaimed"
    """The engine took a node back."""
    PROCESS = "process"
    """A worker's process ended or vanished."""
    HANG = "hang"
    """A worker stands still."""
    TIMEOUT = "timeout"
    """A worker did not get ready, or did not save, in its time."""
    COLLECTIVE = "collective"
    """A collective failed, and nothing told why."""
    COORDINATOR = "coordinator"
    """The coordinator was lost."""
    HEALTH = "health"
    """A health rule matched."""
    STATE = "state"
    """Nobody holds the state that training would go on from."""
    SCRIPT = "script"
    """The training script raised an error, or calls Holdfast in a way that cannot work."""
    NAN = "nan"
    """A gradient was not finite."""
    CORRUPTION = "corruption"
    """A replica holds other bits than all others."""
    STOP = "stop"
    """The job is being stopped."""
    OTHER = "other"
    """Of a kind that is not known."""


# Causes are values: compared, stored and sent. Words are made by __str__ where a person reads them, so a
# better wording changes no metric, no rate and no decision.
class _Cause(msgspec.Struct, frozen=True, tag=kebab):
    # Without a default, so a cause that nobody classified fails at its first use in a test, and never counts
    # as a kind that was only convenient.
    KIND: ClassVar[CauseKind]

    @property
    def kind(self) -> CauseKind:
        """What sort of cause it is."""
        return self.KIND


# ---------------------------------------------------------------- nodes


class ConnectionClosed(_Cause, frozen=True):
    """The connection of a node's agent closed."""

    KIND = CauseKind.NODE

    def __str__(self) -> str:
        return "its agent's connection closed"


class NodeSilent(_Cause, frozen=True):
    """Nothing was heard from a node's agent."""

    KIND = CauseKind.NODE

    limit_s: float
    """After so many seconds of silence a node is lost."""

    def __str__(self) -> str:
        return f"silent for {self.limit_s:g} s"


class ContainerOutOfMemory(_Cause, frozen=True):
    """The kernel killed all processes of a node, its agent included, because its container ran out of memory. The engine
    reports it, since nobody else on the node is left."""

    KIND = CauseKind.NODE

    limit_bytes: int | None = None
    """Of the container; None: not known."""

    def __str__(self) -> str:
        limit = "" if self.limit_bytes is None else f", whose memory limit is {units.size(self.limit_bytes)}"
        return f"the kernel's out-of-memory killer ended all its processes in their container{limit}"


class PlaceLost(_Cause, frozen=True):
    """Several nodes in one place were lost together: the fault is in what they share, not in them."""

    KIND = CauseKind.NODE

    place: str
    """The innermost one that all of them are in, as `protocol.place` writes it."""
    lost: int
    """Nodes of it that were lost."""
    nodes: int
    """Nodes that the job had there."""
    first: str
    """How the first of them was lost, in words."""

    def __str__(self) -> str:
        return f"{self.lost} of {self.nodes} nodes in {self.place} were lost together ({self.first})"


class AgentReplaced(_Cause, frozen=True):
    """Another agent joined under the same name."""

    KIND = CauseKind.NODE

    def __str__(self) -> str:
        return "a new agent took its place"


class WorkersFail(_Cause, frozen=True):
    """At level 0: the same failure comes again and again on one node of several."""

    KIND = CauseKind.NODE

    signature: str
    """What makes the failures the same."""

    def __str__(self) -> str:
        return f"its workers keep failing: {self.signature}"


class WorkersDoNotStart(_Cause, frozen=True):
    """Several workers in a row did not get ready on a node."""

    KIND = CauseKind.NODE

    last: str
    """Why the last of them did not, in words."""

    def __str__(self) -> str:
        return f"its workers do not start: {self.last}"


class StateRefused(_Cause, frozen=True):
    """A newcomer refused what the others train with: its node has other data, or another script."""

    KIND = CauseKind.NODE

    said: str
    """Why, in its words."""

    def __str__(self) -> str:
        return f"it cannot train with the others: {self.said}"


class ChecksFailed(_Cause, frozen=True):
    """A node did not pass its health checks."""

    KIND = CauseKind.NODE

    reason: str
    """The failed checks, in words."""

    def __str__(self) -> str:
        return self.reason


class NodeReclaimed(_Cause, frozen=True):
    """The engine says that a node does not belong to the job any more."""

    KIND = CauseKind.RECLAIMED

    reason: str
    """As the engine gave it."""

    def __str__(self) -> str:
        return self.reason


# ---------------------------------------------------------------- worker processes


class ProcessEnded(_Cause, frozen=True):
    """A worker's process ended by itself, and no error of the script is known."""

    KIND = CauseKind.PROCESS

    code: int
    """Its exit code; -N: signal N ended it."""

    def __str__(self) -> str:
        # As subprocess counts: a negative code is a signal. The number stays beside the name, since names
        # differ between systems.
        if self.code >= 0:
            return f"exit code {self.code}"
        return f"killed by signal {-self.code} ({_SIGNALS.get(-self.code, 'signal')})"


class LeftEarly(_Cause, frozen=True):
    """A worker's process ended with exit code 0 while others trained on, which then failed or stood still."""

    KIND = CauseKind.PROCESS

    then: str = ""
    """What ended another one then, in words; empty: nothing did."""

    def __str__(self) -> str:
        return "exited with exit code 0 while others continued to train" + (
            f", and then: {self.then}" if self.then else ""
        )


_SIGNALS = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}


class KilledForMemory(_Cause, frozen=True):
    """SIGKILL ended a worker's process, and the kernel has killed for want of memory where it ran."""

    KIND = CauseKind.PROCESS

    limit_bytes: int | None = None
    """Of its control group, which is its container's; None: it has none, so the machine's memory was too little."""

    def __str__(self) -> str:
        where = (
            "on its machine"
            if self.limit_bytes is None
            else f"in its container, whose memory limit is {units.size(self.limit_bytes)}"
        )
        return f"killed by signal 9 (SIGKILL): the kernel's out-of-memory killer was active {where}"


class ProcessVanished(_Cause, frozen=True):
    """An agent that reconnected has no such worker, and its exit was never heard of."""

    KIND = CauseKind.PROCESS

    def __str__(self) -> str:
        return "its process vanished while its agent was disconnected"


class NeverStarted(_Cause, frozen=True):
    """The order to start a worker was lost."""

    KIND = CauseKind.PROCESS

    def __str__(self) -> str:
        return "it was never started"


# ---------------------------------------------------------------- workers that do not go on


class Hang(_Cause, frozen=True):
    """Training stands still."""

    KIND = CauseKind.HANG

    reason: str = ""
    """How the culprits were found; empty: no worker differs from the others."""
    stood_at_step: int | None = None
    """At level 0 and 1, optimizer steps in that start of the culprit that has fewest; None: not known."""
    collective: str | None = None
    """What the culprits have not entered while others wait in it, as `all_reduce 21 of default_pg`; None: not known."""

    def __str__(self) -> str:
        return f"hang: {self.reason}" if self.reason else "hang in which no worker differs from the others"


class ProcessStopped(_Cause, frozen=True):
    """A worker's process is stopped (state T) while it trains with nobody."""

    KIND = CauseKind.HANG

    def __str__(self) -> str:
        return "its process is stopped"


class LeftBehind(_Cause, frozen=True):
    """A worker stayed in a generation that had broken."""

    KIND = CauseKind.HANG

    def __str__(self) -> str:
        return "did not leave the broken generation"


class NotReady(_Cause, frozen=True):
    """A worker was started and did not get ready."""

    KIND = CauseKind.TIMEOUT

    limit_s: float
    """The time that a start may take, in seconds."""

    def __str__(self) -> str:
        return f"not ready within {self.limit_s:g} s"


class NotSaved(_Cause, frozen=True):
    """A worker did not save the last state before the job's stop."""

    KIND = CauseKind.TIMEOUT

    def __str__(self) -> str:
        return "did not save the state in time"


# ---------------------------------------------------------------- generations and the job


class CollectiveFailed(_Cause, frozen=True):
    """A collective raised in some worker: evidence that something broke, not what."""

    KIND = CauseKind.COLLECTIVE

    def __str__(self) -> str:
        return "a collective failed"


class MemberLeft(_Cause, frozen=True):
    """A member reported that it is out of a generation that nobody had ended."""

    KIND = CauseKind.COLLECTIVE

    worker: str
    """Its name."""

    def __str__(self) -> str:
        return f"{self.worker} left the generation"


class CoordinatorLost(_Cause, frozen=True):
    """The coordinator's process ended, and another took over."""

    KIND = CauseKind.COORDINATOR

    def __str__(self) -> str:
        return "the coordinator was lost"


class StateUnread(_Cause, frozen=True):
    """A worker could not read the state from which training was to resume. Nothing is lost by it: the previous state is read
    again, or an older one."""

    KIND = CauseKind.STATE

    where: str
    """The checkpoint, or the step of the snapshot."""
    detail: str
    """Why, in the worker's words."""
    damaged: bool = False
    """Another try would find the same, so this one is given up."""

    def __str__(self) -> str:
        return f"{self.where} could not be read: {self.detail}"


class NobodyHasState(_Cause, frozen=True):
    """No live worker holds the complete state, and nothing is saved."""

    KIND = CauseKind.STATE

    def __str__(self) -> str:
        return "neither a worker nor a checkpoint holds the state"


class LastStateIncomplete(_Cause, frozen=True):
    """All steps are done, and nobody is left who holds some shard of the last state."""

    KIND = CauseKind.STATE

    def __str__(self) -> str:
        return "the last state is incomplete: some of its shards are not held by any worker"


class Stopping(_Cause, frozen=True):
    """The job was asked to stop."""

    KIND = CauseKind.STOP

    def __str__(self) -> str:
        return "stop"


class RuleMatched(_Cause, frozen=True):
    """A health rule matched on a node."""

    KIND = CauseKind.HEALTH

    rule: str
    """Its name."""
    evidence: str = ""
    """What it matched."""

    def __str__(self) -> str:
        return f"{self.rule}: {self.evidence}" if self.evidence else self.rule


# ---------------------------------------------------------------- the script


class ScriptRaised(_Cause, frozen=True):
    """The training script raised an error."""

    KIND = CauseKind.SCRIPT

    error: str
    """The exception's class."""
    message: str
    """Its text."""
    phase: str | None = None
    """The part of the step in which it was raised; None: outside of a step."""

    def __str__(self) -> str:
        return self.error + (f" in {self.phase}" if self.phase else "") + f": {self.message}"


# Of ScriptRaised by its fields, with a kind of its own: a NaN may come from the data, the script or a broken
# GPU, and counting it as the script's fault hid the last.
class NotFinite(ScriptRaised, frozen=True):
    """A gradient was not finite, which a machine may cause as well as a script."""

    KIND = CauseKind.NAN


class StatesDiffer(_Cause, frozen=True):
    """Replicas that must hold the same bits do not: a memory or a processor erred without a sign."""

    KIND = CauseKind.CORRUPTION

    step: int
    """Committed steps when it was seen; up to a block of steps earlier it was not there, or not looked at."""
    workers: tuple[str, ...]
    """Whose state differs from that of most others."""
    agree: int
    """Workers that hold the same."""

    def __str__(self) -> str:
        return (
            f"after step {self.step - 1} the state of {', '.join(self.workers)} differs from that of the {self.agree} others "
            "that hold the same shard: silent data corruption"
        )


class GradientsDiffer(_Cause, frozen=True, kw_only=True):
    """A micro-batch that was computed several times gave other bits: a processor or a memory erred without a sign."""

    KIND = CauseKind.CORRUPTION

    step: int
    """The step, which was dropped."""
    micro: int
    """The micro-batch's number in the global batch."""
    workers: tuple[str, ...]
    """Who computed other bits than the rest; all of them, if nobody can tell."""
    agree: tuple[str, ...]
    """Who computed the same; empty: no two did."""

    def __str__(self) -> str:
        what = f"the gradient of micro-batch {self.micro} of step {self.step}"
        if self.agree:
            return (
                f"{what} that {', '.join(self.workers)} computed differs from that of {' and '.join(self.agree)}, "
                "which agree: silent data corruption"
            )
        return (
            f"{what} has other bits on each of {', '.join(self.workers)}, and no two agree: silent data corruption, or a "
            "script whose gradients differ from run to run"
        )


class ShapesDiffer(_Cause, frozen=True):
    """Workers of one job made replicas of different shapes."""

    KIND = CauseKind.SCRIPT

    reason: str
    """Which worker made which shape."""

    def __str__(self) -> str:
        return self.reason


Cause = (
    ConnectionClosed
    | NodeSilent
    | ContainerOutOfMemory
    | PlaceLost
    | AgentReplaced
    | WorkersFail
    | WorkersDoNotStart
    | StateRefused
    | ChecksFailed
    | NodeReclaimed
    | ProcessEnded
    | LeftEarly
    | KilledForMemory
    | ProcessVanished
    | NeverStarted
    | Hang
    | ProcessStopped
    | LeftBehind
    | NotReady
    | NotSaved
    | CollectiveFailed
    | MemberLeft
    | CoordinatorLost
    | StateUnread
    | NobodyHasState
    | LastStateIncomplete
    | Stopping
    | RuleMatched
    | ScriptRaised
    | NotFinite
    | StatesDiffer
    | GradientsDiffer
    | ShapesDiffer
)
"""Every cause. A state or message that holds one is decoded with this type."""
