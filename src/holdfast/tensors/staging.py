"""Between a GPU's memory and the host's, in parallel with what the GPU computes.

Copies run on a stream of their own, which begins when the state is complete (`now`) and for which only the copying thread
waits. Into memory whose pages the driver knows (`Pinning`: the agent's slots) the copy engine writes at the speed of PCIe;
elsewhere bytes pass through two pinned buffers, of which one is filled while the other is read. Without a GPU none of this
is used, but all of it works on CPU tensors too, which is how it is tested (`FAR`).
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from typing import Any

import numpy as np
import torch

STAGE_BYTES = 16 << 20
"""Of one pinned buffer: large enough for PCIe's full speed, small enough to stay in the cache until it is read."""

COPY_BYTES = 16 << 20
"""Copied by one call."""

FAR = {"cuda"}
"""Device types whose memory the host does not read."""

Ready = Mapping[torch.device, Any]
"""For every device the event after which its tensors may be read."""


def is_far(tensor: torch.Tensor) -> bool:
    """Whether the host cannot read it where it is."""
    return tensor.device.type in FAR


def now(tensors: Iterable[torch.Tensor]) -> Ready:
    """What has been queued until now, on the devices of these tensors. From the thread that queued it."""
    # One event for each device and not for each tensor: they are recorded on the current stream, so what was
    # queued before is covered for all tensors of that device.
    events: dict[torch.device, Any] = {}
    for device in {t.device for t in tensors if t.device.type == "cuda"}:
        events[device] = torch.cuda.Event()  # type: ignore[no-untyped-call]
        events[device].record(torch.cuda.current_stream(device))
    return events


@cache
def stream_of(device: torch.device, purpose: str) -> Any:
    """One for each purpose: torch deals its streams out in turn, and a new one is soon NCCL's or FSDP's too."""
    # Cached, because torch has 32 streams for each device and deals them out in turn. A stream that is shared
    # with NCCL or FSDP2 would make copies wait for collectives, and those for copies.
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


