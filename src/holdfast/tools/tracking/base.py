"""The interface of trackers, and the small file with a tracker's position."""

from __future__ import annotations

import fcntl
import os
from abc import ABC, abstractmethod
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Protocol

import msgspec

from holdfast.coordinator.service.store import NewStep
from holdfast.errors import UsageError
from holdfast.protocol.wire.stored import read_stored
from holdfast.tools.tracking.position import Batch, Position


class Matter(msgspec.Struct, frozen=True, kw_only=True):
    """Something that a person has to do."""

    key: str
    """Equal for repetitions of the same matter."""
    id: str
    """Always the same for the same event of the same ledger, so that a receiver can recognize duplicates."""
    text: str
    """A description of what happened, and why."""
    command: str
    """A command that shows more."""
    utc: str
    """Time of the event, ISO 8601."""
    incident: int | None = None
    node: str | None = None


class Notes(msgspec.Struct, frozen=True, kw_only=True):
    """State of a notifier: the matters to be sent, and those that were sent."""

    waiting: tuple[Matter, ...] = ()
    """Matters whose delivery is not confirmed, oldest first."""
    more: int = 0
    """Number of further matters that were too many to keep."""
    told: dict[str, float] = {}
    """Key of a matter to the time when it was last accepted, in seconds since 1970."""
    next_s: float = 0.0
    """Nothing is sent before this time, in seconds since 1970."""
    failures: int = 0
    """Number of failed deliveries in a row."""


class OpenIncidents(msgspec.Struct, frozen=True, kw_only=True):
    """State of a sender of traces: incidents in the ledger that are still open."""

    facts: dict[int, dict[str, Any]] = {}
    """Number of the incident to its newest facts."""
    about: dict[int, tuple[tuple[float, str, str], ...]] = {}
    """Time, kind and text of findings and decisions about each incident."""
    before: dict[int, int] = {}
    """The previous incident on the same node."""
    closed: frozenset[int] = frozenset()
    """Numbers of the incidents that are over."""
    nodes: dict[str, int] = {}
    """Node to its newest incident."""
    start: dict[str, float] = {}
    """The times of the first events of this start, see `otlp.hear`."""


class PositionFile(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file next to a tracker's output."""

    position: Position = Position()
    size_bytes: int = 0
    """JSON lines: the file's size at this position; bytes beyond it were written by a follower that was killed."""
    swaps: bool = False
    """JSON lines: the file of this position may still have its temporary name."""
    files: int = 0
    """TensorBoard: number of files that were begun. W&B: number of segments that are finished."""
    run: str = ""
    """MLflow: the identifier by which the run is found. It is chosen before the run is made, so a second follower does
    not make a second run."""
    marks: dict[int, int] = {}
    """MLflow: number of each event that is being written to the step of its point, chosen before the first attempt."""
    rows: int = 0
    """W&B: number of rows that were written."""
    attempts: int = 1
    """W&B: number of times that the job computed steps, including the first."""
    notes: Notes = Notes()
    """State of notifiers."""
    told: OpenIncidents = OpenIncidents()
    """State of OpenTelemetry traces."""


_kept = msgspec.json.Decoder(PositionFile)


class Tracker(Protocol):
    """Receives the content of a ledger, each part once."""

    @property
    def position(self) -> Position:
        """How far it has read: everything before is safely written."""

    @property
    def waits(self) -> bool:
        """Whether it has work that depends on time: it then gets batches even if they contain nothing new."""

    def write(self, batch: Batch) -> None:
        """Writes a batch. If it is killed at any moment, it is at the old position or at the new one."""

    def close(self) -> None:
        """Ends it; everything that it was given is written."""


class TrackerKind(Protocol):
    """The interface of entry points of the group `holdfast.trackers`: a class of trackers. `FileTracker` implements
    most of it."""

    needs_target: bool
    """Whether the part after the colon of `KIND:TARGET` may not be empty."""

    def __call__(self, target: str, folder: Path) -> Tracker:
        """Makes a tracker. folder: the job's. Raises UsageError."""

    def check(self, target: str) -> None:
        """Checks what can be checked before a job starts. Raises UsageError."""


class KeptFile:
    """A `PositionFile` on disk, locked for one process at a time."""

    def __init__(self, path: Path) -> None:
        """Raises UsageError: another follower writes to the same target, or the file is damaged."""
        self._path = path
        self._lock = os.open(
            path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise UsageError(
                f"another `holdfast track` is writing to this target: it holds {path}.lock"
            ) from None
        try:
            self.value = read_stored(
                path, _kept, "remove this file and the data that was tracked, and everything is tracked again"
            )
        except FileNotFoundError:
            self.value = PositionFile()
        except BaseException:
            self.close()
            raise

    def replace(self, value: PositionFile) -> None:
        """Replaces the content in one step; it is safe from a power failure when this returns."""
        work = self._path.with_name(self._path.name + ".new")
        with work.open("wb") as out:
            out.write(msgspec.json.encode(value))
            out.flush()
            # Data first, then the name: a rename that survives a power failure without its content would give
            # an empty position, and everything would be tracked again.
            os.fsync(out.fileno())
        work.replace(self._path)
        self.value = value

    def close(self) -> None:
        """Releases the lock for other processes."""
        os.close(self._lock)


class FileTracker(ABC):
    """A tracker whose position is in a kept file. A subclass is constructed with the target and the job's folder."""

    needs_target: ClassVar[bool] = True
    needs_module: ClassVar[str] = ""
    """The module that it needs; the extra that installs it has the name of the tracker."""

    @classmethod
    def check(cls, target: str) -> None:
        """See `TrackerKind`."""
        if cls.needs_module and find_spec(cls.needs_module) is None:
            extra = cls.__module__.rpartition(".")[2]
            raise UsageError(f"{extra} needs {cls.needs_module}: pip install 'holdfast-train[{extra}]'")

    def __init__(self, kept: Path) -> None:
        """Raises UsageError as `KeptFile`, and any error of `_begin`, after which the file is unlocked again."""
        self._kept = KeptFile(kept)
        try:
            self._begin()
        except BaseException:
            self._kept.close()
            raise

    @abstractmethod
    def _begin(self) -> None:
        """Prepares the target to continue at the kept position."""

    @property
    def waits(self) -> bool:
        """See `Tracker`."""
        return False

    @property
    def position(self) -> Position:
        """See `Tracker`."""
        return self._kept.value.position

    def close(self) -> None:
        """See `Tracker`."""
        self._kept.close()


def figures(new: NewStep) -> dict[str, float]:
    """The known figures of a step by name: its own, and those that the script logged. The script's take precedence."""
    row = new.row
    own: dict[str, Any] = {
        "loss": row.loss,
        "grad_norm": row.grad_norm,
        "lr": row.lr,
        "weight": row.weight,
        "took_s": row.took_s,
        "world": row.world,
    }
    return {name: float(x) for name, x in {**own, **new.figures}.items() if x is not None}
