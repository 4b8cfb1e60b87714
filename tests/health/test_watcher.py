"""The watcher of a node: lines that are written are found, rules change at run time, what hangs or may not be read is
unknown, and faults are seen by the sources that look at a real machine."""

import asyncio
import errno
import os
import threading

import pytest

from holdfast.agent import health, simulated_sources, source_poller
from holdfast.agent.health import HealthWatcher
from holdfast.health.kmsg import Kmsg
from holdfast.health.machine import machine_sources
from holdfast.health.rule_engine import RuleEngine
from holdfast.health.ruleset import catalogue
from holdfast.health.samples import LogLine, Reading
from holdfast.health.sources import MachineRoot
from holdfast.protocol.faults import ArmedFault, FaultKind
from holdfast.protocol.health import Condition, Remedy, Severity
from holdfast.protocol.job_options import HealthSpec

OFF_THE_BUS = "NVRM: Xid (PCI:0000:05:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
WITHIN_S = 20.0


class Node:
    """A watcher on a folder of the test's, with no other sources than the test's."""

    def __init__(self, tmp_path, spec):
        self.folder = tmp_path / "node0"
        self.told: asyncio.Queue = asyncio.Queue()
        self.watcher = HealthWatcher(self.folder, spec, False, self._hear, tmp_path)

    def _hear(self, message):
        for finding in message.findings:
            self.told.put_nowait(finding)

    async def hears(self, rule):
        async with asyncio.timeout(WITHIN_S):
            while (finding := await self.told.get()).rule != rule:
                pass
        return finding

    def says(self, *lines):
        simulated_sources.append_kernel_lines(self.folder / "kmsg", lines)


@pytest.fixture
def on_a_node(tmp_path, monkeypatch):
    """Runs a test's coroutine with a node whose kernel says nothing."""

    def kernel(left):
        raise OSError(errno.EPERM, "/dev/kmsg: Operation not permitted; journal: there is no journalctl")

    monkeypatch.setattr(health, "open_kernel_log", kernel)
    monkeypatch.setattr(health, "in_container", lambda root, environ: False)
    monkeypatch.setattr(
        health, "machine_sources", lambda machine: machine_sources(machine) if machine.stand_in else []
    )

    def run(test, **spec):
        async def main():
            node = Node(tmp_path, HealthSpec(**spec))
            await node.watcher.start()
            try:
                await test(node)
            finally:
                node.watcher.close()

        asyncio.run(main())

    return run


def test_a_line_of_the_kernel(on_a_node):
    async def test(node):
        node.says("something else", OFF_THE_BUS)
        finding = await node.hears("xid-79")
        assert finding.evidence == OFF_THE_BUS
        assert not finding.shared
        assert finding.age_s < WITHIN_S

    on_a_node(test)


def test_a_log_that_may_not_be_read_is_said_once_and_the_rest_goes_on(on_a_node):
    async def test(node):
        finding = await node.hears("kmsg-unreadable")
        assert finding.condition is Condition.UNKNOWN
        assert finding.severity is Severity.WARNING
        assert "Operation not permitted" in finding.evidence
        node.says(OFF_THE_BUS)
        assert (await node.hears("xid-79")).remedy is Remedy.REPLACE
        assert node.told.empty()

    on_a_node(test)


def test_in_a_container_a_log_that_may_not_be_read_is_no_warning(on_a_node, monkeypatch):
    monkeypatch.setattr(health, "in_container", lambda root, environ: True)

    async def test(node):
        assert (await node.hears("kmsg-unreadable")).severity is Severity.INFO

    on_a_node(test)


def test_of_the_nodes_of_one_machine_one_says_it_for_all(tmp_path, monkeypatch):
    def kernel(left):
        raise OSError(errno.EPERM, "/dev/kmsg: Operation not permitted")

    monkeypatch.setattr(health, "open_kernel_log", kernel)
    monkeypatch.setattr(health, "machine_sources", lambda machine: [])
    told = []

    async def main():
        for name in ("node0", "node1", "node2"):
            watcher = HealthWatcher(tmp_path / "nodes" / name, HealthSpec(), True, told.append, tmp_path)
            await watcher.start()
            watcher.close()

    asyncio.run(main())
    assert [f.rule for message in told for f in message.findings] == ["kmsg-unreadable"]


def test_nobody_looks_when_nobody_is_to(on_a_node):
    async def test(node):
        assert not node.folder.exists()
        assert node.told.empty()

    on_a_node(test, watch=False)


