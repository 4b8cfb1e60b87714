"""Injected faults, as they happen inside a worker."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

from holdfast.protocol.faults import ArmedFault, FaultKind
from holdfast.protocol.messages import FaultFired
from holdfast.protocol.phases import Phase
from holdfast.train.link import Link

DEFAULT_PHASE = Phase.BACKWARD
_COMPUTES = frozenset({Phase.FORWARD, Phase.BACKWARD})
SO_ATTACH_FILTER = 26


class InjectedError(RuntimeError):
    """What `--fault raise` raises, standing for an error of the user's code."""


class FaultPlan:
    """The faults that this worker was armed with. `reach(phase, step)` is called at every phase.

    Attributes:
        slow: this worker computes so many times as long; 1.0: as fast as it can.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._armed: list[ArmedFault] = []
        self._fired: set[str] = set()
        self.tell_progress: Callable[[], None] = lambda: None
        self.poison: Callable[[], None] = lambda: None
        self.flip: Callable[[], None] = lambda: None
        self.flip_gradient: Callable[[], None] = lambda: None
        self.slow = 1.0
        link.on_arm = self.arm
        link.on_drop = drop_traffic

    def arm(self, faults: tuple[ArmedFault, ...]) -> None:
        """Replaces the plan; a fault that fired here does not fire again."""
        self._armed = [f for f in faults if f.id not in self._fired]

    def reach(self, phase: Phase, step: int) -> None:
        """Called by the main thread when it enters a phase. May not return."""
        if not self._armed:
            return
        for fault in list(self._armed):
            # A copy may be skipped, and not every step is copied: a fault that waited for one certain copy could
            # never happen.
            due = fault.step in (None, step) or (phase is Phase.SNAPSHOT and step >= (fault.step or 0))
            if due and (_default(fault) if fault.phase is None else fault.phase) == phase:
                self._armed.remove(fault)
                self._fire(fault, phase, step)

    def _fire(self, fault: ArmedFault, phase: Phase, step: int) -> None:
        # Before it happens: a worker that survives its fault (a raised error, NaN) repeats the step, and the
        # fault must strike once.
        self._fired.add(fault.id)
        # Commits are reported once in a while. A fault at step 50 would be shown as one at step 47.
        self.tell_progress()
        self._link.send(FaultFired(fault.id, step, int(phase)))
        # The process may be dead on the next line. The coordinator must know that the fault was injected, or
        # its report would blame the machine.
        self._link.wait_acked(fault.id)
        if fault.kind is FaultKind.SLOW:
            self.slow = fault.factor or 1.0
        elif fault.kind is FaultKind.FLIP_BIT:
            # In the backward pass there is a gradient to err in; anywhere else there is only the state.
            (self.flip_gradient if phase is Phase.BACKWARD else self.flip)()
        else:
            happen(fault.kind, self.poison)

    def drag(self, phase: Phase, took_s: float) -> None:
        """A phase ends that took so long: it is to take `slow` times as long if it computes. Sleeps, so that on a machine
        whose cores are shared only this worker is slowed."""
        if phase in _COMPUTES:
            time.sleep((self.slow - 1.0) * took_s)


def _default(fault: ArmedFault) -> Phase:
    # A bit of the state flips between two updates, behind the back of whoever looks for changes that a script makes.
    return Phase.COMMIT if fault.kind is FaultKind.FLIP_BIT else DEFAULT_PHASE


def happen(kind: FaultKind, poison: Callable[[], None]) -> None:
    """Makes the fault happen in this process. The agent does the part of a fault that concerns the whole node."""
    match kind:
        case FaultKind.KILL_WORKER:
            os.kill(os.getpid(), signal.SIGKILL)
        case FaultKind.STOP_WORKER:
            os.kill(os.getpid(), signal.SIGSTOP)
        case FaultKind.RAISE:
            raise InjectedError("injected fault")
        case FaultKind.SEGFAULT:
            ctypes.string_at(0)
        case FaultKind.EXIT:
            os._exit(3)
        case FaultKind.DEADLOCK:
            lock = threading.Lock()
            with lock:
                lock.acquire()
        case FaultKind.HOLD_GIL:
            mutex = ctypes.create_string_buffer(64)  # zeros: PTHREAD_MUTEX_INITIALIZER
            library = ctypes.PyDLL(None)  # keeps the GIL during its calls
            library.pthread_mutex_lock(mutex)
            library.pthread_mutex_lock(mutex)
        case FaultKind.NAN:
            poison()
        case FaultKind.KILL_NODE | FaultKind.STOP_NODE:
            threading.Event().wait()
        case FaultKind.DROP_NODE:
            drop_traffic()  # now, so that it strikes in this phase; the agent makes the others deaf
        case _:
            return  # of the coordinator, or of the machine: others do it


def drop_traffic() -> None:
    """Makes every TCP connection of this process deaf: incoming packets vanish, acknowledgements with them.

    A classic BPF program that keeps 0 bytes of every packet is attached to each socket, also to those that
    Python connects from now on; nothing is closed, so the other side sees what a cut cable shows it.
    """
    from holdfast.train.gloo_group import sockets_here  # and torch with it, which may not have been imported

    for fd in sockets_here().values():
        try:
            sock = socket.socket(fileno=os.dup(fd))
        except OSError:
            continue
        with sock:
            _deafen(sock)
    connect = socket.socket.connect

    def connect_deaf(self: socket.socket, address: Any) -> None:
        _deafen(self)
        connect(self, address)

    setattr(socket.socket, "connect", connect_deaf)  # noqa: B010


def _deafen(sock: socket.socket) -> None:
    program = struct.pack("HBBI", 0x06, 0, 0, 0)  # BPF_RET | BPF_K, keep 0 bytes
    buffer = ctypes.create_string_buffer(program)
    filter_spec = struct.pack("HxxxxxxP", 1, ctypes.addressof(buffer))
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        try:
            sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, filter_spec)
        except OSError:
            return
