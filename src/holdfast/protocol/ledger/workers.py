"""Worker processes, from their start to their end."""

from __future__ import annotations

from holdfast.protocol.causes import CauseKind
from holdfast.protocol.ledger.base import LedgerEvent

ORDINARY_ENDS = frozenset({0, -9, -15})
"""Exit codes of workers that finished or were ended on purpose. If nobody meant it, an incident reports it."""

_SIGNALS = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}


def _exit_text(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was ended by {_SIGNALS.get(-code, f'signal {-code}')}"


class WorkerStarted(LedgerEvent, frozen=True, kw_only=True):
    """An agent started a worker's process."""

    ROUTINE = True

    worker: str
    """Its name."""
    node: str
    """Where it runs."""
    pid: int
    """Its process id there."""
    log: str
    """Path of its output."""

    def sentence(self) -> str:
        return f"{self.worker} started on {self.node} (pid {self.pid})"


class WorkerReady(LedgerEvent, frozen=True, kw_only=True):
    """A worker can be a member of a generation."""

    worker: str
    """Its name."""
    node: str
    """Where it runs."""

    def sentence(self) -> str:
        return f"{self.worker} is ready"


class WorkerDone(LedgerEvent, frozen=True, kw_only=True):
    """A worker made all steps."""

    ROUTINE = True

    worker: str
    """Its name."""
    step: int
    """Committed steps that it holds."""
    params_xxh3: str
    """Digest of its parameters."""

    def sentence(self) -> str:
        return f"{self.worker} completed all {self.step} steps, parameters {self.params_xxh3}"


class WorkerExited(LedgerEvent, frozen=True, kw_only=True):
    """A worker's process ended."""

    worker: str
    """Its name."""
    node: str
    """Where it ran."""
    code: int
    """Its exit code; -N: signal N ended it."""
    log: str
    """Path of its output."""

    def sentence(self) -> str:
        # A normal end of a job with a thousand workers would otherwise be a thousand lines.
        if self.code in ORDINARY_ENDS:
            return ""
        log = f"; log {self.log}" if self.log else ""
        return f"{self.worker} {_exit_text(self.code)}{log}"

    def paths(self) -> tuple[str, ...]:
        return (self.log,)


# Members that are taken out have an incident; this is for the others, of which nobody would hear.
class WorkerEnded(LedgerEvent, frozen=True, kw_only=True):
    """Workers that were no members are ended by the coordinator."""

    workers: list[str]
    """Their names."""
    cause: str
    """Why, in words."""
    cause_kind: CauseKind | None = None
    """The kind of the cause; None: not known."""

    def sentence(self) -> str:
        return f"{', '.join(self.workers)} ended by the coordinator: {self.cause}"


class Failed(LedgerEvent, frozen=True, kw_only=True):
    """The script raised in a worker."""

    worker: str
    """Its name."""
    rank: int | None
    """Its rank; None: it was no member."""
    node: str
    """Where it runs."""
    step: int | None
    """The step; None: before the first one."""
    cause: str
    """The error, in words."""
    cause_kind: CauseKind | None = None
    """The kind of the cause; None: not known."""

    def sentence(self) -> str:
        step = "before the first step" if self.step is None else f"at step {self.step}"
        who = self.worker if self.rank is None else f"rank {self.rank}"
        return f"{who} on {self.node} failed {step}: {self.cause}"


class Stalled(LedgerEvent, frozen=True, kw_only=True):
    """A worker stands still, so all are looked at."""

    worker: str
    """Its name."""
    node: str
    """Where it runs."""
    step: int | None
    """Committed steps of the job."""

    def sentence(self) -> str:
        step = "" if self.step is None else f" at step {self.step}"
        return f"{self.worker} makes no progress{step}: inspecting the stacks of every rank"


class StallJudged(LedgerEvent, frozen=True, kw_only=True):
    """Who holds the others up."""

    workers: list[str]
    """Culprits; empty: none was found."""
    reason: str
    """How they were found."""
    where: str
    """Where all ranks stood."""
    stood_at_step: int | None = None
    """At level 0 and 1, optimizer steps in this start of the culprit that has fewest; None: not known."""
    collective: str | None = None
    """What the culprits have not entered while others wait in it; None: not known."""
    evidence: list[str] = []
    """Who stood where and who waited for whom, a line each; empty: nothing was known."""

    def sentence(self) -> str:
        where = f"; {self.where}" if self.where else ""
        if not self.workers:
            return f"no rank was found at fault: {self.reason}{where}"
        return f"held up by {', '.join(self.workers)}: {self.reason}{where}"


class Rebuild(LedgerEvent, frozen=True, kw_only=True):
    """A spare worker is built for another shard."""

    worker: str
    """Its name."""
    shard_index: int
    """The shard that it is built for now."""
    before: int
    """The shard that it was built for."""

    def sentence(self) -> str:
        return (
            f"{self.worker} becomes shard {self.shard_index}, which is missing (it was shard {self.before})"
        )


class CollectiveError(LedgerEvent, frozen=True, kw_only=True):
    """A collective raised in a worker."""

    ROUTINE = True

    worker: str
    """Its name."""
    step: int
    """The step; -1: it could not be restored."""
    detail: str
    """The error's text."""

    def sentence(self) -> str:
        where = "while it restored the state" if self.step < 0 else f"at step {self.step}"
        return f"a collective failed in {self.worker} {where}: {self.detail}"
