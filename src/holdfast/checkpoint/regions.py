"""Parts of saved tensors into live ones: only the bytes that are needed, in few large reads."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from holdfast.checkpoint.layout import CHUNK_BYTES
from holdfast.checkpoint.located import Located
from holdfast.checkpoint.replicate import Blob
from holdfast.errors import StateError
from holdfast.tensors.index import TensorSpec
from holdfast.tensors.tree import dtype_of

READ_BYTES = 16 << 20
"""The largest read; what lies closer together than a checksum's chunk is read at once."""

THREADS = 4
MOST_RUNS = 4096
"""A part of a piece in more runs than this is cut from the range around all of them."""


@dataclass(frozen=True)
class Region:
    """A box of a saved piece: where it begins, and the tensor of its size that is to receive it."""

    rank: int
    spec: TensorSpec
    offsets: tuple[int, ...]
    """Of its first element, for each dimension of the piece."""
    target: torch.Tensor


@dataclass(kw_only=True)
class _Buffer:
    """A region's bytes as they come in. It has memory from its first byte to its last, so that not all of a state is in
    memory twice."""

    region: Region
    nbytes: int
    cut: tuple[tuple[slice, ...], tuple[int, ...]] | None
    """Slices that make the region of the bytes, and the shape to apply them to; None: all of them are the region's."""
    missing: int
    """Bytes still to come."""
    data: torch.Tensor | None = None
    """None: nothing has come in."""


@dataclass(frozen=True)
class _Run:
    """Bytes of the blob, and where they go in a buffer."""

    low: int
    """The first of them, from the blob's begin on."""
    nbytes: int
    buffer: _Buffer
    at: int
    """Where the first goes."""


