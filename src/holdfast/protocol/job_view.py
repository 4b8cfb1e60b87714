"""The status of a job as its coordinator sends it: one value for the terminal, the page, the operator, and `holdfast status
--json`.

A watcher gets the complete view once, and then only what has changed. The view is as large as the job, and nearly all of it
stays the same from one update to the next. What changes with every step is one number that all members share, so the row of a
worker leaves its `step` out where it is that number.

Unknown is None, and durations are in seconds. All fields of the head have defaults, so that a view of another version can be
read: a field that is new there is ignored, and one that is missing is unknown.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from holdfast.errors import ProtocolError
from holdfast.protocol.health import Ask
from holdfast.protocol.ledger import IncidentFacts
from holdfast.protocol.wire.decoding import decode

VERSION = 1
WHOLE, CHANGED = "status", "status-changed"
"""Kinds of announcements."""
LEDGER_KEPT = "kept"
"""What a watcher says who asked for the ledger at the end, and has written it down."""
COMMON = -1
"""`WorkerRow.step` of a row that was sent without one: it is `ViewChange.common`."""


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How fast the job makes progress, by wall time."""

    steps_per_s: float | None = None
    """Steps that stayed, see `wall_time.steps_per_s`."""
    until: int | None = None
    """Committed steps of the whole job."""
    left: int | None = None
    """Those that are to come; of an ended job none are."""
    eta_s: float | None = None
    """Until they are committed at that rate."""


class StepCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Steps since the job's start."""

    committed: int | None = None
    lost: int | None = None
    """Committed steps that had to be computed again."""
    computed: int | None = None
    """All of them, those that were lost and done again among them."""


class TimeShares(msgspec.Struct, frozen=True, kw_only=True):
    """What a part of the wall time was spent on."""

    wall_s: float | None = None
    productive_s: float | None = None
    """Steps that stayed, without what was lost in them."""
    share: float | None = None
    """Productive time over `wall_s`."""
    classes: dict[str, float] = {}
    """Every class (`protocol.phases.TimeClass`) that has any time; their sum is `wall_s`."""


class Goodput(TimeShares, frozen=True, kw_only=True):
    """What the wall time was spent on, over all starts of the job's workers."""

    recomputed_s: float | None = None
    """Steps that were rolled back and done again."""
    computed_s: float | None = None
    """All steps, with what was lost in them."""
    unknown: list[str] = []
    """Classes whose time cannot be told from that of others."""
    recent: TimeShares = TimeShares()
    """The last hour."""


class HealthView(msgspec.Struct, frozen=True, kw_only=True):
    """The health of machines, as far as the job knows it."""

    asks: list[Ask] = []
    quarantine: dict[str, str] = {}
    """Machine to why it is not used."""


class IncidentView(IncidentFacts, frozen=True, kw_only=True, omit_defaults=False):
    """An incident, with every field written: who reads a view need not know the defaults."""


