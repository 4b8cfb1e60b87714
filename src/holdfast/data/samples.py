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

The record can be read while the job trains. Each line is written after all that it stands on: a commit after what all
workers computed of the step, and what is computed of a step after somebody's commit of the one before it. So the sizes of
all files are taken first, and everything is read after that. The commits below those sizes rest on lines that are all read.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from holdfast.errors import Damaged, DataError, UsageError
from holdfast.protocol.wire.decoding import decode

_log = logging.getLogger(__name__)
SUFFIX = ".samples"

Generation = tuple[int, int]
"""When the launch began, and its own number of the generation."""


_Some = Annotated[int, msgspec.Meta(ge=1)]


class _Head(msgspec.Struct, frozen=True, kw_only=True):
    job: str
    launch: str
    began_ns: int
    samples: _Some
    global_batch: _Some
    micro_batch: _Some
    own_order: bool = False


class _Line(msgspec.Struct, frozen=True, omit_defaults=True):
    g: int
    s: int
    p: int = 0
    m: dict[int, list[int]] | None = None


class _Read(NamedTuple):
    process: int
    """Number of the file."""
    generation: Generation
    line: _Line
    is_first: bool
    """It was there when the sizes were taken."""


_heads = msgspec.json.Decoder(_Head)
_lines = msgspec.json.Decoder(_Line)


class SampleLedger:
    """Writes the ledger of one process into a folder."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        launch: str,
        samples: int,
        global_batch: int,
        micro_batch: int,
        own_order: bool = False,
    ) -> None:
        """Begins a file.

        Args:
            launch: the same in all workers of one launch of the job, and in no other.
            samples: in the data set.
            own_order: the data set says itself which sample comes when, so an epoch need not have each once.

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
                f"run.steps(ledger={str(folder)!r}): {error.strerror}; specify a folder that can be written"
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
                own_order=own_order,
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


@dataclass(frozen=True, kw_only=True)
class SampleReport:
    """What a job was trained on."""

    samples: int
    """In the data set."""
    steps: int
    """Committed ones."""
    epochs: dict[int, Counter[int]] = field(default_factory=dict)
    """Epoch to how often each sample came in it."""
    job: str = ""
    """Whose record it is."""
    own_order: bool = False
    """The data set says itself which sample comes when, as a mixture does by its weights: then a sample may be repeated."""

    def repeated(self) -> dict[int, list[int]]:
        """Epoch to the samples that came more than once in it; empty if none did."""
        repeated = {e: sorted(i for i, n in seen.items() if n > 1) for e, seen in self.epochs.items()}
        return {epoch: ids for epoch, ids in repeated.items() if ids}

    def missing(self, epoch: int) -> int:
        """How many samples of the epoch did not come; 0 for every epoch but the last one begun."""
        return self.samples - len(self.epochs.get(epoch, ()))


def files_of(*folders: str | os.PathLike[str]) -> list[Path]:
    """The files of a record, in the order in which they are read."""
    return [path for folder in folders for path in sorted(Path(folder).glob(f"*{SUFFIX}"))]


