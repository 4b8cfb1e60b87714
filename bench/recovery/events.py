"""The event log: one JSON line per committed step and worker, written by every system alike.

CLOCK_MONOTONIC is one clock for all processes of a machine, so times from different workers, and the
harness's own time of a kill, compare directly. A line is one write to a file opened with O_APPEND: lines of
different processes never mix.

Standard library only: workers of every system import this.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

NOT_PARTICIPATING = -1
"""The rank of a worker that follows the training without contributing gradients (a spare that trains along)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """One worker finished the optimizer update of one step."""

    t: float
    """Seconds of CLOCK_MONOTONIC when the update was done."""
    pid: int
    rank: int
    step: int
    """Number of the step, the same on every replica; a step that is recomputed has the same number again."""
    world: int
    """Replicas whose gradients are in the update."""
    gen: str
    """Names the membership in which the step was computed: it changes when anyone leaves or joins."""
    took_s: float
    """Time since the worker's previous commit, without the time it was held at the gate."""


class CommitLog:
    """The writing side, one in every worker."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._pid = os.getpid()
        self._previous = time.monotonic()

    def commit(self, *, rank: int, step: int, world: int, gen: object, held_s: float = 0.0) -> None:
        """Call directly after the optimizer update. `held_s` is the time spent at the gate in this step."""
        now = time.monotonic()
        took = now - self._previous - held_s
        self._previous = now
        event = Commit(
            t=now, pid=self._pid, rank=rank, step=step, world=world, gen=str(gen), took_s=round(took, 6)
        )
        os.write(self._file, (json.dumps(asdict(event)) + "\n").encode())


@dataclass(frozen=True, slots=True)
class StateBytes:
    """What a worker said of its part of the state."""

    t: float
    pid: int
    kind: Literal["holds", "fetched"]
    """holds: once, before the first step. fetched: from a peer or a checkpoint, when it is there."""
    count: int
    """Bytes."""


class StateLog:
    """The writing side of the bytes of the state, in every worker of a sharded job."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def holds(self, count: int) -> None:
        """Call when the model and the optimizer are there."""
        self._write("holds", count)

    def fetched(self, count: int) -> None:
        """Call when so many bytes of the state have arrived from somewhere else."""
        self._write("fetched", count)

    def _write(self, kind: Literal["holds", "fetched"], count: int) -> None:
        said = StateBytes(time.monotonic(), os.getpid(), kind, count)
        os.write(self._file, (json.dumps(asdict(said)) + "\n").encode())


def read_states(path: Path) -> list[StateBytes]:
    """What all workers have said of their state up to now."""
    if not path.exists():
        return []
    return [StateBytes(**json.loads(line)) for line in path.read_bytes().split(b"\n")[:-1]]


class CommitReader:
    """The reading side: keeps everything read so far and reads on from there."""

    def __init__(self, path: Path) -> None:
        path.touch()
        self._file = path.open("rb")
        self._rest = b""
        self.commits: list[Commit] = []

    def read(self) -> list[Commit]:
        """All commits up to now."""
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        self.commits += parse(lines)
        return self.commits

    def close(self) -> None:
        self._file.close()


def parse(lines: Iterable[bytes | str]) -> list[Commit]:
    """Commits from the lines of a log."""
    return [Commit(**json.loads(line)) for line in lines]
