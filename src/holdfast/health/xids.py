"""Xids from the events of the driver's library, for machines on which the kernel's log cannot be read."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from holdfast.health.gpu import Gpu
from holdfast.health.samples import LogLine

WAIT_MS = 2000
"""How long the thread may still wait after the source was closed, in milliseconds."""
AFTER_ERROR_S = 5.0
HANGS_S = 8.0
"""A wait that takes longer than this hangs in the driver. Normally it takes `WAIT_MS`, and after an error
`AFTER_ERROR_S` more."""
LINES_KEPT = 1024


class XidEvents:
    """Waits for events on a thread of its own; `fileno` is readable when there are lines.

    The lines look as in the kernel's log and claim to come from there: rules for Xids judge both alike, and an Xid that
    is reported by both counts once.
    """

    def __init__(self, library: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._nvml = library
        # Bounded: while the agent's loop does not read, a failing GPU may report an Xid for every fault of
        # every context. The oldest are dropped first; the newest say the same.
        self._lines: deque[LogLine] = deque(maxlen=LINES_KEPT)
        self._clock = clock
        self._thread: threading.Thread | None = None
        self._last_seen_s = 0.0
        self._none_come = False
        self._closed = threading.Event()
        self._lock = threading.Lock()
        # An eventfd is how a thread wakes an epoll loop without a lock between the two: any number of writes
        # is one wake-up, and reading resets it.
        self._signal = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """The descriptor that signals lines; -1 when it is closed."""
        return self._signal

    def start(self, gpus: Sequence[Gpu]) -> None:
        """Starts to watch these GPUs."""
        if gpus:
            # A daemon: nvmlEventSetWait may hang in the driver as every call may, and then nothing but the
            # process's end frees it.
            self._last_seen_s = self._clock()
            self._thread = threading.Thread(
                target=self._run, args=(list(gpus),), name="nvml-events", daemon=True
            )
            self._thread.start()

    def trouble(self) -> str:
        """Why no more Xids arrive; empty: the thread waits for them, or this machine does not report any."""
        if self._thread is None or self._none_come or self._closed.is_set():
            return ""
        if not self._thread.is_alive():
            return "the thread that waits for Xids has ended"
        waited_s = self._clock() - self._last_seen_s
        return (
            f"the driver has not answered the wait for Xids for {waited_s:.0f} s"
            if waited_s >= HANGS_S
            else ""
        )

    def lines(self) -> Iterator[LogLine]:
        """The lines since the last call."""
        try:
            # Reset before the lines are taken. The other order would lose the wake-up of a line that comes
            # between the two.
            os.eventfd_read(self._signal)
        except BlockingIOError:
            return
        while self._lines:
            yield self._lines.popleft()

    def close(self) -> None:
        """Ends the thread, without waiting for it."""
        # The descriptor's number may be used again right after the close; a late event of the thread would
        # then write into a stranger's file.
        with self._lock:
            self._closed.set()
            if self._signal >= 0:
                os.close(self._signal)
                self._signal = -1

    def _run(self, gpus: list[Gpu]) -> None:
        nvml = self._nvml
        addresses: dict[int | None, str] = {}
        try:
            # NVML counts its users. This thread counts for itself, so that the source's nvmlShutdown does not
            # take the library away under a wait.
            nvml.nvmlInit()
            events = nvml.nvmlEventSetCreate()
        except nvml.NVMLError:
            self._none_come = True
            return  # no events on this machine; the kernel's log has them
        for gpu in gpus:
            try:
                nvml.nvmlDeviceRegisterEvents(gpu.handle, nvml.nvmlEventTypeXidCriticalError, events)
                # An event identifies its GPU by a handle only, and a lost GPU can no longer be asked for its
                # address; so the addresses are remembered from before.
                addresses[_address(gpu.handle)] = gpu.pci
            except nvml.NVMLError:
                continue
        self._none_come = not addresses
        while addresses and not self._closed.is_set():
            self._last_seen_s = self._clock()
            try:
                event = nvml.nvmlEventSetWait_v2(events, WAIT_MS)
            except nvml.NVMLError as error:
                # The timeouts are how the thread notices that it has to end.
                if error.value != nvml.NVML_ERROR_TIMEOUT:
                    self._closed.wait(AFTER_ERROR_S)  # a lost GPU makes every wait fail
                continue
            self._heard(addresses.get(_address(event.device), ""), int(event.eventData))
        try:
            nvml.nvmlEventSetFree(events)
            nvml.nvmlShutdown()
        except nvml.NVMLError:
            pass

    def _heard(self, pci: str, code: int) -> None:
        with self._lock:
            if pci and not self._closed.is_set():
                self._lines.append(xid_line(pci, code))
                os.eventfd_write(self._signal, 1)


def xid_line(pci: str, code: int) -> LogLine:
    """An Xid in the form of the kernel's line, without the details that only the kernel knows."""
    return LogLine("kmsg", f"NVRM: Xid (PCI:{pci}): {code}, reported by the driver's library")


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value
