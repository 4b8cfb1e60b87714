"""Jobs that share a history of machines: what one job found out about a node holds in the next, until it is cleared."""

from __future__ import annotations

import asyncio
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from harness import TINY, Ran, finish, start, wait_for

from holdfast.agent.simulated_sources import append_kernel_lines, xid_line
from holdfast.coordinator.kernel.history import MachineStanding, standing
from holdfast.coordinator.service.history_store import FILE_NAME, HistoryStore, now_s
from holdfast.engines.client import JobClient

ENDLESS = 1_000_000
"""Steps: these jobs are stopped when they have shown what is looked at."""

GONE = 79
APPLICATION = (13, 31, 39)
"""Xids: of a GPU that is lost, and those for which the worker is started again; the third one of the same asks for more."""

WAIT_S = 200
"""For what takes two seconds."""

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(autouse=True)
def known_machine(monkeypatch):
    """In a container nobody would know a local node again."""
    monkeypatch.setenv("HOLDFAST_NODE_IDENTITY", "test:machine")


class Job:
    """One job, from its start to its stop. What it is to show is waited for in its ledger."""

    def __init__(self, home: Path, name: str, *args: object) -> None:
        self.home, self.name, self.dir = home, name, home / "jobs" / name
        self._process = start(home, *args, TINY, ENDLESS, "--device-s", 0.005, job=name)
        wait_for(self._process, "waiting for nodes")  # its folder is there

    def event(self, kind: str, **fields: object) -> dict[str, Any]:
        """Waits for the first such event, if it is not there yet; its fields."""
        return self._until(kind, lambda told: all(told.get(key) == value for key, value in fields.items()))

    def _until(self, kind: str, fits: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        return asyncio.run(self._heard(kind, fits))

    async def _heard(self, kind: str, fits: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        async with JobClient(self.dir) as client, asyncio.timeout(WAIT_S):
            async for said in client.watch():
                if said.kind == "event" and said.value["kind"] == kind and fits(said.value["fields"]):
                    return said.value["fields"]
        raise AssertionError(f"{self.name} ended without the {kind} that was waited for")

    def members(self, generation: int = 1) -> set[str]:
        """The nodes of that generation."""
        return nodes(self.event("formed", generation=generation))

    def trains_on(self, node: str) -> None:
        """Waits until it trains on this node alone."""
        self._until("formed", lambda told: nodes(told) == {node})

    def has_xid(self, node: str, code: int) -> None:
        """The kernel of a node says that."""
        append_kernel_lines(self.dir / "nodes" / node / "kmsg", (xid_line(code),))

    def stop(self) -> Ran:
        asyncio.run(self._post("/stop?reason=test"))
        ran = finish(self._process, self.home, job=self.name)
        assert ran.report["outcome"] == "stopped", ran.output[-3000:]
        return ran

    async def _post(self, page: str) -> None:
        async with JobClient(self.dir) as client:
            await client.post(page)


def nodes(formed: dict[str, Any]) -> set[str]:
    """Of a generation's workers."""
    return {worker.partition(".")[0] for worker in formed["workers"]}


def holdfast(home: Path, *args: str) -> str:
    env = os.environ | {"HOLDFAST_HOME": str(home)}
    command = [sys.executable, "-m", "holdfast.cli", *args]
    return subprocess.run(command, env=env, check=True, capture_output=True, text=True, timeout=100).stdout


def known(home: Path, node: str, file: str = FILE_NAME) -> MachineStanding:
    """What follows for a node from what is remembered."""
    history = HistoryStore(str(home / file), must_exist=True)
    try:
        mine = [entry for entry in history.all() if entry.node == node]
    finally:
        history.close()
    assert len({entry.machine for entry in mine}) == 1
    return standing([entry.remembered(now_s()) for entry in mine])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The jobs' deep checks take turns through a file there, and with nobody else's."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


@contextmanager
def no_turn(home: Path) -> Iterator[None]:
    """Deep checks wait, as they do for another node of the same machine."""
    with (home / f"holdfast-checks-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def lose(home: Path, name: str, *options: object) -> str:
    """A job in which a node's GPU is lost; the node."""
    job = Job(home, name, "--nnodes", 1, "--spares", 1, *options)
    (sick,) = job.members()
    job.has_xid(sick, GONE)
    assert job.event("verdict", node=sick)["does"] == "replace"
    assert sick not in job.members(generation=2)
    job.stop()
    return sick


@pytest.mark.long
def test_a_machine_that_was_given_up_is_not_used_by_the_next_job_until_a_person_clears_it(folder):
    sick = lose(folder, "first")
    assert "fallen off the bus" in known(folder, sick).quarantine
    with no_turn(folder):
        second = Job(folder, "second", "--nnodes", 1, "--spares", 1)
        assert "fallen off the bus" in second.event("node-held", node=sick)["reason"]
        assert sick not in second.members()
        assert "also in second" in holdfast(folder, "node", "clear", sick)
        assert second.event("readmitted", node=sick)["was"] == "cleared by a person"
        second.stop()
    assert known(folder, sick) == MachineStanding()


@pytest.mark.nightly
def test_a_job_whose_history_is_out_of_reach_is_told_and_remembers(folder):
    """As on Kubernetes, where it is with the coordinator."""
    elsewhere = ("--node-history", folder / "elsewhere.sqlite")
    sick = lose(folder, "first", *elsewhere)
    with no_turn(folder):
        second = Job(folder, "second", "--nnodes", 1, "--spares", 1, *elsewhere)
        second.event("node-held", node=sick)
        assert holdfast(folder, "node", "clear", sick).endswith("is cleared in second\n")
        assert second.event("readmitted", node=sick)["was"] == "cleared by a person"
        second.stop()
    assert known(folder, sick, "elsewhere.sqlite") == MachineStanding()


@pytest.mark.nightly
def test_deep_checks_let_a_machine_in_again_for_all_later_jobs(folder):
    sick = lose(folder, "first")
    second = Job(folder, "second", "--nnodes", 2)
    second.event("node-held", node=sick)
    assert "cpu-bits" in second.event("readmitted", node=sick)["checks"]
    second.stop()
    assert not known(folder, sick).quarantine
    third = Job(folder, "third", "--nnodes", 2)
    assert third.members() == {"node0", "node1"}
    assert third.stop().fields("node-held") == []


@pytest.mark.nightly
def test_a_lemon_is_the_last_to_be_used_until_a_person_clears_it(folder):
    for code in APPLICATION:
        job = Job(folder, f"xid{code}", "--nnodes", 1)
        job.members()
        job.has_xid("node0", code)
        assert job.event("verdict", node="node0")["does"] == "restart-worker"
        job.members(generation=2)
        job.stop()
    assert known(folder, "node0").lemon == "3 incidents in 3 jobs within 30 days"
    job = Job(folder, "next", "--nnodes", 1, "--spares", 1)
    assert "3 incidents" in job.event("lemon", node="node0")["reason"]
    if job.members() == {"node0"}:  # it was there first
        assert "node1" in job.event("lemon-leaves", node="node0")["instead"]
        job.trains_on("node1")
    job.stop()
    holdfast(folder, "node", "clear", "node0")
    job = Job(folder, "last", "--nnodes", 1)
    assert job.members() == {"node0"}
    assert job.stop().fields("lemon") == []


@pytest.mark.nightly
def test_a_rule_that_was_wrong_twice_about_a_machine_is_on_trial_there_in_the_next_job(folder):
    sick = lose(folder, "first")
    for _ in range(2):
        told = holdfast(folder, "node", "clear", sick, "--false-positive", f"xid-{GONE}")
    assert "from now on the rule is on trial there" in told
    second = Job(folder, "second", "--nnodes", 2)
    assert second.members() == {"node0", "node1"}
    second.has_xid(sick, GONE)
    verdict = second.event("verdict", node=sick)
    assert (verdict["does"], verdict["would"], verdict["against"]) == ("watch", "replace", "trial")
    ran = second.stop()
    assert ran.report["incidents"] == []
    assert ran.fields("node-held") == []


@pytest.mark.nightly
def test_jobs_that_run_at_the_same_time_write_one_history(folder):
    shared = ("--nnodes", 1, "--spares", 1, "--node-history", folder / FILE_NAME)
    jobs = []
    for name in ("one", "two"):
        (folder / name).mkdir()
        jobs.append(Job(folder / name, name, *shared))
    sick = [next(iter(job.members())) for job in jobs]
    for job, node in zip(jobs, sick, strict=True):
        job.has_xid(node, GONE)
    for job, node in zip(jobs, sick, strict=True):
        assert job.event("verdict", node=node)["does"] == "replace"
        assert node not in job.members(generation=2)
    for job, node in zip(jobs, sick, strict=True):
        assert job.stop().fields("history") == []  # no trouble with it
        assert known(folder, node).quarantine
        assert job.name in holdfast(folder, "node", "show", node)
