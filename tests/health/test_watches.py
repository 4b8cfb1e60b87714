"""A watch that does not watch says so within ten seconds: each source hangs, is refused, or its thread is gone."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench.health import rig

from holdfast.agent import source_poller
from holdfast.agent.source_poller import GRACE_S, LOOK_S, UNWATCHED, WATCH_ENDED, Poller
from holdfast.health.dcgm import Dcgm
from holdfast.health.kmsg import Journal
from holdfast.health.machine import machine_sources
from holdfast.health.nvml import Nvml
from holdfast.health.samples import Reading
from holdfast.health.sources import MachineRoot, Source
from holdfast.health.xids import HANGS_S, XidEvents
from holdfast.protocol.health import Condition, Finding

PROMISED_S = 10.0
SOURCES = [
    "Pressure",
    "Processes",
    "MemorySource",
    "Clock",
    "Pcie",
    "Mounts",
    "Disks",
    "Interfaces",
    "Rdma",
    "Nvml",
    "Dcgm",
]
WAIT_S = 20.0


class Clock:
    """Time passes when it is told to."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__("Insufficient Permissions")
        self.value = value


def refusing_library() -> Any:
    """NVML of a user that may not use the device files."""
    codes = (
        "NOT_SUPPORTED",
        "INVALID_ARGUMENT",
        "FUNCTION_NOT_FOUND",
        "NOT_FOUND",
        "ARGUMENT_VERSION_MISMATCH",
    )
    numbers = {
        f"NVML_ERROR_{name}": at for at, name in enumerate((*codes, "DRIVER_NOT_LOADED", "TIMEOUT"), 1)
    }

    def refuse() -> None:
        raise NVMLError(4711)

    return SimpleNamespace(NVMLError=NVMLError, nvmlInit=refuse, nvmlShutdown=refuse, **numbers)


def refusing_page(url: str) -> str:
    raise PermissionError(errno.EPERM, "Operation not permitted")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Source]:
    """A source of each kind."""
    for count in ("GPUS", "PORTS", "DRIVES", "INTERFACES", "OTHER_PCI", "PROCESSES", "CONTROLLERS", "QUEUES"):
        monkeypatch.setattr(rig, count, 1)
    rig.build(tmp_path)
    (tmp_path / "proc/self").mkdir()
    (tmp_path / "proc/self/mountinfo").write_text("22 1 8:1 / / rw - ext4 /dev/sda1 rw\n")
    sources = machine_sources(MachineRoot(tmp_path))
    sources += [Nvml(tmp_path, refusing_library()), Dcgm("http://localhost", refusing_page)]
    found = {type(source).__name__: source for source in sources}
    assert sorted(found) == sorted(SOURCES), "a source that this test does not know"
    return found


class Heard:
    """A poller whose findings are kept, with the test's clock."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.found: list[Finding] = []
        self.poller = Poller((), self.found.extend, clock=self.clock)

    def said(self, rule: str = UNWATCHED) -> list[tuple[str, bool]]:
        """Of which source, and whether it is unknown now."""
        return [(f.subject, f.condition is Condition.UNKNOWN) for f in self.found if f.rule == rule]

    def look_for(self, seconds: float) -> None:
        """As the agent's loop does, for so long."""
        for _ in range(int(seconds / LOOK_S)):
            self.clock.now_s += LOOK_S
            self.poller.watch_yourself(wait=True)

    def read_all(self) -> None:
        self.poller.read_once(WAIT_S)


@pytest.fixture
def heard() -> Iterator[Heard]:
    made = Heard()
    yield made
    made.poller.close()


class Other:
    """Another source, which goes on: it is read once, since the test's clock passes minutes while a thread reads."""

    name, every_s = "other", 3600.0

    def read(self) -> Iterable[Reading]:
        yield Reading(source="other", name="other.value", value=1.0)

    def close(self) -> None:
        return


class Stuck:
    """A source whose next call does not return until it is let."""

    def __init__(self, source: Source) -> None:
        self.name, self.every_s = source.name, source.every_s
        self.within, self.go = threading.Event(), threading.Event()

    def read(self) -> Iterable[Reading]:
        self.within.set()
        self.go.wait(WAIT_S)
        yield Reading(source=self.name, name="some.value", value=1.0)

    def close(self) -> None:
        self.go.set()


@pytest.mark.parametrize("name", SOURCES)
def test_one_that_hangs(machine: dict[str, Source], heard: Heard, name: str) -> None:
    stuck = Stuck(machine[name])
    heard.poller.add([stuck, Other()])
    assert stuck.within.wait(WAIT_S)
    heard.look_for(GRACE_S - LOOK_S)
    assert not heard.said()
    heard.look_for(PROMISED_S - GRACE_S)
    assert heard.said() == [(stuck.name, True)]
    heard.read_all()  # the other is read by a new thread
    heard.look_for(60.0)
    assert heard.said() == [(stuck.name, True)]  # once
    given_up = [t for t in threading.enumerate() if t.name == "health" and t is not heard.poller._thread]
    stuck.go.set()
    for thread in given_up:
        thread.join(WAIT_S)
    heard.look_for(LOOK_S)
    assert heard.said() == [(stuck.name, True), (stuck.name, False)]


