"""The progress record: 52 bytes of shared memory in which a worker keeps its phase, its step and the time of its last progress.

Writing it takes less than a microsecond, so every change of phase is recorded. The agent reads it only when something looks
wrong, and can do so while the worker is stopped, deadlocked or holds the GIL for ever.
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


class ProgressRecord:
    """The progress record of one worker. The agent creates it; the worker opens and writes it.

    Attributes:
        path: opens the record in another process, as long as it is open in this one.
    """

    def __init__(self, path: str = "") -> None:
        """path: of the record that another process made; empty: makes a new one."""
        if path:
            fd = os.open(path, os.O_RDWR)
        else:
            # In no file system: a mapped file is written back by the kernel, and its writer waits for that
            # disk now and then. With the job's folder on another machine, that would be seconds in the middle
            # of a step.
            fd = os.memfd_create("holdfast-progress")
            os.ftruncate(fd, _LAYOUT.size)
        self._map = mmap.mmap(fd, _LAYOUT.size)
        # Closed with the object, but not at the end of the process: the worker's agent may still read the
        # record of a process that is just dying.
        self._close_file = weakref.finalize(self, os.close, fd)
        self._close_file.atexit = False
        # How the other process opens it. Valid as long as this process has it open, which is exactly as long
        # as the record is of interest.
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
        """Writes every field, with the time now as that of the last progress."""
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
        """The worker waits for this rank from now on; -1: for none. Does not count as progress."""
        self.waits_for = rank
        # Without touching the time of the last progress: waiting for another rank is none, and must not
        # hide a hang.
        _WAITS.pack_into(self._map, _WAITS_AT, rank)

    def read(self) -> PageReading:
        """The fields as they are now. For the agent."""
        fields = _LAYOUT.unpack_from(self._map, 0)
        return PageReading(**dict(zip(PageReading.__struct_fields__, fields, strict=True)))

    def close(self) -> None:
        """Unmaps the record. The memory is freed when the other process has closed it, too."""
        self._map.close()
        self._close_file()
