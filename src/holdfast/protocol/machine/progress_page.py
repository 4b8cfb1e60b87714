"""The progress page: 52 bytes of shared memory in which a worker says where it is.

Writing it costs under a microsecond, so every change of phase can be noted; it is read only when something
looks wrong. It can be read when the worker is stopped, deadlocked or holds the GIL for ever.
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
import time
import weakref

from holdfast.protocol.phases import PageReading, Phase

STACKS_SIGNAL = signal.SIGRTMAX - 10
"""A worker that gets it writes the Python stacks of all its threads, whatever its main thread does.

A real-time signal: scripts have handlers of their own for SIGUSR1 and SIGUSR2, by which launchers on Slurm say that a job is
preempted. It is sent only to a worker that does not answer WriteStacks."""

# generation, committed, phase, collectives, step began, phase began, last beat, waits for
_LAYOUT = struct.Struct("<qqiidddi")
_WAITS = struct.Struct("<i")
_WAITS_AT = _LAYOUT.size - _WAITS.size


class ProgressPage:
    """One worker's page. The agent makes it; the worker opens and writes it.

    It is in no file system: who writes to a mapped file waits for its disk now and then, and the job's folder may be on
    that of another machine.

    path: opens it in another process, while it is open here.
    """

    def __init__(self, path: str = "") -> None:
        """path: of the page that another process made; without one it is a new page."""
        if path:
            fd = os.open(path, os.O_RDWR)
        else:
            # In no file system: a mapped file is written back by the kernel, and its writer waits for that
            # disk now and then. With the job's folder on another machine, that would be seconds in the middle
            # of a step.
            fd = os.memfd_create("holdfast-page")
            os.ftruncate(fd, _LAYOUT.size)
        self._map = mmap.mmap(fd, _LAYOUT.size)
        # Closed with the object, but not at the end of the process: the worker's agent may still read the
        # page of a process that is just dying.
        self._close_file = weakref.finalize(self, os.close, fd)
        self._close_file.atexit = False
        # How the other process opens it. Valid as long as this process has it open, which is exactly as long
        # as the page is of interest.
        self.path = f"/proc/{os.getpid()}/fd/{fd}"
        self.generation = 0
        self.committed = 0
        self.phase = Phase.STARTUP
        self.collectives = 0
        self.waits_for = -1
        self._step_began_s = self._phase_began_s = time.monotonic()

    def enter(self, phase: Phase) -> None:
        """The worker enters a phase now."""
        self.phase = phase
        self._phase_began_s = time.monotonic()
        # Loading data begins a step. Counters of the step are reset here and nowhere else, so that they never
        # describe two steps at once.
        if phase is Phase.DATA:
            self._step_began_s = self._phase_began_s
            self.collectives = 0
        self.beat()

    def beat(self) -> None:
        """Something moved: writes every field."""
        # One call for all fields. A reader in between may see half of it, which it takes for movement and
        # looks again; a lock would have to be held by processes that may be stopped at any time.
        _LAYOUT.pack_into(
            self._map,
            0,
            self.generation,
            self.committed,
            int(self.phase),
            self.collectives,
            self._step_began_s,
            self._phase_began_s,
            time.monotonic(),
            self.waits_for,
        )

    def wait_for(self, rank: int) -> None:
        """The worker waits for this rank from now on; -1: no longer. No sign of life."""
        self.waits_for = rank
        # Without touching the last beat: waiting for another name is no sign of life, and must not hide a
        # hang.
        _WAITS.pack_into(self._map, _WAITS_AT, rank)

    def read(self) -> PageReading:
        """What the page says now (from the agent's side)."""
        fields = _LAYOUT.unpack_from(self._map, 0)
        return PageReading(**dict(zip(PageReading.__struct_fields__, fields, strict=True)))

    def close(self) -> None:
        """Gives the memory back, when the other process has closed it too."""
        self._map.close()
        self._close_file()
