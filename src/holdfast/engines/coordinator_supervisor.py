"""Keeps a job's coordinator running: it starts one, and replaces it when it dies, hangs or hands over."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import secrets
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from holdfast import __version__
from holdfast.errors import Damaged, HoldfastError, UsageError
from holdfast.protocol.job_options import Timing
from holdfast.protocol.leadership import EXIT_HANDED_OVER, EXIT_NO_ROOM, EXIT_OTHER_VERSION, EXIT_SUPERSEDED
from holdfast.protocol.machine.processes import python_module
from holdfast.protocol.network.listener import BACKLOG
from holdfast.protocol.network.sockets import host_and_port, listening
from holdfast.protocol.wire.stored import decode_file, word

_log = logging.getLogger(__name__)
ATTEMPTS = 3
GUARD_S = 2.0
"""Interval at which the files of the job's folder are checked. Network file systems have no events for deletions by other
machines."""
STANDBY_S = 15.0
"""Seconds before a standby coordinator is started: a short job needs none, and at the job's start others need the processor."""
STANDBY_MOST_S = 600.0
"""Longest pause between two attempts to start a standby."""
PAUSES_S = 1.0, 2.0, 5.0
"""Pauses between attempts while the system refuses a resource that a coordinator needs; the last one is repeated."""
OTHER_VERSION = (
    "the version of Holdfast that is now installed here differs from the one with which this job was started"
)
READ_BYTES = 65536
_TICKS = os.sysconf("SC_CLK_TCK")


def _way_back() -> str:
    return f"install version {__version__} again, or end the job and start it again, which resumes it"


class LauncherSuperseded(HoldfastError):
    """Another launcher has taken over the job, so that this one must not touch it any more."""


class Note(Protocol):
    """Shows a message to the user, and logs it."""

    def __call__(self, text: str, **fields: object) -> None: ...


@dataclass(frozen=True, kw_only=True)
class CoordinatorConfig:
    """How the coordinators of a job are started."""

    job_dir: Path
    timing: Timing
    host: str
    """Host name or address under which others reach the coordinator."""
    listener: socket.socket
    """The listening socket, which this process keeps and passes to every coordinator. So no other process can listen there while
    the job lives, and connections that are made while there is no coordinator wait in the kernel for the next one."""
    term: int = 0
    """See `protocol.leadership`."""
    inherited: tuple[int, ...] = ()
    """File descriptors that the coordinator keeps open."""
    copies: int = 0
    """Number of copies of the ledger at agents; 0: it is in a folder that outlives this machine, or the job does not outlive
    it."""
    lifeline: int | None = None
    """A pipe that is closed when the launcher is gone, which ends the job; None: the job outlives its launcher."""
    files: dict[str, bytes] = field(default_factory=dict)
    """Contents, by name, of files in the job's folder that others read. One that is missing or damaged is restored."""
    relock: Callable[[], str] = str
    """Called whenever the files are checked: see `JobFolder.relock`."""
    instance: str = field(default_factory=lambda: secrets.token_hex(8))
    """Name that all coordinators have in common, as they share an address: a process that knows one of them finds the next, even
    if the folder cannot be written."""


@dataclass
class _Started:
    """A coordinator's process."""

    process: asyncio.subprocess.Process
    liveness: int
    gate: int = -1
    """Write end of a pipe that lets a standby start to serve; -1: it has started."""
    taken: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self) -> None:
        """Lets the process start to serve."""
        self.taken.set()
        if self.gate >= 0:
            with suppress(BrokenPipeError):  # it has just ended, as any coordinator may
                os.write(self.gate, b"!")
        self.close_gate()

    def close_gate(self) -> None:
        """Closes the gate, which ends a process that still waits at it."""
        if self.gate >= 0:
            os.close(self.gate)
        self.gate = -1


