"""What a tracker is, and the small file that says how far it is."""

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
    """Equal for what is the same matter again."""
    id: str
    """Always the same for the same event of the same ledger: whoever gets it twice can tell."""
    text: str
    """What happened and why, in words."""
    command: str
    """What says more."""
    utc: str
    """When, ISO 8601."""
    incident: int | None = None
    node: str | None = None


class Notes(msgspec.Struct, frozen=True, kw_only=True):
    """Of a notifier: what is to be sent, and what was."""

    waiting: tuple[Matter, ...] = ()
    """Not known to be delivered, oldest first."""
    more: int = 0
    """Of those that came meanwhile so many were too many to keep."""
    told: dict[str, float] = {}
    """Key of a matter to when it was last taken in, in seconds since 1970."""
    next_s: float = 0.0
    """Nothing is sent before, in seconds since 1970."""
    failures: int = 0
    """Attempts in a row that were not delivered."""


class OpenIncidents(msgspec.Struct, frozen=True, kw_only=True):
    """What a sender of traces knows of incidents that are still open, from the ledger."""

    facts: dict[int, dict[str, Any]] = {}
    """Number of the incident to its newest facts."""
    about: dict[int, tuple[tuple[float, str, str], ...]] = {}
    """When, kind and text of what was found and decided about it."""
    before: dict[int, int] = {}
    """The incident before on the same node."""
    closed: frozenset[int] = frozenset()
    """Those that are over."""
    nodes: dict[str, int] = {}
    """Node to its newest incident."""
    start: dict[str, float] = {}
    """When what came first in this start, see `otlp.hear`."""


class PositionFile(msgspec.Struct, frozen=True, kw_only=True):
    """The file beside what a tracker wrote."""

    position: Position = Position()
    size_bytes: int = 0
    """JSON lines: the file's size at this position; what is behind it was written by a follower that was killed."""
    swaps: bool = False
    """JSON lines: the file of this position may still have its other name."""
    files: int = 0
    """TensorBoard: files that were begun. W&B: segments that are finished."""
    run: str = ""
    """MLflow: what the run is found by. It is chosen before the run is made, so a second follower makes no second run."""
    marks: dict[int, int] = {}
    """MLflow: number of each event that is being written now to the step of its point, chosen before the first attempt."""
    rows: int = 0
    """W&B: rows that were written."""
    attempts: int = 1
    """W&B: how often the job computed, the first time included."""
    notes: Notes = Notes()
    """Notifiers."""
    told: OpenIncidents = OpenIncidents()
    """OpenTelemetry."""


_kept = msgspec.json.Decoder(PositionFile)


class Tracker(Protocol):
    """Takes in what a ledger has, each part once."""

    @property
    def position(self) -> Position:
        """How far it is: all before is safely written."""

    @property
    def waits(self) -> bool:
        """It has something of its own to do as time passes: it wants batches in which nothing is new."""

    def write(self, batch: Batch) -> None:
        """Takes in a batch. Killed at any moment it is at the old position or at the new one."""

    def close(self) -> None:
        """Ends it; what it was given is written."""


class TrackerKind(Protocol):
    """What an entry point of the group `holdfast.trackers` names: a class of trackers. `FileTracker` has most of it."""

    needs_target: bool
    """Nothing may stand in for what comes after the colon of `KIND:TARGET`."""

    def __call__(self, target: str, folder: Path) -> Tracker:
        """A tracker. folder: the job's. Raises UsageError."""

    def check(self, target: str) -> None:
        """What can be known before a job starts. Raises UsageError."""


class KeptFile:
    """A `PositionFile`, written and read, of one process at a time."""

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
        """In one step, and safe from a loss of power when it returns."""
        work = self._path.with_name(self._path.name + ".new")
        with work.open("wb") as out:
            out.write(msgspec.json.encode(value))
            out.flush()
            # Data first, then the name: a rename that survives a loss of power without its content would be
            # an empty position, and everything would be tracked again.
            os.fsync(out.fileno())
        work.replace(self._path)
        self.value = value

    def close(self) -> None:
        """Another process may have it."""
        os.close(self._lock)


class FileTracker(ABC):
    """A tracker whose position is in a kept file. A subclass is made of the target and the job's folder."""

    needs_target: ClassVar[bool] = True
    needs_module: ClassVar[str] = ""
    """The module that it needs, which comes with the extra that is called as this tracker."""

    @classmethod
    def check(cls, target: str) -> None:
        """See `TrackerKind`."""
        if cls.needs_module and find_spec(cls.needs_module) is None:
            extra = cls.__module__.rpartition(".")[2]
            raise UsageError(f"{extra} needs {cls.needs_module}: pip install 'holdfast-train[{extra}]'")

    def __init__(self, kept: Path) -> None:
        """Raises UsageError as `KeptFile`, and whatever `_begin` does; then the file is free again."""
        self._kept = KeptFile(kept)
        try:
            self._begin()
        except BaseException:
            self._kept.close()
            raise

    @abstractmethod
    def _begin(self) -> None:
        """Makes the target ready to go on at the kept position."""

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
    """What is known of a step as named numbers: its own, and what the script logged. The script's names win."""
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