class SlowRank(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that computes longer than its peers, so that all wait for it."""

    rank: int | None
    node: str
    worker: str
    ratio: float
    """Its time over theirs."""
    part: str
    """Of a step, in which it needs most more."""
    since_step: int
    found_step: int
    until_step: int | None
    """None: it still is."""
    excess_s: float
    """How much longer than its peers it computes in a step."""
    share: float
    """Of a step's time, for which the others wait."""
    worker_hours_per_hour: float
    lost_s: float
    """Training time that it has cost so far."""


class Logged(msgspec.Struct, frozen=True, kw_only=True):
    """The newest value of a name that the script logs."""

    step: int
    value: float | None
    """None: it is not finite."""


class RootCauseView(msgspec.Struct, frozen=True, kw_only=True):
    """Why the job failed, which is printed last: the cause, the first rank that failed, its node, the last lines of its log,
    and the log's path."""

    cause: str
    """In words."""
    rank: int | None = None
    node: str | None = None
    step: int | None = None
    traceback: str = ""
    tail: list[str] = []
    log: str = ""
    cause_kind: str = ""


class SnapshotView(msgspec.Struct, frozen=True, kw_only=True):
    """The newest complete snapshot in the nodes' memory."""

    step: int
    nodes: int
    """That each shard is on, at least."""
    nbytes: int
    took_s: float
    age_s: float


class TierView(msgspec.Struct, frozen=True, kw_only=True):
    """What a durable tier has."""

    url: str
    step: int | None = None
    age_s: float | None = None
    took_s: float | None = None
    under_way: int | None = None
    """The step that is being written."""
    written: tuple[int, int] | None = None
    """Bytes of it that are there, and of how many."""
    failing: bool = False
    slow: bool = False
    """A checkpoint is on its way, and no byte of it arrives."""


class SavingView(msgspec.Struct, frozen=True, kw_only=True):
    """What is saved where, and how old it is."""

    snapshot: SnapshotView | None = None
    skipped: int = 0
    tiers: list[TierView] = []


class NodeRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A node. Fields that do not apply are left out."""

    node: str
    host: str
    place: list[str]
    alive: bool
    failures: int
    left: bool = False
    """It has left as it was to."""
    held: str | None = None
    """Why it is not used now."""
    identity: str = ""
    """Of its machine."""
    unknown: list[str] = []
    """Sources of readings that do not answer or cannot be read."""


class WorkerRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker that has not ended."""

    worker: str
    node: str
    rank: int | None
    """None: it is no member."""
    state: str
    """A `coordinator.kernel.state.WorkerPhase`, or `restoring`."""
    restored: tuple[int, int] | None
    """Of one that fetches the state: bytes that it has, and of how many."""
    step: int | None = COMMON
    """Committed steps that it knows of."""
    log: str


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """The job at one moment."""

    schema: int = VERSION
    job: str
    phase: str
    """A `coordinator.kernel.state.JobPhase`."""
    outcome: str | None = None
    reason: str | None = None
    cause: str | None = None
    """Why it was stopped, a `protocol.notices.NoticeCause`."""
    level: int | None = None
    generation: int = 0
    world: int = 0
    """Workers that compute."""
    target: int = 0
    """Workers at full strength."""
    step: int | None = None
    until: int | None = None
    pace: Pace = Pace()
    steps: StepCounts = StepCounts()
    goodput: Goodput = Goodput()
    loss: float | None = None
    median_s: float | None = None
    """Of a step, on the slowest member."""
    t_s: float = 0.0
    """Since the job's start."""
    health: HealthView = HealthView()
    incidents: list[IncidentView] = []
    """The newest, oldest first."""
    slow: list[SlowRank] = []
    """Those that are slow now."""
    figures: dict[str, Logged] = {}
    """What the script logs."""
    blame: RootCauseView | None = None
    saving: SavingView = SavingView()
    nodes: list[NodeRow] = []
    workers: list[WorkerRow] = []


HEAD = tuple(name for name in JobView.__struct_fields__ if name not in ("nodes", "workers"))
"""Fields that are of the same size in a large job as in a small one."""


class ViewChange(msgspec.Struct, frozen=True, kw_only=True):
    """What differs from the view that the same connection was sent before."""

    head: dict[str, Any] = {}
    """Fields of `HEAD` by name."""
    common: int | None = None
    """The step of every row of a worker that names none."""
    nodes: list[NodeRow] = []
    """New or changed rows, whole. A node never leaves the list."""
    workers: list[WorkerRow] = []
    gone: list[str] = []
    """Names of workers that left the list."""


class _Whole(JobView, frozen=True, kw_only=True):
    """As it is sent to those who watch."""

    common: int | None = None


class ReceivedView:
    """The view that one connection has received so far, for its receiver."""

    def __init__(self, unreadable: str = "a status", error: type[Exception] = ProtocolError) -> None:
        """unreadable, error: what is raised where what was sent cannot be read."""
        self._unreadable, self._error = unreadable, error
        self._head: JobView | None = None
        self._common: int | None = None
        self._nodes: dict[str, NodeRow] = {}
        self._workers: dict[str, WorkerRow] = {}

    def whole(self, said: Any) -> JobView:
        """Takes in a whole view; what it is now. Raises `error`."""
        whole: _Whole = self._read(_Whole, said)
        self._head, self._common = whole, whole.common
        self._nodes = {row.node: row for row in whole.nodes}
        self._workers = {row.worker: row for row in whole.workers}
        return self._now(whole)

    def changed(self, said: Any) -> JobView | None:
        """Takes in what changed; None: there is nothing that it could be a change of. Raises `error`."""
        if self._head is None:
            return None
        change: ViewChange = self._read(ViewChange, said)
        # Completed with two fields that every view has, so that the rest may be converted as a view.
        head: JobView = self._read(JobView, {"job": self._head.job, "phase": self._head.phase, **change.head})
        told = {name: getattr(head, name) for name in HEAD if name in change.head}
        self._head = msgspec.structs.replace(self._head, **told)
        self._common = change.common
        self._nodes |= {row.node: row for row in change.nodes}
        self._workers |= {row.worker: row for row in change.workers}
        for name in change.gone:
            self._workers.pop(name, None)
        return self._now(self._head)

    def _read(self, kind: type[msgspec.Struct], said: Any) -> Any:
        return decode(partial(msgspec.convert, type=kind), said, self._unreadable, error=self._error)

    def _now(self, head: JobView) -> JobView:
        # Lists of its own: who is given this view may keep it while the next change is taken in.
        workers = [
            row if row.step != COMMON else msgspec.structs.replace(row, step=self._common)
            for row in self._workers.values()
        ]
        told = {name: getattr(head, name) for name in HEAD}
        return JobView(**told, nodes=list(self._nodes.values()), workers=workers)