def check(
    *folders: str | os.PathLike[str], seen: Callable[[int], None] = lambda nbytes: None
) -> SampleReport:
    """Reads the ledgers of all workers of one job. While it trains: up to a step that was committed as this began.

    Args:
        seen: is told of bytes as they are read.

    Raises:
        DataError: a committed step lacks a micro-batch, has one twice, or is missing itself; or a file is damaged.
        UsageError: no ledger is there, or those of several jobs.
    """
    # All sizes before the first byte, and the files are listed anew after that: see the module.
    sizes = {path: path.stat().st_size for path in files_of(*folders)}
    files = [_read(path, sizes.get(path, 0), seen) for path in files_of(*folders)]
    heads = [head for head, _, _ in filter(None, files)]
    if len({(h.job, h.samples) for h in heads}) != 1:
        jobs = ", ".join(sorted({h.job for h in heads})) or "no job"
        raise UsageError(
            f"{', '.join(map(str, folders))}: records of {jobs} were found there; specify the folder of exactly one job and "
            "data set"
        )
    began_ns: dict[str, int] = {}
    for head in heads:
        # Generations count from 1 in every launch. Launches never overlap, so the start time puts the
        # generations of all launches into one order.
        began_ns[head.launch] = min(head.began_ns, began_ns.get(head.launch, head.began_ns))
    lines = [
        _Read(process, (began_ns[head.launch], line.g), line, number < at_first)
        for process, (head, following, at_first) in enumerate(filter(None, files))
        for number, line in enumerate(following)
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
    return SampleReport(
        samples=samples,
        steps=steps,
        epochs=epochs,
        job=heads[0].job,
        own_order=any(h.own_order for h in heads),
    )


def _read(path: Path, size: int, seen: Callable[[int], None]) -> tuple[_Head, list[_Line], int] | None:
    """A file's lines, and how many of them are within its first `size` bytes; a last line that its process did not finish
    writing is left out."""
    content = path.read_bytes()
    seen(len(content))
    # Whatever follows the last newline was not finished. Its step is either not committed or claimed by
    # another worker too.
    head, *following = content.split(b"\n")[:-1] or [b""]
    # A process that was killed before its first line was complete has trained on nothing, so its file says
    # nothing.
    if not head:
        return None
    decoded: _Head | None = None
    lines: list[_Line] = []
    try:
        decoded = decode(_heads.decode, head, "the head")
        lines.extend(decode(_lines.decode, line, "a line") for line in following)
    except Damaged as error:
        number = 1 if decoded is None else len(lines) + 2
        raise DataError(
            f"{path}, line {number}, is damaged ({error}): the samples of this worker are not known"
        ) from None
    return decoded, lines, content.count(b"\n", 0, size) - 1


def _committed(lines: list[_Read]) -> Iterator[tuple[int, list[_Line]]]:
    """Every step that counts, and what its workers wrote of it."""
    computed: dict[tuple[Generation, int], dict[int, _Line]] = {}
    first: dict[Generation, int] = {}  # to the first step that it computed
    claims: set[tuple[int, Generation]] = set()
    settled: dict[Generation, int] = {}  # to the newest step that it had committed when the sizes were taken
    for process, generation, line, is_first in lines:
        # Of several lines of a process for one step of one generation the last counts: the step was tried
        # again, and only the last attempt's gradient was used.
        if line.m is not None:
            computed.setdefault((generation, line.s), {})[process] = line
            first[generation] = min(line.s, first.get(generation, line.s))
        else:
            claims.add((line.s, generation))
            if is_first:
                settled[generation] = max(line.s, settled.get(generation, line.s))
    generations = {generation for _, generation in claims}
    reach = {g: max((s for later, s in settled.items() if later >= g), default=-1) for g in generations}
    # A later generation that computed this step or an earlier one started from before its commit. So the
    # commit was lost with the workers that knew of it, and the later attempt is the one that counts.
    redone = {g: min((s for later, s in first.items() if later > g), default=None) for g in generations}
    claimed: dict[int, Generation] = {}
    for step, generation in claims:
        # A commit that came after the sizes may rest on a line that is not read, unless it is one that a later
        # commit stood on which was there.
        if step <= reach[generation]:
            claimed[step] = max(generation, claimed.get(step, generation))
    for step, generation in sorted(claimed.items()):
        again = redone[generation]
        if again is None or step < again:
            yield step, list(computed.get((generation, step), {}).values())


def _seen(step: int, parts: list[_Line], counts: set[int], samples: int) -> Iterator[tuple[int, list[int]]]:
    """(epoch, samples) of a step. Raises DataError unless every micro-batch came from exactly one worker."""
    micros = [micro for part in parts for micro in part.m or {}]
    if sorted(micros) != list(range(len(micros))) or len(micros) not in counts:
        raise DataError(
            f"step {step} was committed with the micro-batches {sorted(micros)}; each of "
            f"{' or '.join(map(str, sorted(counts)))} must occur exactly once"
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
