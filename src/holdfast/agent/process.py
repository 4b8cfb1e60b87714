"""One worker from the point of view of its agent: process, socket, progress record, output, whether it makes progress, and the
processes that it leaves behind."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from holdfast.agent.warm_pool import WarmProcess
from holdfast.errors import ProtocolError
from holdfast.protocol import messages as m
from holdfast.protocol.job_options import Timing
from holdfast.protocol.machine import processes
from holdfast.protocol.machine.processes import catches, stat_of
from holdfast.protocol.machine.progress_record import STACKS_SIGNAL, ProgressRecord
from holdfast.protocol.phases import (
    OUTSIDE_PHASES,
    SLOW_PHASES,
    WAITING_PHASES,
    Groups,
    PageReading,
    Phase,
)
from holdfast.protocol.wire.frames import Codec, pack

_log = logging.getLogger(__name__)
_codec: Codec[m.WorkerMessage] = Codec(m.WorkerMessage)
TAIL_LINES = 20
BUSY_SHARE = 0.03
"""Share of a core. A rank that only waits in gloo stays below it."""

LOOK_S = 0.1
"""Processor time is counted in hundredths of a second: between two looks that are closer it says nothing."""


class WorkerProcess:
    """Owns one worker's process until it has ended and its output is read.

    `on_message` gets every message, `stalled` a view when the worker makes no progress, `reaped` its number and exit code at
    once when it has ended, `exited` its end when everything that it left is read.
    """

    def __init__(
        self,
        name: str,
        slot: int,
        warm: WarmProcess,
        folder: Path,
        timing: Timing,
        on_message: Callable[[WorkerProcess, m.WorkerMessage], None],
        stalled: Callable[[WorkerProcess, m.WorkerView], None],
        exited: Callable[[WorkerProcess, m.Exited], None],
        reaped: Callable[[int, int], None],
    ) -> None:
        self.name, self.slot, self.pid = name, slot, warm.pid
        safe = name.replace("#", "-")
        self.log = folder / f"{safe}.log"
        self.stacks = folder / f"{safe}.stacks"
        self.record = ProgressRecord()
        self.formed = 0
        self.rank: int | None = None
        """In the newest generation that it was told to join; None: it was told of none."""
        self.reported = 0
        """The generation of its newest report of progress."""
        self.attached = False
        self.ready: m.Ready | None = None
        self.parked: m.Parked | None = None
        self.done: m.Done | None = None
        self.median_s: float | None = None
        self.gone = False
        self._killed = False
        self._kills = processes.kills()
        self._warm = warm
        self._timing = timing
        self._on_message, self._stalled, self._exited, self._reaped = on_message, stalled, exited, reaped
        self._loop = asyncio.get_running_loop()
        self._ending = asyncio.Event()
        self._asked = 0
        self._groups: Groups | None = None
        self._script_ended = False
        self._answered = asyncio.Event()
        self._leaving: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._stopped_since: float | None = None
        self._cpu: tuple[float, float] | None = None
        self._busy = False
        self._standstill = Standstill()
        # Everything below goes by the pidfd. The number of a process that has ended is given to another one,
        # which a late signal would hit.
        self._pidfd = os.pidfd_open(self.pid)
        self._loop.add_reader(self._pidfd, self._ended)
        self._reading = asyncio.create_task(self._read())

    # ------------------------------------------------------------ to the worker

    def tell(self, message: m.ToWorker) -> None:
        """Sends a message, and records what a coordinator that takes over will ask about."""
        if isinstance(message, m.JoinGeneration):
            # Never backwards: the hello tells a restarted coordinator the newest generation that this worker
            # was sent into.
            self.formed = max(self.formed, message.generation.number)
            self.rank, self.parked = message.rank, None
            self._watch()
        if isinstance(message, m.Rebuild):
            # The worker will say Ready again when it has rebuilt. A restarted coordinator that read the old
            # one here would form a generation with a worker that is not there.
            self.ready = None
        if not self.gone:
            self._warm.writer.write(pack(message))

    def kill(self, grace_s: float = 0.0) -> None:
        """Ends the process: SIGKILL now, or SIGTERM now and SIGKILL after the grace."""
        if self.gone:
            return
        if grace_s > 0:
            self.signal(signal.SIGTERM)
            # A stopped process receives SIGTERM only when it runs again.
            self.signal(signal.SIGCONT)
            self._loop.call_later(grace_s, self.kill)
        else:
            # The core must not take this end for a fault of the script: it ordered it.
            self._killed = True
            self.signal(signal.SIGKILL)

    def signal_for_stacks(self) -> None:
        """Of a process that is stopped, or whose interpreter another thread holds: it cannot be asked. One that has become
        another program has no handler, and would end."""
        if not self.gone and catches(self.pid, STACKS_SIGNAL):
            self.signal(STACKS_SIGNAL)

    def signal(self, number: int) -> None:
        if self.gone:
            return
        try:
            signal.pidfd_send_signal(self._pidfd, number)
        except ProcessLookupError:
            return

    # ------------------------------------------------------------ from the worker

    async def _read(self) -> None:
        """Reads messages until the worker's end of the socket closes. A worker whose message is invalid is ended."""
        try:
            await self._listen()
        except ProtocolError as error:
            _log.warning(
                "killing a worker whose message cannot be decoded: %s", error, extra={"worker": self.name}
            )
            self.kill()

    async def _listen(self) -> None:
        while (message := await _codec.read_stream(self._warm.reader)) is not None:
            match message:
                case m.Attached():
                    self.attached = True
                case m.Ready():
                    self.ready = message
                case m.Parked():
                    self.parked = message
                    self._unwatch()
                case m.Done():
                    self.done = message
                    self._unwatch()
                case m.Progress():
                    self.median_s = message.median_s
                    self._watch()
                case m.Joined():
                    self._watch()
                case _:
                    pass
            if isinstance(message, m.InCollectives):
                # An answer to an earlier question says where the worker was then.
                if message.request == self._asked:
                    self._groups = message.groups
                    self._answered.set()
                continue
            if isinstance(message, m.ScriptEnded):
                self._script_ended, self._groups = True, message.groups
                continue
            self._on_message(self, message)

    def _ended(self) -> None:
        """The process has ended: reads what it left in its socket, then reports the end."""
        self._loop.remove_reader(self._pidfd)
        self.gone = True
        self._ending.set()
        self._answered.set()
        self._unwatch()
        # The pidfd is readable as soon as the process is a zombie, so this does not block. It also reaps it;
        # nothing else in the agent may call wait for any child.
        status = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
        os.close(self._pidfd)
        code = 0
        if status is not None:
            code = status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
        self._reaped(self.pid, code)
        self._leaving = asyncio.create_task(self._leave(code))

    async def _leave(self, code: int) -> None:
        # The socket may still hold messages that the worker sent before its end, such as Done or Failed. The
        # core has to see them before Exited, or a finished worker would count as failed.
        await self._reading
        self._warm.writer.close()
        reading = self.record.read()
        # Only a level 0 script has no generation. Its optimizer steps tell the core whether a restart made
        # progress; at level 2 commits are counted elsewhere.
        steps = 0 if reading.generation else reading.committed
        short = code == -signal.SIGKILL and not self._killed and self._was_killed_for_memory()
        ended = m.Exited(
            worker=self.name,
            code=code,
            tail=tuple(self.tail()),
            log=str(self.log),
            killed=self._killed,
            out_of_memory=short,
            memory_limit=processes.limit_bytes() if short else None,
            steps=steps,
            script_ended=self._script_ended,
            groups=self._groups if self._script_ended else None,
        )
        self._exited(self, ended)
        self.record.close()
        # The file was opened for the signal handler at the start, and most workers never write a stack.
        if self.stacks.exists() and self.stacks.stat().st_size == 0:
            self.stacks.unlink()

    def _was_killed_for_memory(self) -> bool:
        """Some process of this group was. Which one the kernel tells nobody here, and it counts before it sends the signal."""
        kills = processes.kills()
        return kills is not None and self._kills is not None and kills > self._kills

    async def finished(self) -> None:
        """Waits until the process has ended and everything it left is reported."""
        while not self.gone:
            await self._ending.wait()
        if self._leaving is not None:
            await self._leaving

    def tail(self) -> list[str]:
        """The last lines of the log."""
        try:
            with self.log.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - 8192))
                return log.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
        except OSError:
            return []

    # ------------------------------------------------------------ standing still

    async def ask_where(self) -> Groups | None:
        """Asks a script that does not know of Holdfast for its position in its collectives. None: it did not answer in time, or
        cannot tell."""
        self._groups = None
        self._asked += 1
        self._answered.clear()
        # A stopped process cannot answer, and would cost all others the whole time.
        if self.gone or process_state(self.pid) in "TtXZ":
            return None
        self.tell(m.WhereInCollectives(self._asked))
        with suppress(TimeoutError):
            async with asyncio.timeout(self._timing.where_s):
                await self._answered.wait()
        return self._groups

    def view(self, groups: Groups | None = None) -> m.WorkerView:
        """What is known of the worker now. groups: what it has just answered."""
        reading = self.record.read() if not self.gone else PageReading()
        # Whoever waits for this one asks a little before its own time is over.
        outside = self.attached and reading.phase in OUTSIDE_PHASES
        if outside and self._cpu is not None and time.monotonic() - self._cpu[0] >= LOOK_S:
            self._sample_cpu()
        return m.WorkerView(
            worker=self.name,
            slot=self.slot,
            pid=self.pid,
            formed=self.formed,
            page=reading,
            process=process_state(self.pid),
            idle_s=self._standstill.idle_s(
                reading.beat_s, waited_for_processor_s(self.pid), time.monotonic()
            ),
            ready=self.ready,
            attached=self.attached,
            parked=self.parked,
            done=self.done,
            median_s=self.median_s,
            busy=self._busy,
            groups=groups,
        )

    def check_stopped(self) -> None:
        """After SIGCHLD: a process that stays stopped for the detection time is stalled, in any phase."""
        if self.gone:
            return
        if process_state(self.pid) not in "Tt":
            self._stopped_since = None
        elif self._stopped_since is None:
            # SIGCHLD comes once per stop. A debugger or a cgroup freezer stops a process for a moment, so a
            # second look decides.
            self._stopped_since = time.monotonic()
            self._loop.call_later(self._timing.detection_s, self._still_stopped)

    def _still_stopped(self) -> None:
        if self.gone or self._stopped_since is None:
            return
        if process_state(self.pid) in "Tt":
            self._stalled(self, self.view())
            self._loop.call_later(self._timing.detection_s, self._still_stopped)
        else:
            self._stopped_since = None

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _watch(self, delay_s: float | None = None) -> None:
        """Restarts the stall timer, because the worker made progress."""
        self._unwatch()
        if delay_s is None:
            # Progress makes the old sample of processor time worthless: the next stall must be judged by what
            # the worker did since.
            self._cpu, self._busy = None, False
            # Looked at once before it may be over: processor time is what was used between two looks.
            delay_s = self._timing.stall_s(self.median_s) / (2 if self.attached else 1)
        self._timer = self._loop.call_later(delay_s, self._maybe_stalled)

    def _maybe_stalled(self) -> None:
        self._timer = None
        if self.gone or self.parked is not None or self.done is not None:
            return
        if not self.attached or self.record.read().phase in OUTSIDE_PHASES:
            self._sample_cpu()
        view = self.view()
        allowed = self._allowed_s(view)
        if view.idle_s < allowed:
            # The worker moved in the meantime, by the record that it shares with the agent. There is no event
            # for that record, so the timer is set to the earliest moment at which it can be stalled. The floor
            # of 50 ms keeps a worker whose allowance is about to end from waking the agent all the time.
            self._watch(max(0.05, min(allowed - view.idle_s, self._timing.stall_floor_s)))
            return
        # Reported again for as long as it lasts: the core decides by the newest view.
        self._stalled(self, view)
        self._watch(self._timing.stall_floor_s)

    def _sample_cpu(self) -> None:
        """Notes whether the worker used the processor since the last sample, some seconds ago."""
        # At level 0 nothing but the processor tells a long computation from a collective that hangs. In-
        # process workers report their phase, so they are not sampled within a step: reading /proc for every
        # descendant is not free.
        now, used_s = time.monotonic(), cpu_s(self.pid)
        if self._cpu is not None and now > self._cpu[0]:
            self._busy = (used_s - self._cpu[1]) / (now - self._cpu[0]) >= BUSY_SHARE
        self._cpu = now, used_s

    def _allowed_s(self, view: m.WorkerView) -> float:
        """How long the worker may make no progress in its phase, in seconds.

        Without a median (a first step may compile for minutes) only waiting counts, against the time that the
        worker itself needed to get there. A script at level 0 may well pause for a checkpoint, so it gets more; and
        one that computes meanwhile is left alone for longer, but that is for the core to decide.
        """
        reading = view.page
        if not self.attached:
            if self.median_s is None:
                # Before the first step nothing is known: the script may download data or compile for minutes.
                return self._timing.start_s if reading.committed else float("inf")
            # Steps of an unmodified script may include an evaluation or a checkpoint, which take many step
            # times. A false restart costs more than a late one.
            return max(20 * self._timing.detection_s, 4 * self._timing.stall_s(self.median_s))
        if reading.phase in SLOW_PHASES or (view.busy and reading.phase in OUTSIDE_PHASES):
            return self._timing.start_s
        if self.median_s is not None:
            return self._timing.stall_s(self.median_s)
        if reading.phase in (Phase.REDUCE, Phase.VOTE):
            # Ranks compute for about as long as each other, so a peer that has not arrived after a multiple
            # of this rank's own time is stuck.
            own = reading.phase_began_s - reading.step_began_s
            return max(self._timing.stall_floor_s, self._timing.stall_factor * own)
        if reading.phase in WAITING_PHASES or reading.phase == Phase.TRANSFER:
            return self._timing.stall_floor_s
        return float("inf")


