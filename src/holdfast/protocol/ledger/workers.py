"""Worker processes, from their start to their end."""

from __future__ import annotations

import msgspec

from holdfast.protocol.causes import CauseKind
from holdfast.protocol.ledger.base import LedgerEvent


class WorkerStarted(LedgerEvent, frozen=True, kw_only=True):
    """An agent started a worker's process."""

    worker: str
    """Its name."""
    node: str
    """Where it runs."""
    pid: int
    """Its process id there."""
    log: str
    """Path of its output."""


class WorkerReady(LedgerEvent, frozen=True, kw_only=True):
    """A worker can be a member of a generation."""

    worker: str
    """Its name."""
    node: str
    """Where it runs."""


class WorkerDone(LedgerEvent, frozen=True, kw_only=True):
    """A worker made all steps."""

    worker: str
    """Its name."""
    step: int
    """Committed steps that it holds."""
    params_xxh3: str
    """Digest of its parameters."""


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


class WorkerEnded(LedgerEvent, frozen=True, kw_only=True):
    """Workers that were no members are ended by the coordinator."""

    workers: list[str]
    """Their names."""
    cause: str
    """Why, in words."""
    cause_kind: CauseKind | None = None
    """The kind of the cause; None: an older version wrote it."""


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
    """The kind of the cause; None: an older version wrote it."""


class Stalled(LedgerEvent, frozen=True, kw_only=True):
    """A worker stands still, so all are looked at."""

    worker: str
    """Its name."""
    node: str
    """Where it runs."""
    step: int | None
    """Committed steps of the job."""


class StallJudged(LedgerEvent, frozen=True, kw_only=True):
    """Who holds the others up."""

    workers: list[str]
    """Culprits; empty: none was found."""
    reason: str
    """How they were found."""
    where: str
    """Where all ranks stood."""


class Rebuild(LedgerEvent, frozen=True, kw_only=True):
    """A spare worker is built for another shard."""

    worker: str
    """Its name."""
    shard_index: int = msgspec.field(name="position")
    """The shard that it is built for now."""
    before: int
    """The shard that it was built for."""


class CollectiveError(LedgerEvent, frozen=True, kw_only=True):
    """A collective raised in a worker."""

    worker: str
    """Its name."""
    step: int
    """The step; -1: it could not be restored."""
    detail: str
    """The error's text."""