def read_regions(
    located: Located,
    regions: Sequence[Region],
    threads: int = THREADS,
    seen: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """Fills every region's target. `seen` is told, from several threads, of bytes as they come in.

    Raises:
        StateError: bytes that no source has; targets may be partly filled then.
    """
    by_rank: dict[int, list[_Run]] = {}
    for region in regions:
        by_rank.setdefault(region.rank, []).extend(_runs_of(region))
    reads = [(rank, read) for rank, runs in by_rank.items() for read in _merged(runs)]
    if not reads:
        return
    todo = iter(reads)
    lock = threading.Lock()

    failed = threading.Event()  # then the others need not go on

    def work() -> None:
        # Each thread opens its own blobs, because a connection serves one thread. The jobs are small and
        # dealt out in order of position, so the threads read neighbouring bytes at the same time.
        blobs: dict[int, Blob] = {}
        try:
            while True:
                with lock:
                    job = next(todo, None)
                if job is None or failed.is_set():
                    return
                rank, runs = job
                if rank not in blobs:
                    blobs[rank] = located.open_blob(rank)
                _read(blobs[rank], runs, lock)
                seen(sum(run.nbytes for run in runs))
        except BaseException:
            failed.set()
            raise
        finally:
            with lock:
                located.fetched_bytes += sum(r.fetched_bytes for r in blobs.values())
            for blob in blobs.values():
                blob.close()

    count = min(threads, len(reads))
    with ThreadPoolExecutor(count, thread_name_prefix="holdfast-load") as pool:
        for job in [pool.submit(work) for _ in range(count)]:
            job.result()


def _read(blob: Blob, runs: list[_Run], lock: threading.Lock) -> None:
    low = runs[0].low
    data = blob.fetch(low, max(r.low + r.nbytes for r in runs))
    whole = torch.frombuffer(data, dtype=torch.uint8)
    for run in runs:
        buffer = run.buffer
        # Several threads fill parts of one buffer. The lock covers making it and counting down; the
        # copy itself goes to disjoint ranges and needs none.
        with lock:
            if buffer.data is None:
                buffer.data = torch.empty(buffer.nbytes, dtype=torch.uint8)
        buffer.data[run.at : run.at + run.nbytes] = whole[run.low - low : run.low - low + run.nbytes]
        with lock:
            buffer.missing -= run.nbytes
            complete = buffer.missing == 0
        if complete:
            _deliver(buffer, buffer.data)
            buffer.data = None


def _deliver(buffer: _Buffer, data: torch.Tensor) -> None:
    region = buffer.region
    value = data.view(dtype_of(region.spec))
    if buffer.cut is not None:
        slices, shape = buffer.cut
        value = value.view(shape)[slices]
    with torch.no_grad():
        region.target.copy_(value.view(region.target.shape) if buffer.cut is None else value)


def _runs_of(region: Region) -> Iterator[_Run]:
    """The blob's bytes that make up a region, in contiguous runs."""
    spec, lengths = region.spec, tuple(region.target.shape)
    item = dtype_of(spec).itemsize
    if any(n == 0 for n in lengths):
        return
    if any(o + n > s for o, n, s in zip(region.offsets, lengths, spec.shape, strict=True)):
        raise StateError(f"{spec.path}: {lengths} at {region.offsets} is not within {spec.shape}")
    # Trailing dimensions that are taken completely make one contiguous run. So a DTensor sharded in its first
    # dimension is one read, however many dimensions it has.
    inner = len(lengths)  # dimensions from `inner` on are taken whole
    while inner > 0 and lengths[inner - 1] == spec.shape[inner - 1]:
        inner -= 1
    outer = max(0, inner - 1)
    strides = [math.prod(spec.shape[d + 1 :]) for d in range(len(lengths))]
    run_items = math.prod(lengths[outer:])
    count = math.prod(lengths[:outer])
    begin = sum(o * s for o, s in zip(region.offsets, strides, strict=True))
    # A narrow column of a large matrix is thousands of runs of a few bytes. Each is cheap to read and dear to
    # handle in Python, so all lines around them are read in one go and the column is cut out.
    if count > MOST_RUNS:
        yield _covering(region, item)
        return
    nbytes = math.prod(lengths) * item
    buffer = _Buffer(region=region, nbytes=nbytes, cut=None, missing=nbytes)
    for number in range(count):
        at, rest = begin, number
        for d in range(outer - 1, -1, -1):
            rest, step = divmod(rest, lengths[d])
            at += step * strides[d]
        yield _Run(spec.offset + at * item, run_items * item, buffer, number * run_items * item)


def _covering(region: Region, item: int) -> _Run:
    """All lines of the piece that the region has a part of, at once."""
    spec, lengths = region.spec, tuple(region.target.shape)
    line_bytes = math.prod(spec.shape[1:]) * item
    first, count = region.offsets[0], lengths[0]
    nbytes = count * line_bytes
    slices = (
        slice(0, count),
        *(slice(o, o + n) for o, n in zip(region.offsets[1:], lengths[1:], strict=True)),
    )
    buffer = _Buffer(region=region, nbytes=nbytes, cut=(slices, (count, *spec.shape[1:])), missing=nbytes)
    return _Run(spec.offset + first * line_bytes, nbytes, buffer, 0)


def _merged(runs: list[_Run]) -> Iterator[list[_Run]]:
    """Runs that are read at once: neighbours, up to READ_BYTES. A longer run is cut."""
    pieces: list[_Run] = []
    for run in runs:
        for at in range(0, run.nbytes, READ_BYTES):
            nbytes = min(READ_BYTES, run.nbytes - at)
            pieces.append(_Run(run.low + at, nbytes, run.buffer, run.at + at))
    pieces.sort(key=lambda r: r.low)
    group: list[_Run] = []
    end = 0
    for piece in pieces:
        # A gap smaller than a chunk costs nothing to read over: both sides need the chunk that it lies in. A
        # larger one would be bytes that nobody wants.
        if group and (piece.low - end >= CHUNK_BYTES or piece.low + piece.nbytes - group[0].low > READ_BYTES):
            yield group
            group = []
        group.append(piece)
        end = max(end, piece.low + piece.nbytes) if len(group) > 1 else piece.low + piece.nbytes
    if group:
        yield group