def cpu_s(pid: int) -> float:
    """Seconds of processor time that a process and its descendants have used; 0 when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
        children = [p.read_text().split() for p in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:
        return 0.0
    fields = text[text.rindex(")") + 2 :].split()
    own = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")  # utime, stime, and of children that ended
    return own + sum(cpu_s(int(child)) for row in children for child in row)


class Standstill:
    """Seconds without any progress of a worker, less the time in which it waited for a processor: on a machine with other work
    a healthy worker may wait for a second."""

    def __init__(self) -> None:
        self._beat_s = self._waited_s = self._waited_before_s = 0.0

    def idle_s(self, beat_s: float, waited_s: float, now: float) -> float:
        """beat_s: when the worker last made progress; 0: never. waited_s: seconds that it waited for a processor since its
        start."""
        if beat_s != self._beat_s:
            # Of the look before, which was before it moved: rather a bit too much than a healthy worker ended.
            self._beat_s, self._waited_before_s = beat_s, self._waited_s
        self._waited_s = waited_s
        return max(0.0, now - beat_s - max(0.0, waited_s - self._waited_before_s)) if beat_s else 0.0


def waited_for_processor_s(pid: int) -> float:
    """Seconds for which the main thread of a process could run and had no processor; 0 where the kernel does not count them.

    Source: Documentation/scheduler/sched-stats.rst of Linux, /proc/PID/schedstat.
    """
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) * 1e-9
    except (OSError, ValueError, IndexError):
        return 0.0


def process_state(pid: int) -> str:
    """Letter of the process's state in /proc/PID/stat; 'X' when it is gone."""
    stat = stat_of(pid)
    return "X" if stat is None else stat.state