class Lane:
    """Copies to or from one device, one after the other, in parallel with its other work."""

    def __init__(self, device: torch.device, ready: Ready, purpose: str = "out") -> None:
        self._stream = stream_of(device, purpose)
        # Only this lane waits for the event. The stream that computes goes on.
        if device in ready:
            self._stream.wait_event(ready[device])

    def on(self) -> AbstractContextManager[Any]:
        """What is queued inside comes after what this lane was given before."""
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Host memory that the device writes to at full speed."""
        with self.on():
            # On the lane's own stream: torch's allocator gives pinned memory out again once that stream is
            # done with it.
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._stream is not None)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        """Queues a copy; returns a mark for `wait`."""
        with self.on():
            target.copy_(source, non_blocking=True)
        return self.mark()

    def mark(self) -> Any:
        """What was queued until now."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    @staticmethod
    def wait(mark: Any) -> None:
        """Returns when that has come to its end."""
        if mark is not None:
            mark.synchronize()


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor."""
    if tensor.numel() == 0:
        # An empty tensor may have no storage to view as bytes.
        return torch.empty(0, dtype=torch.uint8)
    # One element may have any stride, and is contiguous.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def seen(part: torch.Tensor) -> memoryview:
    """Host memory as the rest of the program reads it."""
    array: Any = part.numpy()
    return memoryview(array)


def read(parts: Iterable[torch.Tensor], ready: Ready) -> Iterator[memoryview]:
    """The bytes of these parts in host memory, in their order. Each is there until the next one is asked for."""
    lanes: dict[torch.device, tuple[Lane, list[torch.Tensor]]] = {}
    begun = 0
    ahead: tuple[torch.Tensor, Any] | None = None
    for part in _small(parts):
        if is_far(part):
            if part.device not in lanes:
                lane = Lane(part.device, ready)
                lanes[part.device] = lane, [lane.buffer(STAGE_BYTES) for _ in range(2)]
            lane, buffers = lanes[part.device]
            # Two buffers, since a consumer still reads one while the next copy runs. It asks for the next
            # part only when it is done with this one, so a third is never needed.
            into = buffers[begun % 2][: part.numel()]
            begun += 1
            coming = into, lane.copy(into, part)
        else:
            coming = part, None
        # One part behind: the copy that was just queued runs while the caller reads the one before it.
        if ahead is not None:
            Lane.wait(ahead[1])
            yield seen(ahead[0])
        ahead = coming
    if ahead is not None:
        Lane.wait(ahead[1])
        yield seen(ahead[0])


def _small(parts: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    for part in parts:
        yield from torch.split(part, STAGE_BYTES) if is_far(part) else (part,)


@contextmanager
def filling(parts: Sequence[torch.Tensor], ready: Ready) -> Iterator[list[memoryview]]:
    """Host memory to write bytes into that belong into these parts; on leaving they have been copied there."""
    far = sum(p.numel() for p in parts if is_far(p))
    if not far:
        yield [seen(p) for p in parts]
        return
    lane = Lane(next(p.device for p in parts if is_far(p)), ready, "in")
    buffer, at = lane.buffer(far), 0
    pairs = []
    for part in parts:
        if is_far(part):
            pairs.append((part, buffer[at : at + part.numel()]))
            at += part.numel()
        else:
            pairs.append((part, part))
    yield [seen(near) for _, near in pairs]
    for part, near in pairs:
        if part is not near:
            lane.copy(part, near)
    Lane.wait(lane.mark())


def number(tensor: torch.Tensor) -> Callable[[], float]:
    """The value that a GPU's tensor of one element has now, to be called when it is needed. It is fetched meanwhile, so that
    asking waits for nothing that was queued later."""
    into = torch.empty((), dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    # Into pinned memory, or the copy would block the host after all.
    into.copy_(tensor, non_blocking=True)
    events = now([tensor])

    def wait() -> float:
        for event in events.values():
            event.synchronize()
        return float(into)

    return wait


def copy_into(
    memory: memoryview, tensors: Iterable[torch.Tensor], ready: Ready, pinned: bool = False
) -> None:
    """Copies the tensors one after the other into host memory, without holding the GIL while bytes move.

    Args:
        ready: when a GPU's may be read.
        pinned: a GPU can write to the memory.
    """
    target: Any = np.frombuffer(memory, dtype=np.uint8)
    try:
        _copy_into(target, list(tensors), ready, pinned)
    finally:
        # An array over a slot's memory keeps the memoryview exported, and the caller's `with` could not release it.
        del target


def _copy_into(target: Any, tensors: list[torch.Tensor], ready: Ready, pinned: bool) -> None:
    if pinned and any(map(is_far, tensors)):
        _copy_whole(torch.from_numpy(target), map(_flat_where_it_is(ready), tensors), ready)
        return
    at, runs = 0, []
    for tensor in tensors:
        if tensor.is_contiguous() or is_far(tensor):
            runs.append((at, tensor))
        else:
            # Without a contiguous copy in between, which would take as much memory again.
            into = torch.from_numpy(target[at : at + tensor.nbytes])
            into.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        at += tensor.nbytes
    pieces = read(map(_flat_where_it_is(ready), (tensor for _, tensor in runs)), ready)
    for at, tensor in runs:
        end = at + tensor.nbytes
        while at < end:
            # numpy's copyto releases the GIL while it copies, so the script's other threads go on.
            source: Any = np.frombuffer(next(pieces), dtype=np.uint8)
            for low in range(0, len(source), COPY_BYTES):
                part = source[low : low + COPY_BYTES]
                np.copyto(target[at + low : at + low + len(part)], part)
            at += len(source)


def _flat_where_it_is(ready: Ready) -> Callable[[torch.Tensor], torch.Tensor]:
    """The bytes of a tensor on its own device, in one run."""

    def run(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_contiguous():
            return flat(tensor)
        with Lane(tensor.device, ready).on():
            return flat(tensor.contiguous())

    return run


def _copy_whole(target: torch.Tensor, parts: Iterable[torch.Tensor], ready: Ready) -> None:
    """Copies the parts one after the other into pinned host memory; returns when all bytes have arrived."""
    lanes: dict[torch.device, Lane] = {}
    at = 0
    for part in parts:
        lane = lanes.get(part.device) or lanes.setdefault(part.device, Lane(part.device, ready))
        lane.copy(target[at : at + part.numel()], part)
        at += part.numel()
    for lane in lanes.values():
        Lane.wait(lane.mark())


class Pinning:
    """Memory of the agent's that the driver knows, so that the GPU copies straight into it.

    Made known once for every slot; that takes a fraction of a second for every GiB, on the thread that copies. Where it is
    refused the copies take the way through pinned buffers.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[int, int] = {}

    def mapped(self, memory: mmap.mmap) -> None:
        """This process has mapped it."""
        if self._device.type != "cuda":
            return
        begin, size = address(memory), len(memory)
        with torch.cuda.device(self._device):
            code = torch.cuda.cudart().cudaHostRegister(begin, size, 0)  # type: ignore[no-untyped-call]
        if int(code) == 0:
            # A refusal is no error: some systems limit locked memory. Then `covers` is false and the copies
            # take the way through pinned buffers.
            self._known[begin] = size
        else:
            _forget_refusal(self._device)

    def unmapped(self, memory: mmap.mmap) -> None:
        """It is about to be given back."""
        begin = address(memory)
        # Before the pages are given back. A registered address that is mapped anew would send the GPU's
        # writes into other memory.
        if self._known.pop(begin, 0):
            torch.cuda.cudart().cudaHostUnregister(begin)  # type: ignore[no-untyped-call]

    def covers(self, memory: memoryview) -> bool:
        """Whether a GPU can copy into it at full speed."""
        if not self._known:
            return False
        begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        return any(low <= begin and begin + len(memory) <= low + size for low, size in self._known.items())


def _forget_refusal(device: torch.device) -> None:
    """The runtime keeps a refusal for this thread's next kernel, whose launch torch would then take for the one that
    failed: without this a snapshot, or a step of the user's, would raise "invalid argument"."""
    with suppress(RuntimeError):
        torch.empty(1, device=device).fill_(0)


def address(memory: mmap.mmap) -> int:
    """Where a mapping begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
