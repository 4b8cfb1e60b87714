"""The watcher of a node: follows the kernel's log, the workers' logs and the sources, and tells what rules find.

The kernel's log and the files come as events of the agent's loop; what must be asked for is asked on a thread. While
nothing happens the loop is woken only to see whether that thread still lives.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import msgspec

from holdfast.agent.source_poller import LOOK_S, WATCH_ENDED, Poller
from holdfast.errors import UsageError
from holdfast.health.container import in_container
from holdfast.health.identity import gpu_uuids
from holdfast.health.kmsg import SOURCE, Journal, Kmsg, KmsgFile, open_kernel_log
from holdfast.health.logs import LogTail
from holdfast.health.machine import machine_sources
from holdfast.health.rule_engine import RuleEngine
from holdfast.health.rules import Rule
from holdfast.health.ruleset import catalogue, load_rules
from holdfast.health.samples import LogLine, Reading
from holdfast.health.sources import MachineRoot
from holdfast.observe.inotify import MODIFIED, Inotify
from holdfast.protocol import messages as m
from holdfast.protocol.health import (
    MOST_READINGS,
    NODE_FIGURES,
    SUBJECT_CHARS,
    Condition,
    Finding,
    Remedy,
    Severity,
)
from holdfast.protocol.job_options import HealthSpec

_log = logging.getLogger(__name__)
_CLOSED_AFTER_WRITE, _MOVED_HERE = 0x8, 0x80
FIRST_READ_S = 10.0
_T = TypeVar("_T")


class HealthWatcher:
    """Watches the health of one node. `send` gets the messages to the coordinator.

    folder: the node's own, for its records, the log that stands in for the kernel's (`kmsg`) and the stand-in for its machine.
    shared: several nodes are on this machine, so its faults concern all of them and are attributed to none.
    """

    def __init__(
        self,
        folder: Path,
        spec: HealthSpec,
        shared: bool,
        send: Callable[[m.FindingsReported | m.NodeReadings], None],
        job_dir: Path,
        inotify: Inotify | None = None,
    ) -> None:
        """inotify: one that calls `files_changed`; without it the watcher has its own."""
        self._folder, self._spec, self._shared, self._send = folder, spec, shared, send
        self._job_dir = job_dir
        self._loop = asyncio.get_running_loop()
        self._figures = Figures(self._after, send)
        self._files: tuple[KmsgFile, ...] = ()
        self._kernel: Kmsg | Journal | None = None
        self._inotify, self._own = inotify, inotify is None
        self._rule_engine = RuleEngine(())
        self._pollers: list[Poller] = []
        self._logs: dict[str, LogTail] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._watchdog: asyncio.TimerHandle | None = None
        self._telling: asyncio.TimerHandle | None = None
        self._standing_in: Poller | None = None
        self._files_failed = False
        self._rules: list[Rule] = []
        self._gpus: dict[str, str] = {}
        self._stamps: dict[str, tuple[int, int] | None] = {}

    async def start(self) -> None:
        """Starts watching."""
        # With --no-health there is not even a thread.
        if not self._spec.watch:
            return
        # On a thread: rule files may be on a shared file system, and the loop has workers to serve.
        self._rules = await asyncio.to_thread(self._first_rules)
        self._rule_engine.set_rules(self._rules)
        try:
            self._follow_files()
        except OSError as error:
            self._tell_own("files-unwatched", f"changes of logs and rule files are not seen here: {error}")
        # Before the kernel's log is followed, so that the first Xid already names the GPU's UUID.
        self._gpus = await asyncio.to_thread(_gpus_by_subject)
        self._follow_kernel()
        machine = self._poller(self._shared)
        try:
            machine.add(await asyncio.to_thread(machine_sources, MachineRoot(job_dirs=(self._job_dir,))))
        except Exception as error:  # noqa: BLE001 - the node trains unwatched, and that is said
            self._tell_own(WATCH_ENDED, f"the machine is not watched: {type(error).__name__}: {error}")
        self._look_after()

    def close(self) -> None:
        """Stops watching."""
        for timer in (self._timer, self._watchdog, self._telling):
            if timer is not None:
                timer.cancel()
        if self._inotify is not None and self._own:
            self._inotify.close()
        self._close_kernel()
        for file in self._files:
            file.close()
        for tail in self._logs.values():
            tail.close()
        for poller in self._pollers:
            poller.close()

    @property
    def folder(self) -> Path:
        """The node's own folder."""
        return self._folder

    @property
    def sources(self) -> frozenset[str]:
        """Names of what is read here, the kernel's log among them if it is."""
        kernel = frozenset() if self._kernel is None else frozenset({SOURCE})
        return kernel.union(*(poller.sources for poller in self._pollers))

    async def stand_in(self, machine: MachineRoot) -> None:
        """Watches the stand-in for this node's machine from now on, like a real machine. Returns when it was read once."""
        if self._standing_in is None and self._spec.watch:
            self._standing_in = self._poller(shared=False)
            self._standing_in.add(await asyncio.to_thread(machine_sources, machine))
            await asyncio.to_thread(self._standing_in.read_once, FIRST_READ_S)

    # ------------------------------------------------------------ rules

    def _read_rules(self) -> list[Rule] | None:
        """Reads the rules. None, with a finding, when something in their files is wrong."""
        # Taken before the files are read. A change during the reading then differs from its stamp, and the
        # files are read once more.
        self._stamps = {name: _stamp(name) for name in self._spec.rules}
        try:
            return list(load_rules(self._spec.rules, self._spec.dry_run))
        except UsageError as error:
            self._loop.call_soon_threadsafe(
                self._tell_own, "rules-unreadable", f"{error}; the old rules stay in force"
            )
            return None

    def _first_rules(self) -> list[Rule]:
        """The rules at the start. If a file is wrong, only the catalogue applies; rules on trial stay on trial."""
        rules = self._read_rules()
        if rules is not None:
            return rules
        # A rule file with a mistake must not leave a node unwatched. The coordinator gets the mistake as a
        # finding.
        known = catalogue()
        known.on_trial(name for name in self._spec.dry_run if known.named(name))
        return list(known)

    def _rules_changed(self) -> None:
        rules = self._read_rules()
        if rules is None:
            return
        self._rules = rules
        self._rule_engine.set_rules(rules)
        for poller in self._pollers:
            poller.use(rules)
        self._follow_logs()
        self._plan()
        self._tell_own(
            "rules-changed",
            f"rules reloaded from {', '.join(self._spec.rules)}",
            Severity.INFO,
            Condition.HEALTHY,
        )

    # ------------------------------------------------------------ lines

    def _follow_files(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._inotify = self._inotify or Inotify(self.files_changed)
        self._files = (KmsgFile(self._folder / "kmsg"),)
        self._inotify.watch(self._folder / "kmsg")
        for folder in {Path(name).parent for name in self._spec.rules}:
            self._inotify.watch(folder, _CLOSED_AFTER_WRITE | _MOVED_HERE)

    def _follow_kernel(self) -> None:
        try:
            self._kernel = open_kernel_log(self._folder / "kmsg.left")
        except OSError as error:
            if self._first_to_say("kmsg-unreadable"):
                # A container without privileges never may, and nothing is wrong with it.
                usual = in_container(Path("/"), os.environ)
                severity = Severity.INFO if usual else Severity.WARNING
                self._tell_own("kmsg-unreadable", str(error.strerror), severity)
            return
        self._loop.add_reader(self._kernel.fileno(), self._kernel_spoke)

    def _kernel_spoke(self) -> None:
        assert self._kernel is not None
        try:
            lines = self._kernel.lines()
        except Exception as error:  # noqa: BLE001 - called by the loop, which would call it again and again
            self._kernel_is_lost(str(error) or type(error).__name__)
            return
        self._judge(lines, self._shared)

    def _kernel_is_lost(self, why: str) -> None:
        self._close_kernel()
        self._tell_own("kmsg-unreadable", f"reading the kernel log failed, so it is no longer watched: {why}")

    def _close_kernel(self) -> None:
        if self._kernel is not None:
            self._loop.remove_reader(self._kernel.fileno())
            self._kernel.close()
            self._kernel = None

    def files_changed(self) -> None:
        """A file that `inotify` watches changed, or another one."""
        try:
            for file in self._files:
                self._judge(file.lines(), shared=False)
            for tail in self._logs.values():
                self._judge(tail.lines(), shared=False)
        except OSError as error:
            # Said once: a file that cannot be read now may be every time something is written.
            if not self._files_failed:
                self._tell_own("files-unwatched", f"a log that is followed cannot be read here: {error}")
            self._files_failed = True
        # An editor replaces a file by renaming, and a folder's event says little of that. Size and time tell
        # whether the content is another one.
        if any(_stamp(name) != stamp for name, stamp in self._stamps.items()):
            self._rules_changed()

    def _judge(self, lines: Iterable[LogLine], shared: bool) -> None:
        now = time.monotonic()
        findings: list[Finding] = []
        for line in lines:
            findings += self._rule_engine.on_line(line, now)
        self._tell(findings, shared)
        if self._logs:
            self._plan()

    # ------------------------------------------------------------ workers' logs

    def trains(self, worker: str, rank: int, log: Path) -> None:
        """Notes that a worker begins to train, for the first time or again."""
        self._rule_engine.on_training_started(worker, rank, time.monotonic())
        if worker not in self._logs:
            self._logs[worker] = LogTail(log, worker)
        self._follow_logs()
        self._plan()

    def pauses(self, worker: str) -> None:
        """Notes that a worker does not train for now."""
        self._rule_engine.on_training_paused(worker)
        self._plan()

    def gone(self, worker: str) -> None:
        """Notes that a worker's process has ended. What it wrote last is still read."""
        tail = self._logs.pop(worker, None)
        if tail is not None:
            # Its last lines often have the cause of its end, and its events may not have come yet.
            if tail.followed:
                self._judge(tail.lines(), shared=False)
            tail.close()
        self.pauses(worker)

    def _follow_logs(self) -> None:
        """Logs are read only if some rule is about them."""
        if self._inotify is None or not self._rule_engine.reads_logs:
            return
        for tail in self._logs.values():
            if not tail.followed:
                tail.open()
            # Again does no harm: whoever shares it may have ended it.
            self._inotify.watch(tail.path, MODIFIED)

    def _plan(self) -> None:
        """The next moment at which a line is overdue."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_s = self._rule_engine.next_due_s()
        if due_s is not None:
            # A millisecond late, because a timer that fires a moment early would find nothing due and be set
            # again.
            self._timer = self._loop.call_later(max(0.0, due_s - time.monotonic()) + 1e-3, self._overdue)

    def _overdue(self) -> None:
        self._timer = None
        self._tell(self._rule_engine.overdue(time.monotonic()), shared=False)
        self._plan()

    # ------------------------------------------------------------ sources

    def _look_after(self) -> None:
        """What watches is watched."""
        self._watchdog = self._loop.call_later(LOOK_S, self._look_after)
        if self._kernel is not None and (why := self._kernel.trouble()):
            self._kernel_is_lost(why)
        for poller in self._pollers:
            poller.watch_yourself()

    def _poller(self, shared: bool) -> Poller:
        poller = Poller(
            self._rules,
            lambda findings: self._soon(self._tell, findings, shared),
            lambda lines: self._soon(self._judge, lines, shared),
            self._figures.take,
        )
        self._pollers.append(poller)
        return poller

    def _soon(self, call: Callable[[list[_T], bool], None], what: list[_T], shared: bool) -> None:
        """On the loop's thread, if the loop still turns."""
        try:
            # The agent's loop may be closed while the poller's thread is still in a read.
            self._loop.call_soon_threadsafe(call, what, shared)
        except RuntimeError:
            return

    def _after(self, seconds: float, call: Callable[[], None]) -> None:
        """On the loop's thread after so many seconds, if the loop still turns and this is not closed."""
        try:
            self._loop.call_soon_threadsafe(self._call_later, seconds, call)
        except RuntimeError:
            return

    def _call_later(self, seconds: float, call: Callable[[], None]) -> None:
        # One at a time: `Figures` asks for the next one when it has told what it had.
        self._telling = self._loop.call_later(seconds, call)

    # ------------------------------------------------------------ to the coordinator

    def _tell(self, findings: list[Finding], shared: bool) -> None:
        if not findings:
            return
        for finding in findings:
            _log.info("found: %s", finding.evidence, extra={"rule": finding.rule, "subject": finding.subject})
        self._send(m.FindingsReported(tuple(self._marked(finding, shared) for finding in findings)))

    def _marked(self, finding: Finding, shared: bool) -> Finding:
        """Adds what a rule cannot know: whether the machine is shared, and the UUID of a GPU that is named by address."""
        # The kernel names a GPU by its PCI address. Only the UUID follows a GPU that is moved to another slot
        # or machine, so histories go by it.
        device = finding.device or self._gpus.get(finding.subject, "")
        return msgspec.structs.replace(finding, device=device, shared=finding.shared or shared)

    def _first_to_say(self, rule: str) -> bool:
        """Whether this node is the first on its machine to report the rule. One report is enough for all of them."""
        try:
            # Creating the file is atomic, so exactly one of several agents on this machine succeeds. A node
            # with a machine of its own may find its file from before a restart, and reports again.
            (self._folder.parent / f".{rule}").touch(exist_ok=not self._shared)
        except FileExistsError:
            return False
        except OSError:
            return True
        return True

    def _tell_own(
        self,
        rule: str,
        evidence: str,
        severity: Severity = Severity.WARNING,
        condition: Condition = Condition.UNKNOWN,
    ) -> None:
        """Reports something about the watcher itself."""
        _log.info("%s", evidence, extra={"rule": rule})
        self._send(
            m.FindingsReported(
                (
                    Finding(
                        rule=rule,
                        severity=severity,
                        remedy=Remedy.WATCH,
                        source="agent",
                        condition=condition,
                        evidence=evidence,
                    ),
                )
            )
        )


def _gpus_by_subject() -> dict[str, str]:
    """UUIDs by what rules for the kernel's lines call a GPU: its address without the function."""
    return {f"gpu {pci.partition('.')[0]}": uuid for pci, uuid in gpu_uuids(Path("/")).items()}


def _stamp(name: str) -> tuple[int, int] | None:
    """Modification time and size of a file; None if it is not there."""
    try:
        status = Path(name).stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


STALE_S = 180.0
"""Three periods of the slowest source."""


GATHER_S = 1.0
"""Sources with the same period are read one after the other, and what they read is one message."""


class Figures:
    """Sends the coordinator the newest readings of a node that are shown to people as figures. Readings come on the threads
    that read them; `later` and `send` belong to the agent's loop.

    Nothing is sent by a timer: a round of readings triggers it, and rounds are at least 30 seconds apart.
    """

    def __init__(
        self,
        later: Callable[[float, Callable[[], None]], None],
        send: Callable[[m.NodeReadings], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """later: calls something on the loop after so many seconds; from any thread."""
        self._later, self._send, self._clock = later, send, clock
        self._lock = threading.Lock()
        self._newest: dict[tuple[str, str], tuple[float, float]] = {}
        self._due = False

    def take(self, readings: Iterable[Reading | LogLine]) -> None:
        """What one source has read."""
        now = self._clock()
        found = {
            (one.name, one.subject[:SUBJECT_CHARS]): (now, float(one.value))
            for one in readings
            if isinstance(one, Reading) and one.name in NODE_FIGURES and isinstance(one.value, int | float)
        }
        if not found:
            return
        with self._lock:
            # A machine with hundreds of virtual interfaces: the first that were seen stay, so a series does not flicker.
            for key, value in found.items():
                if key in self._newest or len(self._newest) < MOST_READINGS:
                    self._newest[key] = value
            due, self._due = self._due, True
        if not due:
            self._later(GATHER_S, self._tell)

    def _tell(self) -> None:
        with self._lock:
            self._due = False
            # Sources have different periods, so what was told before is told again, until it is old: then its device is gone.
            oldest = self._clock() - STALE_S
            self._newest = {k: v for k, v in self._newest.items() if v[0] >= oldest}
            told = tuple((name, subject, value) for (name, subject), (_, value) in self._newest.items())
        self._send(m.NodeReadings(told))
