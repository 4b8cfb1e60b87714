"""A ledger of samples: which ones every committed step was trained on, as the workers were given them.

With it a run can prove that every sample came exactly once per epoch, through kills and resizes. Each process writes a
file of its own, one line of JSON at a time:

    {"job": ..., "launch": ..., "began_ns": ..., "samples": N, ...}          first
    {"g": 3, "s": 17, "p": 816, "m": {"4": [ids], "5": [ids]}}               a step is computed: before its gradient goes out
    {"g": 3, "s": 17}                                                        it is committed: before the next one begins

g is the generation, s the step, p its first position in the data, m the micro-batches of this worker. Every launch of a
job counts its generations from 1, and no two launches overlap.

A worker may be killed between any two instructions, so one line proves nothing. A step counts if some worker says that
it was committed in generation g, and no later generation computed that step or an earlier one: then the commit was lost
with the workers that knew of it. What it was trained on is what all workers of generation g wrote before the last part
of their gradient went out; nobody can commit without that part. (Before the vote would be too late: the others may
commit with the whole gradient of a worker that died on its way to the vote.) A step that is tried again in its
generation is written again; the last line of a process counts. Lines survive the process that wrote them, not the power
failure of the machine.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from holdfast.errors import DataError, UsageError

_log = logging.getLogger(__name__)
SUFFIX = ".samples"

Generation = tuple[int, int]
"""When the launch began, and its own number of the generation."""


class _Head(msgspec.Struct, frozen=True, kw_only=True):
    job: str
    launch: str
    began_ns: int
    samples: int
    global_batch: int
    micro_batch: int


class _Line(msgspec.Struct, frozen=True, omit_defaults=True):
    g: int
    s: int
    p: int = 0
    m: dict[int, list[int]] | None = None


_heads = msgspec.json.Decoder(_Head)
_lines = msgspec.json.Decoder(_Line)


class SampleLedger:
    """Writes the ledger of one process into a folder."""

    def __init__(
        self, folder: str | os.PathLike[str], launch: str, samples: int, global_batch: int, micro_batch: int
    ) -> None:
        """Begins a file.

        Args:
            launch: the same in all workers of one launch of the job, and in no other.
            samples: in the data set.

        Raises:
            UsageError: the folder cannot be written.
        """
        now_ns = time.time_ns()
        job = os.environ.get("HOLDFAST_JOB") or f"alone-{os.getpid()}-{now_ns}"
        worker = os.environ.get("HOLDFAST_WORKER", "alone").replace("#", "-").replace("/", "-")
        path = Path(folder) / f"{worker}-{os.getpid()}-{now_ns}{SUFFIX}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # A new file for each process and start, opened with O_EXCL and O_APPEND: no two writers share a
            # file, so no line can be torn by another one's.
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        except OSError as error:
            raise UsageError(
                f"run.steps(ledger={str(folder)!r}): {error.strerror}; give a folder that can be written"
            ) from error
        self._path = path
        self._write(
            _Head(
                job=job,
                launch=launch,
                began_ns=now_ns,
                samples=samples,
                global_batch=global_batch,
                micro_batch=micro_batch,
            )
        )

    def giving(
        self, generation: int, step: int, position: int, given: Mapping[int, npt.NDArray[np.int64]]
    ) -> None:
        """What this worker adds to the step. Raises OSError: then its gradient must not go out."""
        ids = {micro: samples.tolist() for micro, samples in given.items()}
        self._write(_Line(generation, step, position, ids))

    def committed(self, generation: int, step: int) -> None:
        """The step counts. The update is done, so an error is told and does not stop anybody."""
        try:
            self._write(_Line(generation, step))
        except OSError as error:
            _log.warning("the sample ledger %s lacks the commit of step %d: %s", self._path, step, error)

    def close(self) -> None:
        os.close(self._fd)

    def _write(self, line: _Head | _Line) -> None:
        encoded = msgspec.json.encode(line) + b"\n"
        # One system call for each line: a killed process leaves complete lines and at most one unfinished one
        # at the end, which the reader drops. There is no fsync; the module says what survives.
        if os.write(self._fd, encoded) != len(encoded):
            raise OSError(f"{self._path}: the disk is full")


@dataclass(frozen=True)
class Checked:
    """What a job was trained on."""

    samples: int
    """In the data set."""
    steps: int
    """Committed ones."""
    epochs: dict[int, Counter[int]] = field(default_factory=dict)
    """Epoch to how often each sample came in it."""

    def repeated(self) -> dict[int, list[int]]:
        """Epoch to the samples that came more than once in it; empty if none did."""
        repeated = {e: sorted(i for i, n in seen.items() if n > 1) for e, seen in self.epochs.items()}
        return {epoch: ids for epoch, ids in repeated.items() if ids}

    def missing(self, epoch: int) -> int:
        """How many samples of the epoch did not come; 0 for every epoch but the last one begun."""
        return self.samples - len(self.epochs.get(epoch, ()))


def check(*folders: str | os.PathLike[str]) -> Checked:
    """Reads the ledgers of all workers of one job.

    Raises:
        DataError: a committed step lacks a micro-batch, has one twice, or is missing itself.
        UsageError: no ledger is there, or those of several jobs.
    """
    files = [_read(path) for folder in folders for path in sorted(Path(folder).glob(f"*{SUFFIX}"))]
    heads = [head for head, _ in filter(None, files)]
    if len({(h.job, h.samples) for h in heads}) != 1:
        jobs = ", ".join(sorted({h.job for h in heads})) or "no job"
        raise UsageError(
            f"{', '.join(map(str, folders))}: ledgers of {jobs}; give the folder of exactly one job and data set"
        )
    began_ns: dict[str, int] = {}
    for head in heads:
        # Generations count from 1 in every launch. Launches never overlap, so the start time puts the
        # generations of all launches into one order.
        began_ns[head.launch] = min(head.began_ns, began_ns.get(head.launch, head.began_ns))
    lines = [
        (process, (began_ns[head.launch], line.g), line)
        for process, (head, following) in enumerate(filter(None, files))
        for line in following
    ]
    samples = heads[0].samples
    counts = {h.global_batch // h.micro_batch for h in heads}
    epochs: dict[int, Counter[int]] = {}
    steps = 0
    for step, parts in _committed(lines):
        # Committed steps must be 0, 1, 2 and so on. A gap means that a ledger is missing, and a count over
        # the rest would look like a proof.
        if step != steps:
            raise DataError(f"step {steps} was not committed, but step {step} was")
        steps += 1
        for epoch, ids in _seen(step, parts, counts, samples):
            epochs.setdefault(epoch, Counter()).update(ids)
    return Checked(samples, steps, epochs)


def _read(path: Path) -> tuple[_Head, list[_Line]] | None:
    """A file's lines; a last one that its process did not finish writing is left out."""
    # Whatever follows the last newline was not finished. Its step is either not committed or claimed by
    # another worker too.
    head, *following = path.read_bytes().split(b"\n")[:-1] or [b""]
    # A process that was killed before its first line was complete has trained on nothing, so its file says
    # nothing.
    if not head:
        return None
    return _heads.decode(head), [_lines.decode(line) for line in following]


