"""GPUs of NVIDIA, through the driver's library: errors of memory and links, temperature, clocks, lost devices, Xids.

The library may hang when a GPU does, so every call is made on a thread that is abandoned after a time limit
(`bounded_call`). Nothing here needs permission; all of it requires `nvidia-ml-py` (`pip install holdfast-train[gpu]`).
"""

from __future__ import annotations

import ctypes
import importlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from holdfast.health.bounded_call import BoundedCaller, NoAnswerError
from holdfast.health.files import names, unknown
from holdfast.health.gpu import Gpu
from holdfast.health.pcie import has_nvidia_gpu
from holdfast.health.samples import LogLine, Reading
from holdfast.health.sources import MachineRoot
from holdfast.health.xids import XidEvents

NVML_S = 30.0
CALL_LIMIT_S = 10.0
"""Limit for all calls of one round; with persistence mode off the first ones take seconds."""
LIBRARY = "libnvidia-ml.so.1"
_FIELDS = {
    3: "nvml.ecc.volatile.corrected",
    4: "nvml.ecc.volatile.uncorrected",
    5: "nvml.ecc.aggregate.corrected",
    6: "nvml.ecc.aggregate.uncorrected",
    29: "nvml.retired.single_bit_pages",
    30: "nvml.retired.double_bit_pages",
    31: "nvml.retired.pending",
    38: "nvml.nvlink.flit_crc_errors",
    45: "nvml.nvlink.data_crc_errors",
    52: "nvml.nvlink.replays",
    59: "nvml.nvlink.recoveries",
    94: "nvml.pcie_replays",
    143: "nvml.remap.uncorrected_rows",
    144: "nvml.remap.pending",
    145: "nvml.remap.failure",
    230: "nvml.recovery_action",
}
_NVLINK_5_FIELDS = {
    206: "nvml.nvlink.malformed_packets",
    207: "nvml.nvlink.buffer_overruns",
    208: "nvml.nvlink.receive_errors",
    211: "nvml.nvlink.integrity_errors",
    212: "nvml.nvlink.discards",
    213: "nvml.nvlink.recovered",
    214: "nvml.nvlink.recoveries_failed",
    219: "nvml.nvlink.effective_errors",
    221: "nvml.nvlink.symbol_errors",
}
"""The counters of NVLink 5, asked for of all links together. No two fields may give the same reading, because a GPU may
answer to both."""
_ALL_LINKS = 0xFFFFFFFF
"""Numbers of nvml.h (NVML_FI_DEV_*), asked for in one call."""
# Indexed by nvmlValueType_t: which member of the union NVML has filled.
_FIELD_TYPES = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
_SLOWDOWN = 1
_FABRIC_COMPLETED = 3


