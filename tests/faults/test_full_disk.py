"""The disk of a running job's folder becomes full: a real file system, the real launcher, and real workers."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from harness import TINY, finish, start, wait_for

from holdfast.coordinator.service.store import Store
from holdfast.engines.client import JobClient
from holdfast.protocol.network.endpoint import read_endpoint

STEPS = 150
ROOM = "size=2g"


class Disk:
    """A file system with as much room as a test says."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def mount(self) -> bool:
        command = ["mount", "-t", "tmpfs", "-o", ROOM, "tmpfs", str(self.path)]
        return subprocess.run(command, capture_output=True).returncode == 0

    def fill(self) -> None:
        """There is no room for another byte."""
        for _ in range(100):
            now = os.statvfs(self.path)
            with suppress(subprocess.CalledProcessError):  # more was written meanwhile
                self._resize(f"size={(now.f_blocks - now.f_bfree) * now.f_bsize}")
                return
        raise AssertionError("it grows all the time")

    def make_room(self) -> None:
        self._resize(ROOM)

    def _resize(self, size: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{size}", str(self.path)], check=True, capture_output=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """That of the folder of jobs."""
    there = Disk(tmp_path / "jobs")
    there.path.mkdir()
    if os.getuid() != 0 or not there.mount():
        pytest.skip("needs root, to mount a file system")
    yield there
    subprocess.run(["umount", "-l", str(there.path)], check=True)


async def reaches(job_dir: Path, step: int) -> None:
    """Returns when the job has committed so many steps."""
    async with asyncio.timeout(60), JobClient(job_dir) as client:
        async for said in client.watch():
            if said.kind == "status" and said.value.step >= step:
                return


async def step_of(job_dir: Path) -> int:
    async with JobClient(job_dir) as client:
        return (await client.get("/status"))["step"]


def pid_of_rank(job_dir: Path, rank: int) -> int:
    """Of the first generation. The file can be read, full as its disk is."""
    with closing(Store(job_dir / "job.sqlite", read_only=True)) as store:
        events = list(store.events())
    worker = next(x.fields["workers"] for x in events if x.kind == "formed")[rank]
    return next(x.fields["pid"] for x in events if x.fields.get("worker") == worker and "pid" in x.fields)


@pytest.mark.nightly
def test_a_full_disk_costs_no_step_and_no_node(tmp_path, disk, undisturbed):
    job_dir = disk.path / "job"
    process = start(tmp_path, "--nnodes", 3, "--spares", 1, TINY, STEPS, "--device-s", 0.02)
    wait_for(process, "generation 1:")
    asyncio.run(reaches(job_dir, 20))
    disk.fill()
    wait_for(process, "the ledger cannot be written")
    before = asyncio.run(step_of(job_dir))
    asyncio.run(reaches(job_dir, before + 20))  # training goes on
    os.kill(pid_of_rank(job_dir, 1), signal.SIGKILL)  # what is done about it has to be written first
    disk.make_room()
    ran = finish(process, tmp_path)
    assert ran.code == 0, ran.output[-3000:]
    assert ran.losses() == undisturbed.losses()
    assert ran.steps() == list(range(STEPS))
    assert ran.report["final"] == undisturbed.report["final"]
    assert ran.report["steps"]["lost"] == 0
    assert [i["cause"] for i in ran.report["incidents"]] == ["killed by signal 9 (SIGKILL)"]
    kinds = ran.kinds()
    assert (kinds.count("ledger-failed"), kinds.count("ledger-back")) == (1, 1)
    assert "the ledger can be written again" in ran.output


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "handing over"])
def test_a_coordinator_that_is_replaced_while_the_disk_is_full(tmp_path, disk, number):
    """The next one starts without room, and decides as soon as there is some. Nothing that trains ends meanwhile."""
    job_dir = disk.path / "job"
    process = start(tmp_path, "--nnodes", 3, "--spares", 1, TINY, 1_000_000, "--device-s", 0.02)
    wait_for(process, "generation 1:")
    asyncio.run(reaches(job_dir, 20))
    pid = read_endpoint(job_dir).pid
    disk.fill()
    os.kill(pid, number)
    wait_for(process, "the address cannot be written")
    assert read_endpoint(job_dir).pid == pid  # the file is that of the one before, and good for this one
    before = asyncio.run(step_of(job_dir))
    disk.make_room()
    wait_for(process, "the address could be written")
    assert read_endpoint(job_dir).pid != pid
    asyncio.run(reaches(job_dir, before + 20))
    process.send_signal(signal.SIGINT)
    ran = finish(process, tmp_path)
    assert (ran.code, ran.report["outcome"]) == (75, "stopped"), ran.output[-3000:]
    assert ran.report["steps"]["committed"] >= before + 20
    assert ran.report["steps"]["lost"] == 0
    # Also of one that handed over: there was no room for the line that says so.
    assert [i["cause"] for i in ran.report["incidents"]] == ["the coordinator was lost"]
