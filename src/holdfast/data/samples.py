"""A ledger of samples: those that every committed step was trained on, as the workers received them.

With it a run can prove that every sample came exactly once per epoch, through kills and resizes. Each process writes a
file of its own, one line of JSON at a time:

    {"job": ..., "launch": ..., "began_ns": ..., "samples": N, ...}          first
    {"g": 3, "s": 17, "p": 816, "m": {"4": [ids], "5": [ids]}}               a step is computed: before its gradient goes out
    {"g": 3, "s": 17}                                                        it is committed: before the next one begins

g is the generation, s the step, p its first position in the data, m the micro-batches of this worker. Every launch of a
job counts its generations from 1, and no two launches overlap.

A worker may be killed between any two instructions, so one line proves nothing. A step counts if some worker recorded that
it was committed in generation g, and no later generation computed that step or an earlier one: then the commit was lost
with the workers that knew of it. Its samples are those that all workers of generation g wrote before the last part
of their gradient went out; nobody can commit without that part. (Before the vote would be too late: the others may
commit with the whole gradient of a worker that died on its way to the vote.) A step that is tried again in its
generation is written again; the last line of a process counts. Lines survive the process that wrote them, not the power
failure of the machine.

The record can be read while the job trains. Each line is written after all lines that it depends on: a commit after the
lines of all workers that computed the step, and a line for a computed step after some worker's commit of the step
before it. So the sizes of all files are taken first, and everything is read after that. All lines on which the commits
within those sizes depend are then read.
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
"""When the launch began, and the launch's own number of the generation."""


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
    """Number of the process's file."""
    generation: Generation
    line: _Line
    is_first: bool
    """The line was in the file when the sizes were taken."""


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
            launch: an identifier, the same in all workers of one launch of the job, and different in every other launch.
            samples: number of samples in the data set.
            own_order: the data set has an order of its own, so an epoch need not contain each sample once.

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
        """Records this worker's samples in the step. Raises OSError: then its gradient must not be sent."""
        ids = {micro: samples.tolist() for micro, samples in given.items()}
        self._write(_Line(generation, step, position, ids))

    def committed(self, generation: int, step: int) -> None:
        """Records that the step is committed. The update is already done, so an error is logged and does not stop
        training."""
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
    """The samples that a job was trained on."""

    samples: int
    """Number of samples in the data set."""
    steps: int
    """Number of committed steps."""
    epochs: dict[int, Counter[int]] = field(default_factory=dict)
    """Epoch to how often each sample was used in it."""
    job: str = ""
    """The job whose record it is."""
    own_order: bool = False
    """The data set has an order of its own, as a mixture has by its weights: then samples may repeat."""

    def repeated(self) -> dict[int, list[int]]:
        """Epoch to the samples that were used more than once in it; empty if there are none."""
        repeated = {e: sorted(i for i, n in seen.items() if n > 1) for e, seen in self.epochs.items()}
        return {epoch: ids for epoch, ids in repeated.items() if ids}

    def missing(self, epoch: int) -> int:
        """Number of samples of the epoch that were not used; 0 for every epoch but the last one begun."""
        return self.samples - len(self.epochs.get(epoch, ()))


def files_of(*folders: str | os.PathLike[str]) -> list[Path]:
    """The files of a record, in the order in which they are read."""
    return [path for folder in folders for path in sorted(Path(folder).glob(f"*{SUFFIX}"))]


def check(
    *folders: str | os.PathLike[str], seen: Callable[[int], None] = lambda nbytes: None
) -> SampleReport:
    """Reads the ledgers of all workers of one job. While the job trains, the report covers the steps that were
    committed when the call began.

    Args:
        seen: called with the number of bytes that were read.

    Raises:
        DataError: a committed step lacks a micro-batch, has one twice, or is missing itself; or a file is damaged.
        UsageError: there is no ledger, or there are those of several jobs.
    """
    # All sizes are taken before the first byte is read, and the files are listed again after that: see the
    # module.
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
    """The lines of a file, and how many of them are within its first `size` bytes. A last line that its process did not
    finish writing is left out."""
    content = path.read_bytes()
    seen(len(content))
    # Bytes after the last newline are an unfinished line. Its step is either not committed, or recorded by
    # another worker too.
    head, *following = content.split(b"\n")[:-1] or [b""]
    # A process that was killed before its first line was complete has not trained, so its file contributes
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
    """Every step that counts, and the lines of its workers."""
    computed: dict[tuple[Generation, int], dict[int, _Line]] = {}
    first: dict[Generation, int] = {}  # the first step that it computed
    claims: set[tuple[int, Generation]] = set()
    settled: dict[Generation, int] = {}  # the newest step that it had committed when the sizes were taken
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
        # A commit that came after the sizes may depend on a line that is not read, unless a later commit was
        # already there that depends on this one.
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
    """Splits a micro-batch where an epoch ends."""
    low = 0
    while low < count:
        high = min(count, low + samples - (begin + low) % samples)
        yield low, high
        low = high