def test_rules_change_while_it_runs_and_an_error_changes_nothing(on_a_node, tmp_path):
    path = tmp_path / "rules" / "ours.toml"
    path.parent.mkdir()
    rule = '[[rule]]\nid = "ours"\nsource = "kmsg"\npattern = "{}"\nseverity = "error"\nremedy = "reboot"\n'
    path.write_text(rule.format("^it is wedged"))

    async def test(node):
        node.says("it is wedged")
        assert (await node.hears("ours")).remedy is Remedy.REBOOT
        path.write_text(rule.format("^stuck(") + "count = 1\n")
        finding = await node.hears("rules-unreadable")
        assert "ours.toml, line 4" in finding.evidence
        assert "the old rules stay in force" in finding.evidence
        node.says(OFF_THE_BUS)
        await node.hears("xid-79")
        work = path.with_name("other")  # as editors write
        work.write_text(rule.format("^it is .*stuck").replace('"ours"', '"new"'))
        work.replace(path)
        await node.hears("rules-changed")
        node.says("it is wedged, and stuck")
        assert (await node.hears("new")).evidence == "it is wedged, and stuck"
        assert node.told.empty()

    on_a_node(test, rules=(str(path),))


def test_rules_that_are_wrong_from_the_start_leave_the_catalogue_and_what_is_on_trial(on_a_node, tmp_path):
    path = tmp_path / "ours.toml"
    path.write_text("[[rule]\n")

    async def test(node):
        await node.hears("rules-unreadable")
        node.says(OFF_THE_BUS)
        assert (await node.hears("xid-79")).dry_run

    on_a_node(test, rules=(str(path),), dry_run=("xid-*", "ours"))


def test_a_disk_that_is_full_stops_nobody_from_listening(tmp_path):
    """Where the kernel's log was left is written down as it is read."""

    class Device(Kmsg):
        def __init__(self):
            self._left, self._boot, self._after, self.overrun = tmp_path / "nowhere" / "left", "b", None, 0
            self.records = [b"3,1,1,-;one", b"3,2,1,-;two"]

        def _read(self):
            if not self.records:
                raise BlockingIOError
            return self.records.pop(0)

    assert [line.text for line in Device().lines()] == ["one", "two"]


def test_rules_on_trial(on_a_node):
    async def test(node):
        node.says(OFF_THE_BUS)
        assert (await node.hears("xid-79")).dry_run

    on_a_node(test, dry_run=("*",))


LOG_RULES = """
[[rule]]
id = "bad-memory"
source = "log"
pattern = "uncorrectable ECC error"
fault_on_match = true

[[rule]]
id = "never-began"
source = "log"
pattern = "step 0"
start_within = 0.05
"""


def test_workers_logs(on_a_node, tmp_path):
    rules = tmp_path / "rules.toml"
    rules.write_text(LOG_RULES)
    log = tmp_path / "worker.log"
    log.write_text("an old uncorrectable ECC error\n")

    async def test(node):
        node.watcher.trains("w0", 0, log)
        finding = await node.hears("never-began")
        assert finding.worker == "w0"
        with log.open("a") as file:
            file.write("RuntimeError: CUDA error: uncorrectable ECC error encountered\n")
        finding = await node.hears("bad-memory")
        assert (finding.worker, finding.remedy) == ("w0", Remedy.RESTART_WORKER)
        node.watcher.gone("w0")

    on_a_node(test, rules=(str(rules),))


class Scripted:
    """A source that says what it is told to, and hangs when it is told to."""

    name = "driver"
    every_s = 0.02

    def __init__(self):
        self.hang = threading.Event()
        self.go = threading.Event()
        self.closed = False

    def read(self):
        if self.hang.is_set():
            self.go.wait(WITHIN_S)
        yield Reading(source="driver", name="driver.value", value=1.0)
        yield LogLine("kmsg", OFF_THE_BUS)

    def close(self):
        self.closed = True


def test_a_driver_that_hangs_is_unknown_and_holds_nobody_up(on_a_node, tmp_path, monkeypatch):
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rule]]\nid = "source-silent"\nholds = 0\n')
    monkeypatch.setattr(source_poller, "GRACE_S", 0.05)
    monkeypatch.setattr(health, "LOOK_S", 0.02)
    hung, other = Scripted(), Scripted()
    other.name = "other"
    monkeypatch.setattr(health, "machine_sources", lambda machine: [hung, other])

    async def test(node):
        await node.hears("xid-79")
        hung.hang.set()
        finding = await node.hears("source-silent")
        assert finding.condition is Condition.UNKNOWN
        assert "driver" in finding.evidence
        hung.hang.clear()
        hung.go.set()
        assert (await node.hears("source-silent")).condition is Condition.HEALTHY

    on_a_node(test, rules=(str(rules),))
    assert other.closed