def _committed(lines: list[tuple[int, Generation, _Line]]) -> Iterator[tuple[int, list[_Line]]]:
    """Every step that counts, and what its workers wrote of it. lines: with the number of the process."""
    computed: dict[tuple[Generation, int], dict[int, _Line]] = {}
    first: dict[Generation, int] = {}  # to the first step that it computed
    claimed: dict[int, Generation] = {}
    for process, generation, line in lines:
        # Of several lines of a process for one step of one generation the last counts: the step was tried
        # again, and only the last attempt's gradient was used.
        if line.m is not None:
            computed.setdefault((generation, line.s), {})[process] = line
            first[generation] = min(line.s, first.get(generation, line.s))
        else:
            claimed[line.s] = max(generation, claimed.get(line.s, generation))
    for step, generation in sorted(claimed.items()):
        # A later generation that computed this step or an earlier one started from before its commit. So the
        # commit was lost with the workers that knew of it, and the later attempt is the one that counts.
        if not any(later > generation and begin <= step for later, begin in first.items()):
            yield step, list(computed.get((generation, step), {}).values())


def _seen(step: int, parts: list[_Line], counts: set[int], samples: int) -> Iterator[tuple[int, list[int]]]:
    """(epoch, samples) of a step. Raises DataError unless every micro-batch came from exactly one worker."""
    micros = [micro for part in parts for micro in part.m or {}]
    if sorted(micros) != list(range(len(micros))) or len(micros) not in counts:
        raise DataError(
            f"step {step} was committed with the micro-batches {sorted(micros)}; each of "
            f"{' or '.join(map(str, sorted(counts)))} must be there once"
        )
    for part in parts:
        for micro, ids in (part.m or {}).items():
            begin = part.p + micro * len(ids)
            for low, high in _cuts(begin, len(ids), samples):
                yield (begin + low) // samples, ids[low:high]


def _cuts(begin: int, count: int, samples: int) -> Iterator[tuple[int, int]]:
    """A micro-batch cut where an epoch ends."""
    low = 0
    while low < count:
        high = min(count, low + samples - (begin + low) % samples)
        yield low, high
        low = high