@pytest.mark.parametrize("name", SOURCES)
def test_one_that_is_refused(
    machine: dict[str, Source], heard: Heard, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernel, when it is asked next: a file that may not be read is no device that is gone."""
    source, may = machine[name], threading.Event()
    first = [r for r in source.read() if isinstance(r, Reading)]
    may.set()
    for call in ("open", "listdir"):
        ask = getattr(os, call)

        def refuse(path: Any = ".", *rest: Any, ask: Any = ask, **more: Any) -> Any:
            if may.is_set() and str(path).startswith(str(tmp_path)):
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return ask(path, *rest, **more)

        monkeypatch.setattr(os, call, refuse)
    if hasattr(source, "_due_s"):
        source._due_s = 0.0
    heard.poller.add([source])
    heard.read_all()
    assert heard.said() == [(source.name, True)]
    assert all(f.condition is Condition.UNKNOWN for f in heard.found)
    evidence = heard.found[0].evidence.lower()
    assert "permi" in evidence
    if name in ("Nvml", "Dcgm"):
        return  # they are refused from the beginning
    assert any(r.value is not None for r in first)


class Ends:
    """A source that takes its thread with it."""

    name, every_s = "ends", 15.0

    def __init__(self, how: type[BaseException]) -> None:
        self.how, self.read_again = how, threading.Event()

    def read(self) -> Iterable[Reading]:
        if not self.read_again.is_set():
            self.read_again.set()
            raise self.how
        return [Reading(source="ends", name="ends.value", value=1.0)]

    def close(self) -> None:
        return


@pytest.mark.parametrize("how", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_the_thread_of_all_ends(heard: Heard, how: type[BaseException]) -> None:
    heard.poller.add([Ends(how)])
    thread = heard.poller._thread
    assert thread is not None
    thread.join(WAIT_S)
    heard.look_for(LOOK_S)
    assert heard.said(WATCH_ENDED) == [("", True)]
    assert heard.poller._thread is not thread
    heard.read_all()
    heard.look_for(LOOK_S)
    assert heard.said(WATCH_ENDED) == [("", True), ("", False)]


def test_a_thread_that_is_gone_without_a_word(heard: Heard) -> None:
    heard.poller.add([Other()])
    heard.read_all()
    (gone := threading.Thread()).start()
    gone.join()
    before, heard.poller._thread = heard.poller._thread, gone
    assert before is not None
    heard.poller._nudge()
    before.join(WAIT_S)
    heard.look_for(LOOK_S)
    assert heard.said(WATCH_ENDED) == [("", True)]
    assert heard.poller._thread.is_alive()


def test_what_is_still_unwatched_is_said_again_when_another_is_back(heard: Heard) -> None:
    """The coordinator keeps what is unknown by the rule."""
    one, other = Stuck(Other()), Stuck(Other())
    one.name, other.name = "one", "other"
    heard.poller.add([one])
    assert one.within.wait(WAIT_S)
    heard.look_for(PROMISED_S)
    heard.poller.add([other])
    assert other.within.wait(WAIT_S)
    heard.look_for(PROMISED_S)
    assert heard.said() == [("one", True), ("other", True)]
    given_up = [t for t in threading.enumerate() if t.name == "health" and t is not heard.poller._thread]
    one.go.set()
    while any(p.source is one for p in heard.poller._hung):
        for thread in given_up:
            thread.join(0.01)
    heard.look_for(LOOK_S)
    assert heard.said()[2:] == [("one", False), ("other", True)]


# ---------------------------------------------------------------- threads and processes of a source's own


@pytest.mark.filterwarnings("ignore:Exception in thread nvml-events")
def test_the_thread_that_waits_for_xids() -> None:
    clock, within, go = Clock(), threading.Event(), threading.Event()

    def wait(events: object, limit_ms: int) -> None:
        within.set()
        go.wait(WAIT_S)
        raise ArithmeticError("a fault of the binding")

    library = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlEventSetCreate=lambda: object(),
        nvmlEventTypeXidCriticalError=1,
        nvmlDeviceRegisterEvents=lambda *given: None,
        nvmlEventSetWait_v2=wait,
    )
    events = XidEvents(library, clock)
    assert events.trouble() == ""
    events.start([SimpleNamespace(handle=None, pci="0000:05:00")])  # type: ignore[list-item]
    assert within.wait(WAIT_S)
    assert events.trouble() == ""
    clock.now_s += HANGS_S
    assert HANGS_S + LOOK_S < PROMISED_S
    assert "has not answered the wait for Xids for 8 s" in events.trouble()
    go.set()
    assert events._thread is not None
    events._thread.join(WAIT_S)
    assert events.trouble() == "the thread that waits for Xids has ended"
    events.close()
    assert events.trouble() == ""


def test_what_a_source_says_of_its_own_thread_is_told(heard: Heard) -> None:
    source = Other()
    source.trouble = lambda: "the thread that waits for Xids has ended"  # type: ignore[attr-defined]
    heard.poller.add([source])
    heard.read_all()
    heard.look_for(LOOK_S)
    assert heard.said() == [("other", True)]
    assert heard.found[-1].evidence == "other is not watched: the thread that waits for Xids has ended"


def test_journalctl_that_is_stopped_or_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "journalctl").write_text("#!/bin/sh\nexec sleep 1000\n")
    (tmp_path / "journalctl").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    journal = Journal()
    try:
        assert journal.trouble() == ""
        process: subprocess.Popen[bytes] = journal._process
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert journal.trouble() == "journalctl is stopped"
        process.kill()
        process.wait()
        assert journal.trouble() == "journalctl ended with exit code -9"
    finally:
        journal.close()


def test_a_look_and_the_grace_are_within_what_is_promised() -> None:
    assert source_poller.GRACE_S + source_poller.LOOK_S < PROMISED_S