def test_a_source_that_breaks_is_unknown(on_a_node, tmp_path, monkeypatch):
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rule]]\nid = "source-silent"\nholds = 0\n')

    class Broken(Scripted):
        def read(self):
            raise KeyError("no such thing")

    monkeypatch.setattr(health, "machine_sources", lambda machine: [Broken()])

    async def test(node):
        assert "KeyError" in (await node.hears("source-silent")).evidence

    on_a_node(test, rules=(str(rules),))


def test_a_watch_that_ended_is_said_and_begun_again(on_a_node, tmp_path, monkeypatch):
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rule]]\nid = "source-silent"\nholds = 0\n')
    monkeypatch.setattr(source_poller, "GRACE_S", 0.05)
    monkeypatch.setattr(health, "LOOK_S", 0.02)
    sick = threading.Event()

    class Sick(Scripted):
        @property
        def every_s(self):
            if sick.is_set() and threading.current_thread().name == "health":
                raise ArithmeticError("no such period")
            return 0.02

    monkeypatch.setattr(health, "machine_sources", lambda machine: [Sick()])

    async def test(node):
        await node.hears("xid-79")
        sick.set()
        silent, ended = await node.hears("source-silent"), await node.hears("watch-ended")
        assert silent.condition is ended.condition is Condition.UNKNOWN
        assert "ArithmeticError: no such period" in ended.evidence
        assert "ArithmeticError" in silent.evidence
        sick.clear()
        heard = [await node.hears("watch-ended")]
        assert heard[0].condition is Condition.HEALTHY
        assert node.watcher._pollers[0]._thread.is_alive()

    on_a_node(test, rules=(str(rules),))


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
@pytest.mark.parametrize("nice", [0, 15])
def test_the_machine_is_read_in_an_agent_that_was_started_under_nice(nice, tmp_path):
    """As another user, who may not give his threads a better priority than they have."""
    answer, child_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setpriority(os.PRIO_PROCESS, 0, nice)
            os.setuid(65534)
            seen = threading.Event()

            class Once(Scripted):
                def read(self):
                    os.write(child_end, b"%d" % os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
                    seen.set()
                    return []

            source_poller.Poller((), lambda findings: None).add([Once()])
            seen.wait(WITHIN_S)
        finally:
            os._exit(0)
    os.close(child_end)
    try:
        with os.fdopen(answer) as said:
            assert said.read(2) == f"{max(nice, source_poller.NICE)}"
    finally:
        os.waitpid(pid, 0)


@pytest.mark.parametrize(
    ("fault", "rule", "remedy"),
    [
        (ArmedFault(id="f", kind=FaultKind.XID, code=79), "xid-79", Remedy.REPLACE),
        (ArmedFault(id="f", kind=FaultKind.XID, code=48), "xid-48", Remedy.RESET_DEVICE),
        (ArmedFault(id="f", kind=FaultKind.XID, code=149), "xid-149", Remedy.RESET_DEVICE),
        (ArmedFault(id="f", kind=FaultKind.XID, code=154), "xid-154-2", Remedy.REBOOT),
        (ArmedFault(id="f", kind=FaultKind.XID, code=63), "xid-63", Remedy.WATCH),
        (ArmedFault(id="f", kind=FaultKind.XID, code=200), "xid-unknown", Remedy.ASK),
        (ArmedFault(id="f", kind=FaultKind.ECC), "memory-ue", Remedy.REPLACE),
        (ArmedFault(id="f", kind=FaultKind.READONLY_FS), "filesystem-read-only", Remedy.REPLACE),
    ],
)
def test_faults_of_a_machine(fault, rule, remedy, on_a_node):
    async def test(node):
        await simulated_sources.strike(node.watcher, fault)
        assert (await node.hears(rule)).remedy is remedy

    on_a_node(test)


@pytest.mark.parametrize(("kind", "rule"), [(FaultKind.ECC, "edac-ue"), (FaultKind.LINK_DOWN, "rdma-down")])
def test_the_sources_of_a_real_machine_see_it_in_the_stand_in(kind, rule, tmp_path):
    """Read by hand, for their periods are long."""
    machine = MachineRoot(tmp_path / "machine")
    simulated_sources.write_files(machine.root, simulated_sources.HEALTHY)
    engine = RuleEngine(catalogue())
    sources = machine_sources(machine)

    def read(at):
        readings = [said for source in sources for said in source.read()]
        return [f.rule for r in readings if isinstance(r, Reading) for f in engine.on_reading(r, at)]

    try:
        assert read(0.0) == []
        simulated_sources.write_files(machine.root, simulated_sources.BROKEN[kind])
        found = [rule for at in (10.0, 20.0, 31.0) for rule in read(at)]
        assert rule in found
    finally:
        for source in sources:
            source.close()
