"""GPUs: speed of memory and of the connection to the host, and the same matrix products repeated and compared bit by
bit.

Every function takes the device, so its logic also runs on tensors of a CPU. Kernels give the same result for the same
inputs on one device (no atomics in a matrix product of this size and type). If two devices of one model differ, or one
differs from itself, a unit computes wrongly, and no counter shows it.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import xxhash

from holdfast.health.checks.check import CannotCheck, Task
from holdfast.protocol.health import CheckResult, Condition
from holdfast.tools.checks.cpu import matrices
from holdfast.tools.checks.memory import check_patterns, copy_rate

if TYPE_CHECKING:
    import torch


MATRIX = 8192
COPY_BYTES = 2 << 30
HOST_BYTES = 512 << 20
PATTERN_SHARE = 0.5
"""The share of free memory that is used on a GPU on which nothing trains."""

Sync = Callable[[], object]


class Device(msgspec.Struct, frozen=True):
    """One GPU."""

    index: int
    device: Any
    """A torch.device."""
    model: str
    free_bytes: int

    @property
    def subject(self) -> str:
        """Its name for people."""
        return f"gpu {self.index}"


def check_gpus(task: Task) -> Iterator[CheckResult]:
    """Checks every GPU of the machine in turn, then copies between each and the next. Gives no result without GPUs."""
    devices = find_devices()
    for gpu in devices:
        yield from check_device(gpu, task.seconds)
    # A ring covers every GPU as sender and as receiver with n copies; all pairs would take n times as long
    # and find the same bad GPU.
    for gpu, other in zip(devices, [*devices[1:], *devices[:1]], strict=True):
        if gpu is not other:
            yield between(gpu, other, min(HOST_BYTES, gpu.free_bytes // 4))


def find_devices() -> list[Device]:
    """The GPUs that torch sees. Raises CannotCheck if there is a GPU that torch cannot use."""
    from pathlib import Path

    # `/dev/nvidiactl` and the like exist without a GPU; only a numbered file is one.
    there = any(p.name[6:].isdigit() for p in Path("/dev").glob("nvidia*"))
    try:
        import torch
    except ImportError:
        if there:
            raise CannotCheck("needs torch, which is not installed here") from None
        return []
    if not torch.cuda.is_available():
        if there:
            raise CannotCheck("there is a GPU, and torch cannot use it: no CUDA in this build, or no driver")
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        # Sizes follow the free memory, not the card's: another process may be using it, and a check that runs
        # out of memory has no result.
        free, _ = torch.cuda.mem_get_info(device)
        found.append(Device(index, device, torch.cuda.get_device_name(device), free))
    return found


def check_device(gpu: Device, seconds: float, size: int = MATRIX) -> Iterator[CheckResult]:
    """Checks one GPU by itself."""
    sync = synchronizer(gpu.device)
    copied = min(COPY_BYTES, gpu.free_bytes // 4)
    rate, times = copy_rate(gpu.device, copied, seconds / 4, sync)
    yield _measured(gpu, "gpu-memory-copy", rate, "GB/s", f"read and written, best of {times}")
    for name, to_device in (("gpu-to-device", True), ("gpu-to-host", False)):
        moved = min(HOST_BYTES, gpu.free_bytes // 4)
        yield _measured(gpu, name, host_rate(gpu.device, moved, to_device, sync), "GB/s", "pinned memory")
    patterns = check_patterns("gpu-memory-patterns", gpu.device, int(gpu.free_bytes * PATTERN_SHARE), seconds)
    yield msgspec.structs.replace(patterns, subject=gpu.subject, model=gpu.model)
    yield from burn(gpu, seconds, size)


def burn(
    gpu: Device, seconds: float, size: int, damage: Callable[[int, Any], None] = lambda n, x: None
) -> Iterator[CheckResult]:
    """Computes products in float32 and bfloat16. Each is compared with the first on the device, and the first is hashed
    for comparison with other devices of the model. damage: for tests; called with the number and the result of every
    round."""
    import torch

    a, b = matrices(gpu.device, size)
    sync = synchronizer(gpu.device)
    digest = xxhash.xxh3_64()
    rounds, wrong, best_s = 0, 0, math.inf
    with exact_float32():
        for kind in (torch.float32, torch.bfloat16):
            # float32 and bfloat16 run in different units, and a defect may be in one of them only.
            x, y = a.to(kind), b.to(kind)
            first = x @ y
            digest.update(first.cpu().view(torch.uint8).numpy())
            until_s = time.monotonic() + seconds / 2
            while True:
                # Kernels are launched asynchronously; without this the time would be that of the launch.
                sync()
                began_s = time.perf_counter()
                again = x @ y
                sync()
                if kind is torch.float32:
                    best_s = min(best_s, time.perf_counter() - began_s)
                rounds += 1
                damage(rounds, again)
                # Compared on the device, so that an error of the bus or the host is not taken for one of the
                # GPU.
                wrong += not torch.equal(first, again)
                if time.monotonic() > until_s:
                    break
    yield judge_burn(gpu, rounds, wrong, digest.hexdigest())
    yield _measured(gpu, "gpu-matrix", 2 * size**3 / best_s / 1e9, "GFLOP/s", "float32 without TF32")


def judge_burn(gpu: Device, rounds: int, wrong: int, digest: str) -> CheckResult:
    """Whether the device agrees with itself; `fleet` compares it with others of its model."""
    detail = f"{wrong} of {rounds} products differ from the first" if wrong else f"equal in {rounds} rounds"
    condition = Condition.FAULTY if wrong else Condition.HEALTHY
    return CheckResult(
        name="gpu-bits",
        condition=condition,
        detail=detail,
        subject=gpu.subject,
        model=gpu.model,
        digest=digest,
    )


def host_rate(device: torch.device, nbytes: int, to_device: bool, sync: Sync) -> float:
    """GB/s of copies between pinned host memory and the device, best of five."""
    import torch

    # Pinned memory is what DMA reads directly. From pageable memory the driver copies first, and the figure
    # would be the processor's.
    host = torch.ones(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    best_s = math.inf
    for _ in range(5):
        sync()
        began_s = time.perf_counter()
        if to_device:
            there.copy_(host, non_blocking=True)
        else:
            host.copy_(there, non_blocking=True)
        sync()
        best_s = min(best_s, time.perf_counter() - began_s)
    return nbytes / best_s / 1e9


def between(gpu: Device, other: Device, nbytes: int) -> CheckResult:
    """Copies between two GPUs, over NVLink or PCIe, whichever there is; the bytes must arrive unchanged."""
    import torch

    generator = torch.Generator().manual_seed(nbytes)
    # Made on the host and compared there: made and compared on the GPUs, a wrong one could confirm itself.
    content = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
    here, there = content.to(gpu.device), torch.empty(nbytes, dtype=torch.uint8, device=other.device)
    best_s = math.inf
    for _ in range(3):
        began_s = time.perf_counter()
        there.copy_(here)
        synchronizer(other.device)()
        synchronizer(gpu.device)()
        best_s = min(best_s, time.perf_counter() - began_s)
    whole = torch.equal(there.cpu(), content)
    detail = f"to {other.subject}" + ("" if whole else ": bytes came back changed")
    return CheckResult(
        name="gpu-to-gpu",
        condition=Condition.HEALTHY if whole else Condition.FAULTY,
        detail=detail,
        value=round(nbytes / best_s / 1e9, 2),
        unit="GB/s",
        subject=gpu.subject,
        model=gpu.model,
    )


def synchronizer(device: torch.device) -> Sync:
    """A function that waits until the device has completed its work; on a CPU it does nothing."""
    if device.type != "cuda":
        return lambda: None
    import torch

    return lambda: torch.cuda.synchronize(device)


class exact_float32:
    """Disables TF32, whose results and speed are those of another unit."""

    def __enter__(self) -> None:
        import torch

        self._before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = False

    def __exit__(self, *exception: object) -> None:
        import torch

        torch.backends.cuda.matmul.allow_tf32 = self._before


def _measured(gpu: Device, name: str, value: float, unit: str, detail: str) -> CheckResult:
    rounded = round(value, 1 if value >= 100 else 3)
    return CheckResult(
        name=name,
        condition=Condition.HEALTHY,
        detail=detail,
        value=rounded,
        unit=unit,
        subject=gpu.subject,
        model=gpu.model,
    )


class Links(msgspec.Struct, frozen=True):
    """The links of one GPU."""

    index: int
    model: str
    states: tuple[bool, ...]
    """State of each link that NVML knows; any other than True is down."""


def check_nvlink(task: Task) -> Iterator[CheckResult]:
    """Checks every link of every GPU. Gives no result without NVML or links."""
    yield from judge_links(read_links())


def judge_links(gpus: Iterable[Links]) -> Iterator[CheckResult]:
    """PCIe cards report links that they do not have as down. If some are up, there is a bridge, and nothing tells which
    links it should connect."""
    for gpu in gpus:
        active, known = sum(gpu.states), len(gpu.states)
        card = "pcie" in gpu.model.lower()
        if not known or (card and not active):
            continue
        # A server board has all its links, so one that is down is faulty. A PCIe card may have a bridge to
        # one neighbour only, and which links that uses is not recorded anywhere.
        condition = Condition.HEALTHY if active == known else Condition.UNKNOWN if card else Condition.FAULTY
        down = ", ".join(str(n) for n, up in enumerate(gpu.states) if not up)
        detail = f"down: {down}" if down else ""
        if down and card:
            detail += "; a PCIe card may not have them"
        yield CheckResult(
            name="nvlink",
            condition=condition,
            detail=detail,
            value=active,
            floor=known,
            unit="links",
            subject=f"gpu {gpu.index}",
            model=gpu.model,
        )


def read_links() -> list[Links]:
    """The links as NVML reports them. Raises CannotCheck if it fails; a machine without NVML has no links."""
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except ImportError:
        return []
    except nvml.NVMLError as error:
        if error.value in (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED):
            return []
        raise CannotCheck(f"NVML: {error}") from None
    try:
        return [_of(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError as error:
        raise CannotCheck(f"NVML: {error}") from None
    finally:
        nvml.nvmlShutdown()


def _of(nvml: Any, index: int) -> Links:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    states = []
    # The first link that is not supported is the end of the list.
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            states.append(nvml.nvmlDeviceGetNvLinkState(handle, link) == nvml.NVML_FEATURE_ENABLED)
        except nvml.NVMLError as error:
            if error.value in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_INVALID_ARGUMENT):
                break  # there are no more
            raise
    name = nvml.nvmlDeviceGetName(handle)
    return Links(index, name.decode() if isinstance(name, bytes) else str(name), tuple(states))