class CoordinatorSupervisor:
    """Runs one coordinator at a time, until the job is over. `close` ends what is left.

    A standby with everything imported waits beside it: it serves a second sooner than a process that is started when it is
    needed, and it does not depend on what may be missing by then (a process, memory, the files of the installation, perhaps of
    another version).
    """

    def __init__(self, config: CoordinatorConfig, note: Note, started: Callable[[], None]) -> None:
        """started: called after the start of each coordinator."""
        self._config, self._note, self._started = config, note, started
        self._coordinator: asyncio.subprocess.Process | None = None
        self._liveness = -1
        self._next: _Started | None = None
        self._standing_by: asyncio.Task[None] | None = None
        self._leave_by: signal.Signals | None = None
        self._refusals = 0
        self._lost: set[Path] = set()
        self._sleep = asyncio.sleep

    async def start(self) -> None:
        """Starts the first coordinator. Called once; `keep` starts the others. Raises OSError if the system refuses a
        resource."""
        config = self._config
        for message in self._put_back():
            self._note(message)
        self._close_liveness()
        started, self._next = self._next, None
        if started is None or started.process.returncode is not None:
            started = await self._spawn()
        started.take()
        self._coordinator, self._liveness = started.process, started.liveness
        if self._standing_by is None:
            self._standing_by = asyncio.create_task(self._stand_by())
        _log.info("started a coordinator", extra={"pid": self._coordinator.pid, "term": config.term})
        if self._leave_by is not None:  # the end was requested while this one was being started
            self._coordinator.send_signal(self._leave_by)
        self._started()

    async def _spawn(self, gate: int | None = None) -> _Started:
        config = self._config
        reads, liveness = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        lifelines = () if config.lifeline is None else (config.lifeline,)
        gates = () if gate is None else (gate,)
        try:
            process = await asyncio.create_subprocess_exec(
                *python_module("holdfast.coordinator"),
                f"--job-dir={config.job_dir}",
                f"--host={config.host}",
                f"--listen-fd={config.listener.fileno()}",
                f"--term={config.term}",
                f"--copies={config.copies}",
                f"--instance={config.instance}",
                *(f"--lifeline={fd}" for fd in lifelines),
                f"--liveness={liveness}",
                *(f"--gate={fd}" for fd in gates),
                pass_fds=(*config.inherited, *lifelines, *gates, config.listener.fileno(), liveness),
                stdin=asyncio.subprocess.DEVNULL,
                # Ctrl-C in the terminal must not reach the coordinator: it has to end the job in order first.
                start_new_session=True,
            )
        except BaseException:
            os.close(reads)
            raise
        finally:
            os.close(liveness)
        return _Started(process, reads)

    async def _stand_by(self) -> None:
        """Keeps a standby coordinator, and starts another one when it is used. Runs until cancelled."""
        pause_s, noted = STANDBY_S, False
        while True:
            await asyncio.sleep(pause_s)
            gate, opens = os.pipe2(os.O_CLOEXEC)
            try:
                standby = await self._spawn(gate)
            except OSError:  # a standby is optional
                os.close(opens)
                pause_s = min(2 * pause_s, STANDBY_MOST_S)
                continue
            except asyncio.CancelledError:
                os.close(opens)
                raise
            finally:
                os.close(gate)
            standby.gate, self._next = opens, standby
            ended, taken = (asyncio.ensure_future(x) for x in (standby.process.wait(), standby.taken.wait()))
            try:
                await asyncio.wait({ended, taken}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                ended.cancel()
                taken.cancel()
            if standby.taken.is_set():
                pause_s = STANDBY_S
                continue
            self._next = None
            standby.close_gate()
            os.close(standby.liveness)
            pause_s = min(2 * pause_s, STANDBY_MOST_S)
            if standby.process.returncode == EXIT_OTHER_VERSION and not noted:
                noted = True
                self._note(
                    f"{OTHER_VERSION}. If the coordinator of this job is lost, it cannot be replaced: {_way_back()}"
                )

    async def keep(self) -> None:
        """Keeps a coordinator running until the job is over, or until `hand_over` or `end_now` was called.

        Raises:
            LauncherSuperseded: another coordinator runs the job.
            HoldfastError: the coordinator repeatedly ends by itself.
        """
        failures = 0
        while True:
            assert self._coordinator is not None
            code = await self._end_of(self._coordinator)
            if code == 0 or self._leave_by is not None:
                return
            if code == EXIT_SUPERSEDED:
                raise LauncherSuperseded("another coordinator runs the job")
            # That a coordinator was killed by a signal or handed over says nothing about the next one. But if it ends by itself
            # three times in a row, it would do so for ever.
            handed_over, refused = code == EXIT_HANDED_OVER, code in (EXIT_NO_ROOM, EXIT_OTHER_VERSION)
            failures = failures + 1 if code > 0 and not handed_over and not refused else 0
            if failures >= ATTEMPTS:
                raise HoldfastError(f"the coordinator ended {failures} times with exit code {code}")
            if code == EXIT_OTHER_VERSION:
                await self._wait(
                    f"the job has no coordinator: {OTHER_VERSION}. Workers continue to train for "
                    f"{self._config.timing.orphan_s:g} s; {_way_back()}"
                )
            elif refused:
                await self._wait_for_room("see the line above, or logs/coordinator.log")
            else:
                how = "hands over; starting another" if handed_over else "ended; starting it again"
                self._note(f"the coordinator {how}", code=code)
            if not await self._start_again():
                return

    async def _start_again(self) -> bool:
        """Starts the next coordinator, as soon as this machine has a process, memory and descriptors for it. False: the end was
        requested in the meantime."""
        while self._leave_by is None:
            try:
                await self.start()
            except OSError as error:
                await self._wait_for_room(f"it cannot be started: {error.strerror}")
            else:
                return True
        return False

    async def _wait_for_room(self, why: str) -> None:
        # Training continues in the meantime, and would end with this process. So the attempts never end.
        await self._wait(
            f"the job has no coordinator: the system refuses a resource that it needs ({why}). Workers continue to "
            "train; starting the coordinator is retried until it succeeds"
        )

    async def _wait(self, message: str) -> None:
        if self._refusals == 0:
            self._note(message)
        pause_s = PAUSES_S[min(self._refusals, len(PAUSES_S) - 1)]
        self._refusals += 1
        await self._sleep(pause_s)

    async def _guard_files(self) -> None:
        """Restores files that somebody deletes, since commands and nodes that join later read them."""
        while True:
            # In a thread, because the file system may hang, but this process must not.
            for message in await asyncio.to_thread(self._put_back):
                self._note(message)
            await asyncio.sleep(GUARD_S)

    def _put_back(self) -> list[str]:
        messages = [done] if (done := self._config.relock()) else []
        for name, content in self._config.files.items():
            path = self._config.job_dir / name
            what = _trouble(path)
            if not what:
                continue
            try:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                work = path.with_name(f".{path.name}.{os.getpid()}")
                # Readable only for the owner from the first moment, since one of the files is the token.
                fd = os.open(work, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
                with os.fdopen(fd, "wb") as out:
                    out.write(content)
                work.replace(path)
            except OSError as error:
                if path not in self._lost:
                    messages.append(f"{path} is {what} and cannot be restored: {error.strerror}")
                self._lost.add(path)
            else:
                self._lost.discard(path)
                messages.append(f"{path} was {what} and has been restored")
        return messages

    def hand_over(self) -> None:
        """Asks the coordinator to hand over to one that another process starts; `keep` returns."""
        self._signal(signal.SIGTERM)

    def end_now(self) -> None:
        """Kills the coordinator at once; `keep` returns."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        self._leave_by = number
        if self._coordinator is not None and self._coordinator.returncode is None:
            self._coordinator.send_signal(number)

    async def close(self) -> None:
        """Ends the coordinator, if it still runs, and the standby."""
        if self._standing_by is not None:
            self._standing_by.cancel()
            await asyncio.wait({self._standing_by})
        if self._next is not None:
            self._next.close_gate()
            await self._next.process.wait()
            os.close(self._next.liveness)
        self.end_now()
        if self._coordinator is not None:
            await self._coordinator.wait()
        self._config.listener.close()
        self._close_liveness()

    async def _end_of(self, coordinator: asyncio.subprocess.Process) -> int:
        """Waits for the end of a coordinator; returns its exit code. One that is stopped or hangs is killed."""
        ended = asyncio.create_task(coordinator.wait())
        watching = asyncio.create_task(self._end_if_hung(coordinator))
        guarding = asyncio.create_task(self._guard_files())
        try:
            # The watcher may fail, for example if /proc cannot be read. The job does not need it, so its failure is reported and
            # the wait continues.
            await asyncio.wait({ended, watching}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done() and (error := watching.exception()) is not None:
                self._note(f"a hang of the coordinator can no longer be detected: {error!r}")
            return await ended
        finally:
            watching.cancel()
            guarding.cancel()
            ended.cancel()

    async def _end_if_hung(self, coordinator: asyncio.subprocess.Process) -> None:
        silence = Silence(self._config.timing)
        while (why := silence.verdict()) is None:
            await asyncio.sleep(silence.every_s)  # there is no event for silence
            if spoke := has_spoken(self._liveness):
                self._refusals = 0
            silence.looked(spoke, look(coordinator.pid))
        self._note(f"killing the coordinator: {why}", pid=coordinator.pid)
        if coordinator.returncode is None:
            # SIGKILL, because a stopped process does not react to any other signal. The next coordinator continues from the
            # ledger.
            coordinator.kill()

    def _close_liveness(self) -> None:
        if self._liveness >= 0:
            os.close(self._liveness)
        self._liveness = -1


def _trouble(path: Path) -> str:
    """What is wrong with a file of the job's folder; empty: nothing. A file that can be read is left alone whatever its content
    is, since it may belong to a later start of the job."""
    try:
        decode_file(_anything.decode if path.suffix == ".json" else word, path)
    except (FileNotFoundError, NotADirectoryError):
        return "missing"
    except Damaged:
        return "damaged"
    except OSError:
        return ""  # it may be in order
    return ""


_anything = msgspec.json.Decoder()


def listen(host: str, port: int) -> socket.socket:
    """The listening socket of a job.

    Raises:
        UsageError: the port cannot be used.
    """
    try:
        return listening(host, port, BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UsageError(
                f"port {port} is in use; choose another port with --port, or remove the option"
            ) from None
        raise UsageError(f"cannot listen on {host_and_port(host, port)}: {error.strerror}") from None


# ---------------------------------------------------------------- liveness


class Look(NamedTuple):
    """An observation of a process."""

    state: str
    """Its state letter in /proc/PID/stat; 'X' if it is gone."""
    used_s: float
    """Processor time that it has used so far, in seconds."""


class Silence:
    """Measures how long a coordinator has been silent. Its event loop writes into a pipe, which is polled.

    Silence counts only from the first message on, because a start may take any time; a stopped process counts from the beginning.
    A healthy coordinator must not be ended because something else was slow. So each look counts for at most the time between two
    looks: a launcher that was itself stopped or late finds one silent look. And only time counts in which the coordinator could
    have written: not the time it waits for a disk, which it would also do after a restart, and of the time it waits for the
    processor only the processor time that it got.
    """

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._began = False
        self._used_s = 0.0
        self.stopped_s = self.silent_s = 0.0

    @property
    def every_s(self) -> float:
        """Seconds between two looks, in which a healthy coordinator writes twice."""
        return self._timing.heartbeat_s

    def looked(self, spoke: bool, look: Look) -> None:
        """Records a look. spoke: whether the coordinator has written since the last one."""
        # The processor time since the last look. A coordinator that was ready to run but did not get the processor could not
        # have written.
        used_s, self._used_s = look.used_s - self._used_s, look.used_s
        stopped = look.state in "Tt"
        self.stopped_s = self.stopped_s + self.every_s if stopped and not spoke else 0.0
        # A start may take long on a slow file system, and a restart would take just as long.
        self._began = self._began or spoke
        if spoke or not self._began:
            self.silent_s = 0.0
        elif look.state == "R":
            self.silent_s += min(used_s, self.every_s)
        # D means that it waits for a disk, for which a restarted coordinator would wait as well.
        elif look.state != "D":
            self.silent_s += self.every_s

    def verdict(self) -> str | None:
        """What is wrong with the coordinator; None: nothing is known to be."""
        # That a process is stopped is observed and not inferred, so a shorter time is enough than for silence.
        if self.stopped_s >= self._timing.detection_s:
            return f"its process has been stopped for {self.stopped_s:g} s"
        if self.silent_s >= self._timing.hang_s:
            return f"its event loop has not run for {self.silent_s:.1f} s"
        return None


def has_spoken(liveness: int) -> bool:
    """Whether the coordinator has written into its liveness pipe. liveness: the non-blocking read end."""
    try:
        return bool(os.read(liveness, READ_BYTES))
    except BlockingIOError:
        return False


def look(pid: int) -> Look:
    """Observes a child of this process that has not been waited for, so that its pid cannot belong to another process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return Look("X", 0.0)
    fields = text[text.rindex(")") + 2 :].split()
    return Look(fields[0], (int(fields[11]) + int(fields[12])) / _TICKS)