FRAMES = 12
"""The standard library's and torch's own take some before the script's come."""


def innermost(path: Path, offset: int) -> str:
    """The innermost frames of the main thread in the dump that begins at `offset`; '' when there is none."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    threads = text.strip().split("\n\n")
    main = threads[-1].splitlines()[1:] if threads else []
    return "\n".join(line.strip() for line in main[:FRAMES])


_CLEANS_UP = b"multiprocessing.resource_tracker"
"""In the command line of the process that removes a worker's shared memory when the worker is gone. It ends by itself."""


class _Left(NamedTuple):
    pid: int
    is_dead: bool


class Leftovers:
    """Processes that ended workers had started and did not wait for. They hold ports and devices that the next attempt needs.
    So those of a worker that failed are ended with it; those of a worker that finished may still be at work, and are ended
    before the next worker starts here, or with the job.

    The agent reaps them: the kernel makes it the parent of every process whose own parent ends. A worker leads a session of its
    own, to which its children belong unless one leaves it on purpose (`setsid`, as daemons do): that one is the user's, and is
    left alone.
    """

    def __init__(self) -> None:
        self._sessions: dict[int, bool] = {}
        """Of ended workers, by their numbers: whether what is left in them is to end."""

    def began(self, pid: int) -> None:
        """A new worker, whose number an earlier one may have had; nothing of the earlier ones may be in its way."""
        self._sessions.pop(pid, None)
        self._sessions = dict.fromkeys(self._sessions, True)
        self.look()

    def ended(self, pid: int, code: int) -> None:
        """A worker that has just ended."""
        self._sessions[pid] = code != 0
        self.look()

    def look(self) -> None:
        """Call after each SIGCHLD: reaps what has ended, ends what is due, and forgets sessions that are empty."""
        if not self._sessions:
            return
        left = self._find()
        for session, members in left.items():
            for each in members:
                if each.is_dead:
                    _reap(each.pid)
                elif self._sessions[session]:
                    _kill(_family(each.pid), signal.SIGKILL)
        self._sessions = {
            session: ends
            for session, ends in self._sessions.items()
            if session in left or _has_group(session)
        }

    async def end(self, grace_s: float) -> None:
        """With the job: SIGTERM, and SIGKILL after the grace."""
        living = [each.pid for members in self._find().values() for each in members if not each.is_dead]
        _kill((pid for each in living for pid in _family(each)), signal.SIGTERM)
        async with asyncio.TaskGroup() as group:
            for pid in living:
                group.create_task(_gone(pid, grace_s))
        self._sessions = dict.fromkeys(self._sessions, True)
        self.look()

    def _find(self) -> dict[int, list[_Left]]:
        found: dict[int, list[_Left]] = {}
        for pid in _children(os.getpid()):
            stat = stat_of(pid)
            # Who leads a session of that number is a new process that was given the number of the worker, which is gone.
            if stat is not None and stat.session in self._sessions and stat.session != pid:
                found.setdefault(stat.session, []).append(_Left(pid, stat.state in "ZX"))
        return found


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += map(int, task.read_text().split())
        except OSError:  # the thread or the process is gone
            continue
    return found


def _family(pid: int) -> list[int]:
    """The process and its descendants, without those that clean up after it."""
    try:
        if _CLEANS_UP in Path(f"/proc/{pid}/cmdline").read_bytes():
            return []
    except OSError:
        return []
    return [pid, *(below for child in _children(pid) for below in _family(child))]


def _kill(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):  # it is gone, or it runs as somebody else
            continue


def _reap(pid: int) -> None:
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return


def _has_group(pid: int) -> bool:
    """Whether anything is left in the process group of a worker, whose children may be another one's still."""
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


async def _gone(pid: int, within_s: float) -> None:
    """Waits until one of our children has ended."""
    try:
        held = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(held, ended.set)
    try:
        async with asyncio.timeout(within_s):
            await ended.wait()
    except TimeoutError:
        pass
    finally:
        loop.remove_reader(held)
        os.close(held)