class Nvml:
    """All GPUs of this machine. `fileno` is readable when the driver reported an Xid."""

    name = "nvml"
    every_s = NVML_S

    def __init__(self, root: Path, library: Any, clock: Callable[[], float] = time.monotonic) -> None:
        """library: the module pynvml, loaded."""
        self._root, self._nvml, self._clock = root, library, clock
        self._caller = BoundedCaller("the NVIDIA driver", CALL_LIMIT_S)
        self._gpus: list[Gpu] = []
        self._begun = False
        self._events = XidEvents(library, clock)
        self._due_s = clock()
        self._absent = {
            # Answers of older drivers, smaller cards and virtual GPUs to questions that they do not support.
            # None of them is a fault, and each would otherwise make the whole GPU Unknown.
            library.NVML_ERROR_NOT_SUPPORTED,
            library.NVML_ERROR_INVALID_ARGUMENT,
            library.NVML_ERROR_FUNCTION_NOT_FOUND,
            library.NVML_ERROR_NOT_FOUND,
            library.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
        }

    def fileno(self) -> int:
        """Readable when an Xid can be read."""
        return self._events.fileno()

    def trouble(self) -> str:
        """See `Source`."""
        return self._events.trouble()

    def read(self) -> Iterator[Reading | LogLine]:
        """Xids that arrived, as lines of the kernel; every `every_s` seconds also `nvml.silent_s` and the readings
        listed in docs/health/rules.md, per GPU."""
        yield from self._events.lines()
        now = self._clock()
        if now < self._due_s:
            return
        # See `Mounts.read`: whole seconds, so a second early. Between the periods only Xids are read.
        self._due_s = now + self.every_s - 1.0
        try:
            # One bounded call for the whole round and not one for each question: a round asks hundreds, and a
            # driver that hangs would cost the limit once for each.
            readings = self._caller.call(self._readings)
        except NoAnswerError as error:
            # Both: a rule with a limit of its own judges how long the library has been silent, and all other
            # readings are Unknown meanwhile, not healthy.
            yield Reading(source="nvml", name="nvml.silent_s", value=error.waited_s)
            yield unknown("nvml", "nvml.devices", str(error))
            return
        except self._nvml.NVMLError as error:
            # The library without a driver is usual in containers on machines without a GPU.
            if error.value != self._nvml.NVML_ERROR_DRIVER_NOT_LOADED or has_nvidia_gpu(self._root):
                yield unknown("nvml", "nvml.devices", error)
            return
        if readings:
            yield Reading(source="nvml", name="nvml.silent_s", value=0.0)
            yield from readings

    def close(self) -> None:
        """Shuts the library down, unless it hangs."""
        self._events.close()
        if self._begun:
            try:
                self._caller.call(self._nvml.nvmlShutdown)
            except (NoAnswerError, self._nvml.NVMLError):
                pass
        self._caller.close()

    # ------------------------------------------------------------ on the thread of the bounded call

    def _readings(self) -> list[Reading]:
        # On the bounded thread, because initializing a broken GPU can hang as well.
        if not self._begun:
            self._nvml.nvmlInit()
            self._begun = True
            self._gpus = [self._meet(index) for index in range(self._nvml.nvmlDeviceGetCount())]
            self._events.start([gpu for gpu in self._gpus if gpu.handle is not None])
        found = [reading for gpu in self._gpus for reading in self._read(gpu)]
        if self._gpus:
            # The kernel module lists every GPU that it has bound; NVML leaves out those that failed to
            # initialize. The difference is a GPU that vanished before the agent came, which no counter shows.
            missing = len(names(self._root / "proc/driver/nvidia/gpus")) - len(self._gpus)
            found.append(Reading(source="nvml", name="nvml.missing", value=float(max(0, missing))))
        return found

    def _meet(self, index: int) -> Gpu:
        nvml = self._nvml
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            at = nvml.nvmlDeviceGetPciInfo(handle)
            pci = f"{at.domain:04x}:{at.bus:02x}:{at.device:02x}"
            return Gpu(index, handle, nvml.nvmlDeviceGetUUID(handle), pci)
        except nvml.NVMLError:
            # Kept without a handle: it is reported as lost at every round, instead of being absent from the
            # list.
            return Gpu(index, None)

    def _read(self, gpu: Gpu) -> Iterator[Reading]:
        nvml = self._nvml
        found: list[Reading] = []
        try:
            if gpu.handle is None:
                raise nvml.NVMLError(nvml.NVML_ERROR_GPU_IS_LOST)
            for read in (self._fields, self._clocks, self._load, self._memory, self._links, self._fabric):
                found += read(gpu)
        except nvml.NVMLError as error:
            # What was read before the error is valid: a GPU that falls off the bus in the middle of a round
            # leaves its last counters, which tell why.
            yield from found
            if error.value == nvml.NVML_ERROR_GPU_IS_LOST:
                yield self._reading(gpu, "nvml.lost", 1.0)
            elif error.value == nvml.NVML_ERROR_RESET_REQUIRED:
                # The GPU answers and asks for a reset: it is not lost, and has a recovery action of its own.
                yield self._reading(gpu, "nvml.lost", 0.0)
                yield self._reading(
                    gpu, "nvml.recovery_action", float(nvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET)
                )
            else:
                yield unknown("nvml", "nvml.lost", error, gpu.subject, gpu.uuid)
            return
        yield self._reading(gpu, "nvml.lost", 0.0)
        yield from found

    def _reading(self, gpu: Gpu, name: str, value: float) -> Reading:
        return Reading(source="nvml", name=name, value=value, subject=gpu.subject, device=gpu.uuid)

    def _ask(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """The answer; None if this GPU or driver does not support the call. Raises NVMLError otherwise."""
        try:
            return call(*arguments)
        except self._nvml.NVMLError as error:
            if error.value in self._absent:
                return None
            raise

    def _fields(self, gpu: Gpu) -> Iterator[Reading]:
        # All fields in one call, because every call is a way into the driver and back.
        asked = [*_FIELDS, *((field, _ALL_LINKS) for field in _NVLINK_5_FIELDS)]
        for field in self._ask(self._nvml.nvmlDeviceGetFieldValues, gpu.handle, asked) or ():
            # The call as a whole succeeds even if every field of it failed; so a lost GPU has to be looked
            # for here.
            if field.nvmlReturn == self._nvml.NVML_ERROR_GPU_IS_LOST:
                raise self._nvml.NVMLError(field.nvmlReturn)
            if field.nvmlReturn == self._nvml.NVML_SUCCESS:
                value = getattr(field.value, _FIELD_TYPES[field.valueType])
                name = _FIELDS.get(field.fieldId) or _NVLINK_5_FIELDS[field.fieldId]
                yield self._reading(gpu, name, float(value))

    def _clocks(self, gpu: Gpu) -> Iterator[Reading]:
        nvml = self._nvml
        celsius = self._ask(nvml.nvmlDeviceGetTemperature, gpu.handle, nvml.NVML_TEMPERATURE_GPU)
        if celsius is not None:
            yield self._reading(gpu, "nvml.temperature_c", float(celsius))
        margin = self._ask(nvml.nvmlDeviceGetMarginTemperature, gpu.handle)
        # The margin to the slowdown differs with model and cooling, and one rule over the margin fits all of
        # them. Newer drivers compute it; older ones give the limit.
        if margin is None and celsius is not None:  # before Hopper
            limit = self._ask(nvml.nvmlDeviceGetTemperatureThreshold, gpu.handle, _SLOWDOWN)
            margin = None if limit is None else limit - celsius
        if margin is not None:
            yield self._reading(gpu, "nvml.temperature_margin_c", float(margin))
        reasons = self._ask(nvml.nvmlDeviceGetCurrentClocksEventReasons, gpu.handle)
        if reasons is not None:
            yield self._reading(gpu, "nvml.clock_reasons", float(reasons))

    def _load(self, gpu: Gpu) -> Iterator[Reading]:
        """Readings for people: no rule uses them."""
        nvml = self._nvml
        rates = self._ask(nvml.nvmlDeviceGetUtilizationRates, gpu.handle)
        if rates is not None:
            yield self._reading(gpu, "nvml.utilization_percent", float(rates.gpu))
        milliwatts = self._ask(nvml.nvmlDeviceGetPowerUsage, gpu.handle)
        if milliwatts is not None:
            yield self._reading(gpu, "nvml.power_watts", milliwatts / 1000)
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, gpu.handle)
        if memory is not None:
            yield self._reading(gpu, "nvml.memory_used_bytes", float(memory.used))

    def _memory(self, gpu: Gpu) -> Iterator[Reading]:
        status = self._nvml.c_nvmlEccSramErrorStatus_v1_t()
        if (
            self._ask(self._nvml.nvmlDeviceGetSramEccErrorStatus, gpu.handle, ctypes.byref(status))
            is not None
        ):
            yield self._reading(gpu, "nvml.ecc.sram_threshold", float(status.bThresholdExceeded))

    def _links(self, gpu: Gpu) -> Iterator[Reading]:
        """Links that were active and are not any more. NVML does not tell which links a GPU should have (cards without
        a bridge report theirs as inactive)."""
        active = set()
        for link in range(self._nvml.NVML_NVLINK_MAX_LINKS):
            state = self._ask(self._nvml.nvmlDeviceGetNvLinkState, gpu.handle, link)
            if state is None:
                break
            if state:
                active.add(link)
        # Only links that were once active can go down. Models have fewer links than NVML has numbers, and
        # bridges connect some of them only.
        gpu.links |= active
        if gpu.links:
            yield self._reading(gpu, "nvml.nvlink.inactive", float(len(gpu.links - active)))

    def _fabric(self, gpu: Gpu) -> Iterator[Reading]:
        info = self._nvml.c_nvmlGpuFabricInfo_v2_t()
        if self._ask(self._nvml.nvmlDeviceGetGpuFabricInfoV, gpu.handle, ctypes.byref(info)) is None:
            return
        # 0 means that this machine has no NVSwitch fabric to register with.
        if info.state:
            yield self._reading(gpu, "nvml.fabric.completed", float(info.state == _FABRIC_COMPLETED))
        if info.state == _FABRIC_COMPLETED:
            yield self._reading(gpu, "nvml.fabric.status", float(info.status))
            yield self._reading(gpu, "nvml.fabric.health_mask", float(info.healthMask))


def load_nvml(folder: Path | None = None) -> Any:
    """The module pynvml with the driver's library, or with the one in `folder` (a stand-in); None without either. Asks
    nothing of the driver yet."""
    try:
        pynvml: Any = importlib.import_module("pynvml")
        if folder is not None:
            pynvml.nvmlLib = ctypes.CDLL(str(folder / LIBRARY))  # as its own loading does, by another name
        else:
            ctypes.CDLL(LIBRARY)
    except (ImportError, OSError):
        return None
    return pynvml


def nvml_sources(machine: MachineRoot) -> list[Nvml]:
    """The source for NVIDIA GPUs, if the library is available."""
    if machine.stand_in and machine.nvml is None:
        return []
    library = load_nvml(machine.nvml)
    return [] if library is None else [Nvml(machine.root, library)]
