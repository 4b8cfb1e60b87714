"""Snapshots from the device into host memory: our path against a plain copy into pinned memory, and what it takes from a
loop of matrix products that runs meanwhile."""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from holdfast.checkpoint.memory import PAGE, SlotMaps
from holdfast.tensors import staging
from holdfast.train import state_image

TENSOR_BYTES = 64 << 20
MEMORY = Path("/dev/shm")


class Tensors:
    """A state of so many bytes, in tensors of 64 MiB."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        count, each = max(1, nbytes // TENSOR_BYTES), min(nbytes, TENSOR_BYTES)
        self.tensors = [torch.full((each // 4,), float(i), device=device) for i in range(count)]

    def state_dict(self) -> dict[str, list[torch.Tensor]]:
        return {"tensors": self.tensors}

    def load_state_dict(self, tree: dict[str, list[torch.Tensor]]) -> None:
        raise NotImplementedError


@dataclass(kw_only=True)
class Copies:
    """Seconds of every repetition, by way; `known_s`: to make the slot known to the driver."""

    nbytes: int
    known_s: float = 0.0
    pinned: bool = False
    seconds: dict[str, list[float]] = field(default_factory=dict)
    products: dict[str, list[float]] = field(default_factory=dict)
    """Seconds of one matrix product, without a copy beside it (`alone`) and with one (`beside`)."""


PLAIN, SLOT, BUFFERS = "plain copy, pinned", "into the slot", "through two buffers"


def measure(nbytes: int, device: torch.device, repetitions: int, product: int) -> Copies:
    """product: rows of the matrices that are multiplied.

    Raises:
        OSError: no room in the host's memory.
    """
    things = Tensors(nbytes, device)
    image = state_image.capture({"state": things}, 1)
    found = Copies(nbytes=image.index.nbytes)
    with tempfile.NamedTemporaryFile(prefix="bench-gpu-", dir=MEMORY) as file:
        file.truncate(PAGE + image.index.nbytes)
        with open(file.name, "r+b") as slot:
            for _ in range(PAGE + image.index.nbytes >> 20):
                slot.write(bytes(1 << 20))
        pinning = staging.Pinning(device)
        maps = SlotMaps(pinning)
        began_s = time.perf_counter()
        with maps.blob(file.name, image.index.nbytes) as row:
            found.known_s = time.perf_counter() - began_s
            found.pinned = pinning.covers(row) or device.type == "cpu"
            plain = [
                torch.empty(t.shape, dtype=t.dtype, pin_memory=device.type == "cuda") for t in things.tensors
            ]

            def copy_plainly() -> None:
                for into, tensor in zip(plain, things.tensors, strict=True):
                    into.copy_(tensor, non_blocking=True)
                wait(device)

            ways: dict[str, Callable[[], None]] = {PLAIN: copy_plainly}
            if found.pinned:
                ways[SLOT] = lambda: staging.copy_into(
                    row, image.parts(0, image.index.nbytes), image.ready, pinned=True
                )
            ways[BUFFERS] = lambda: staging.copy_into(row, image.parts(0, image.index.nbytes), image.ready)
            for number in range(repetitions + 1):  # the first one warms up
                for name, copy in ways.items():
                    took_s = _timed(copy, device)
                    if number:
                        found.seconds.setdefault(name, []).append(took_s)
            check(row, things)
            _products(found, ways[SLOT if found.pinned else BUFFERS], device, repetitions, product)
        maps.forget(file.name)
    return found


def check(row: memoryview, things: Tensors) -> None:
    """What lies in the slot is the state."""
    at = 0
    for tensor in things.tensors:
        got = torch.frombuffer(row[at : at + tensor.numel() * 4], dtype=torch.float32)
        assert torch.equal(got, tensor.cpu()), "the slot holds something else than the device"
        at += tensor.numel() * 4


def _products(
    found: Copies, copy: Callable[[], None], device: torch.device, repetitions: int, size: int
) -> None:
    """Blocks of matrix products in turn, one with copies beside it and one without; each as long as a copy or longer."""
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(size, size, device=device, dtype=kind) for _ in range(2))
    once_s = min(_timed(lambda: torch.matmul(a, b), device) for _ in range(3))
    copy_s = statistics.median(min(found.seconds.values(), key=min))
    count = max(3, int(2 * copy_s / once_s))

    def block() -> None:
        for _ in range(count):
            torch.matmul(a, b)

    for _ in range(repetitions):
        found.products.setdefault("alone", []).append(_timed(block, device) / count)
        stop, begun = threading.Event(), threading.Event()

        def go_on(stop: threading.Event = stop, begun: threading.Event = begun) -> None:
            while not stop.is_set():
                begun.set()
                copy()

        thread = threading.Thread(target=go_on)
        thread.start()
        begun.wait()
        found.products.setdefault("beside", []).append(_timed(block, device, whole=False) / count)
        stop.set()
        thread.join()


def _timed(work: Callable[[], object], device: torch.device, whole: bool = True) -> float:
    """whole: everything on the device is waited for; else what this thread has queued."""
    wait(device)
    began_s = time.perf_counter()
    work()
    if whole:
        wait(device)
    elif device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return time.perf_counter() - began_s


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
