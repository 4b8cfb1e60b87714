"""Another user of the machine connects and says nothing, thousands of times, to servers that may open 1,024 files."""

import asyncio
import contextlib
import os
import resource
import select
import socket
import subprocess
import sys
import threading

import pytest
import snapshots_in_memory as snapshots
from stranger import needs_root, stranger

from holdfast.checkpoint.memory import SlotPool
from holdfast.checkpoint.replicate import Pull, replicate
from holdfast.checkpoint.snapshot_server import SnapshotServer
from holdfast.engines.agents import agent_arguments
from holdfast.engines.client import JobClient
from holdfast.engines.jobs import JobFolder
from holdfast.protocol.job import JobSpec
from holdfast.protocol.network.listener import BACKLOG
from holdfast.protocol.snapshots import Holder

DESCRIPTORS = 1024
FLOOD = 3000


def flooding(port, first=b""):
    """A deed: holds as many connections as he can, tells when he has them, and makes those anew that are closed."""

    def flood(told):
        held, closing = {}, select.poll()

        def one_more():
            connection = socket.socket()
            connection.settimeout(5)
            with contextlib.suppress(OSError):
                connection.connect(("127.0.0.1", port))
                connection.sendall(first)
            held[connection.fileno()] = connection
            closing.register(connection, select.POLLIN)

        for _ in range(FLOOD):
            one_more()
        told.send(len(held))
        while True:
            for fd, _ in closing.poll():
                closing.unregister(fd)
                held.pop(fd).close()
                one_more()

    return flood


@pytest.fixture
def few_files():
    """This process and those that it starts may open 1,024 files; strangers as many as they like."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, before[1]))
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def rich(deed, limit):
    def with_files(told):
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        deed(told)

    return with_files


@needs_root
@pytest.mark.parametrize(
    "first", [b"", b"GET /status HTTP/1.1\r\nX: "], ids=["silent", "in the middle of a head"]
)
def test_a_coordinator_serves_its_job_through_a_flood(tmp_path, monkeypatch, few_files, first):
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    spec = JobSpec(name="job", script=str(tmp_path / "train.py"), min_nodes=2, max_nodes=2, preload=("json",))
    folder = JobFolder("job")
    folder.prepare(spec)
    listening = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
    ends, begins = os.pipe()
    passed = [f"--job-dir={folder.path}", f"--listen-fd={listening.fileno()}", f"--lifeline={ends}"]
    output = tmp_path / "output"
    with output.open("w") as out:
        coordinator = subprocess.Popen(
            [sys.executable, "-m", "holdfast.coordinator", *passed],
            pass_fds=(folder.lock, listening.fileno(), ends),
            stdout=out,
            stderr=out,
            # Nothing can raise it: the limit itself has to be lived with.
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS)),
        )
    arguments = agent_arguments(folder.path, "n0", "127.0.0.1", tmp_path / "memory")
    agent = None
    try:
        with stranger(rich(flooding(listening.getsockname()[1], first), few_files)) as said:
            listening.close()
            said.recv()
            agent = subprocess.Popen(
                [sys.executable, "-m", "holdfast.agent", *arguments], stdout=subprocess.DEVNULL
            )
            assert asyncio.run(first_to_join()) == "n0"
    finally:
        for process in (coordinator, agent):
            if process is not None:
                process.kill()
                process.wait()
        folder.close()
        os.close(ends)
        os.close(begins)
    assert len(output.read_text().splitlines()) < 10


async def first_to_join():
    """The job's status is told, too, and who joins."""
    async with asyncio.timeout(60), JobClient(JobFolder("job", here=False).path) as client:
        assert (await client.get("/status"))["job"] == "job"
        async for said in client.watch():
            if said.kind == "event" and said.value["kind"] == "node-joined":
                return said.value["fields"]["node"]
    raise AssertionError("the job ended")


@needs_root
@pytest.mark.parametrize(
    "first", [b"", b"GET /snapshots HTTP/1.1\r\nX: "], ids=["silent", "in the middle of a head"]
)
def test_an_agent_gives_snapshots_through_a_flood(few_files, capfd, first):
    pools = [SlotPool(snapshots.new_folder(), snapshots.BUDGET * 2) for _ in range(2)]
    part = snapshots.part_of(snapshots.save(pools[0], snapshots.key_of(10), 100_000))
    server = SnapshotServer(pools[0], "127.0.0.1", "the-token")
    holder = Holder("a", "127.0.0.1", server.port, server.name)
    threads = threading.active_count()
    try:
        with stranger(rich(flooding(server.port, first), few_files)) as said:
            said.recv()
            assert threading.active_count() <= threads + 2
            slot = replicate(
                pools[1], Pull(key=snapshots.key_of(10), holders=[holder], token="the-token"), part
            )
            assert snapshots.is_right(slot, 100_000)
    finally:
        server.close()
        for pool in pools:
            pool.close()
    assert len("".join(capfd.readouterr()).splitlines()) < 10
