"""What a job trained and what failed: `report.json`, and `holdfast report --json`.

Unknown is None, and durations are in seconds. All fields have defaults but the job's name and its incidents: a file without them
is another program's. So a report of another version is read: a field that is new there is ignored, and one that is missing is
unknown. A part is None where nothing of it is known: if the job's coordinator could not write a report, the command that ran the
job makes one without any.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from holdfast.errors import Damaged
from holdfast.protocol.job import Durable
from holdfast.protocol.job_view import (
    Goodput,
    IncidentView,
    Logged,
    Pace,
    RootCauseView,
    SlowRank,
    StepCounts,
    TimeShares,
)
from holdfast.protocol.ledger import Changed
from holdfast.protocol.wire.decoding import decode

VERSION = 1


class ReportWorld(msgspec.Struct, frozen=True, kw_only=True):
    """How many workers there were."""

    target: int | None = None
    """At full strength."""
    history: list[tuple[float, int]] = []
    """When each size began, in seconds since the job's start, and the size."""
    micro_batches: int | None = None
    """Of a step."""
    idle: list[tuple[int, float]] = []
    """Sizes that do not divide the micro-batches, and the share of workers that each leaves idle."""


class ReportSteps(StepCounts, frozen=True, kw_only=True):
    """Steps since the job's start, and what they took."""

    median_s: float | None = None
    skipped: int | None = None
    """Those that count without an update."""


class FinalState(msgspec.Struct, frozen=True, kw_only=True):
    """What training ended with."""

    loss: float | None = None
    params_xxh3: str | None = None
    """Of the parameters, the digests of all shards; None: not said, or not equal in all replicas."""
    replicas_equal: bool | None = None
    """None: nobody compared."""
    state_xxh3: str | None = None
    """Of everything that is to be the same in all replicas."""
    covered: list[str] | None = None
    """Names of the protected objects that this is over."""
    left_out: list[str] | None = None
    """Paths of buffers that it is not over."""


class InMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What no durable tier has, and stays in the nodes' memory for the next start."""

    step: int | None = None
    """None: of a run before, and not all nodes have said what they hold."""


class SnapshotCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Snapshots in the nodes' memory since the job's start."""

    complete: int = 0
    skipped: int = 0
    """Shards that were not taken."""


class AllStarts(TimeShares, frozen=True, kw_only=True):
    """The goodput over all `holdfast run` of a job."""

    starts: int
    recomputed_s: float | None = None
    computed_s: float | None = None
    unknown: list[str] = []
    elapsed_s: float | None = None
    """From the beginning of the first start to the end of the newest."""
    between_s: float | None = None
    """The part of it that is in no start."""
    ettr: float | None = None
    """`productive_s` over `elapsed_s`."""


class EpochSeen(msgspec.Struct, frozen=True, kw_only=True):
    """How often the samples of one epoch came."""

    epoch: int
    came: int
    """Samples that came at least once."""
    repeated: int
    """Samples that came more than once."""
    missing: int
    """Samples that did not come. In the last epoch these may be those that are still to come."""


class SamplesAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Whether every sample came once, for people, as far as it is known."""

    once: bool | None = None
    """None: not known."""
    why: str
    recorded: str | None = None
    """The folder of the record, as the job's workers named it."""
    checked_utc: str | None = None
    """None: nobody has checked."""
    steps: int | None = None
    samples: int | None = None
    epochs: tuple[EpochSeen, ...] = ()


class JobReport(msgspec.Struct, frozen=True, kw_only=True):
    """One start of a job, finished or not."""

    schema: int = VERSION
    job: str
    engine: str | None = None
    outcome: str | None = None
    """`finished`, `stopped`, `failed`, `killed` or `running`."""
    reason: str | None = None
    """Why it ended, in words."""
    cause: str | None = None
    """The same for programs, a `protocol.notices.NoticeCause`; None: nothing stopped it."""
    world: ReportWorld | None = None
    steps: ReportSteps | None = None
    pace: Pace | None = None
    dropped: dict[str, int] | None = None
    """Rows that were removed from the ledger to save space, by what they were."""
    incidents: list[IncidentView]
    changes: list[Changed] = []
    """Planned changes of the membership."""
    slow: list[SlowRank] = []
    figures: dict[str, Logged] = {}
    """What the script logged, the newest value of each name."""
    goodput: Goodput | None = None
    final: FinalState | None = None
    saved: Durable | None = None
    """The newest checkpoint in a durable tier."""
    unread: list[str] = []
    """Why checkpoints that are there were not loaded."""
    in_memory: InMemory | None = None
    unsaved: int | None = None
    """The step of the last state, if no durable tier has it."""
    snapshots: SnapshotCounts | None = None
    samples_folder: str | None = None
    """In which the workers record their samples."""
    blame: RootCauseView | None = None
    """Of a job that failed: the first failing rank, its node and the cause."""
    queued_again: bool = False
    """The engine starts it again by itself."""
    all_starts: AllStarts | None = None
    """None: this was the first start, or nobody has added them up."""
    samples: SamplesAnswer | None = None
    """None: nobody has looked."""


reports = msgspec.json.Decoder(JobReport)
"""Of files."""


def report_announced(
    value: Any, what: str = "the report of the job is damaged", error: type[Exception] = Damaged
) -> JobReport:
    """A report as JSON has it; arguments as of `decode`."""
    made: JobReport = decode(partial(msgspec.convert, type=JobReport), value, what, error=error)
    return made


def encode_report(report: JobReport) -> bytes:
    """As it is written into a file: JSON, for people too."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"
