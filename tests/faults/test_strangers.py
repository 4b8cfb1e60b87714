"""What another user of the same machine can do to a job: nothing."""

import asyncio
import base64
import contextlib
import errno
import hashlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import snapshots_in_memory as snapshots
from harness import TINY, finish, start, wait_for
from stranger import NOBODY, as_stranger, needs_root, stranger

from holdfast.checkpoint import snapshot_server
from holdfast.checkpoint.memory import SlotPool, memory_base, remove_memory
from holdfast.checkpoint.replicate import Pull
from holdfast.engines import client
from holdfast.engines.agents import agent_arguments
from holdfast.engines.client import JobClient, NoAnswer
from holdfast.engines.jobs import JobFolder
from holdfast.engines.slurm.commands import SlurmCommands
from holdfast.engines.slurm.entry import ThisNode
from holdfast.engines.slurm.node import StandBy
from holdfast.errors import StateError, TierError
from holdfast.health.checks.basic import check_shm
from holdfast.health.checks.check import Task, attempt
from holdfast.protocol import messages as m
from holdfast.protocol.job import JobSpec
from holdfast.protocol.snapshots import Holder, Key
from holdfast.protocol.wire.frames import encode


def bind(port):
    """The error number with which the port is refused; 0 when it is had."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            sock.bind(("127.0.0.1", port))
            sock.listen()
        except OSError as error:
            return error.errno
    return 0


def coordinator_of(home):
    return json.loads((home / "jobs" / "job" / "coordinator.json").read_bytes())


@needs_root
def test_the_port_of_a_dead_coordinator_cannot_be_taken(tmp_path):
    """Whoever had it was shown the token, and could order the job's agents to start what he liked."""
    launcher = start(tmp_path, "--nnodes", 2, TINY, 1_000_000)
    wait_for(launcher, "generation 1")
    before = coordinator_of(tmp_path)
    dead = os.pidfd_open(before["pid"])
    launcher.send_signal(signal.SIGSTOP)  # nobody starts another meanwhile
    os.kill(before["pid"], signal.SIGKILL)
    assert select.select([dead], [], [], 10)[0]
    os.close(dead)
    refused = as_stranger(bind, before["port"])
    launcher.send_signal(signal.SIGCONT)
    wait_for(launcher, "starting it again", "training again")
    launcher.send_signal(signal.SIGINT)
    ran = finish(launcher, tmp_path)
    assert refused == errno.EADDRINUSE
    assert ran.report["outcome"] == "stopped", ran.output[-3000:]
    assert coordinator_of(tmp_path)["port"] == before["port"]


def head_of(connection):
    """What an HTTP request begins with."""
    head = b""
    while b"\r\n\r\n" not in head:
        if not (data := connection.recv(65536)):
            break
        head += data
    return head


def agree(connection, frame, told):
    """Answers as a coordinator would, WebSocket or page; orders something; passes on all that he hears."""
    head = head_of(connection)
    if key := re.search(rb"Sec-WebSocket-Key: (\S+)", head):
        accept = hashlib.sha1(key[1] + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()
        upgrade = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        said = upgrade + b"Sec-WebSocket-Accept: " + base64.b64encode(accept) + b"\r\n\r\n" + frame
    else:
        said = b'HTTP/1.1 200 OK\r\nContent-Length: 16\r\n\r\n{"running":true}'
    then = b""
    with contextlib.suppress(ConnectionError):
        connection.sendall(said)
        then = connection.recv(65536)  # a caller who believes him goes on, another closes
    told.send((head, then))


def listening(frame):
    """A deed: listens at a port, says which, and plays the coordinator for one connection after the other."""

    def listen(told):
        with socket.create_server(("127.0.0.1", 0)) as server:
            told.send(server.getsockname()[1])
            while True:
                with server.accept()[0] as connection:
                    agree(connection, frame, told)

    return listen


@pytest.fixture
def job(tmp_path, monkeypatch):
    """The folder of a job whose coordinator is dead."""
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    folder = JobFolder("job")
    folder.prepare(spec_of(tmp_path))
    yield folder
    folder.close()


def spec_of(tmp_path):
    return JobSpec(name="job", script=str(tmp_path / "theirs.py"), min_nodes=1, max_nodes=1)


def left_to(folder, port):
    """The dead coordinator's address, at which somebody else listens now."""
    where = {"host": "127.0.0.1", "port": port, "pid": 1, "instance": "dead"}
    (folder.path / "coordinator.json").write_text(json.dumps(where))
    return (folder.path / "token").read_text()


@needs_root
def test_an_agent_tells_a_stranger_nothing_and_obeys_no_order_of_his(job, tmp_path):
    came = tmp_path / "came"
    (tmp_path / "theirs.py").write_text(f"open({str(came)!r}, 'w')")
    order = encode(
        m.StartWorker(
            worker="w0",
            slot=0,
            script=str(tmp_path / "theirs.py"),
            args=(),
            module=False,
            cwd=str(tmp_path),
            env={},
        )
    )
    assert len(order) < 1 << 16
    frame = b"\x82\x7e" + len(order).to_bytes(2, "big") + order
    arguments = agent_arguments(job.path, "n0", "127.0.0.1", tmp_path / "memory")
    command = [sys.executable, "-m", "holdfast.agent", *arguments]
    with stranger(listening(frame)) as said:
        token = left_to(job, said.recv())
        agent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        heard = [said.recv() for _ in range(5)]
        agent.kill()
        output, _ = agent.communicate()
    for head, then in heard:
        assert head.startswith(b"GET /agent ")
        assert token.encode() not in head
        assert then == b"", "it went on talking with somebody who had not proven himself"
    assert output.count("has not proved") == 1, output
    assert not came.exists()


def snapshots_at(port):
    """What remains of an agent that served a snapshot at this port."""
    return Pull(key=Key(10, 1, 0, 1), holders=[Holder("n1", "127.0.0.1", port)], token="the-token")


@needs_root
def test_who_listens_at_a_dead_agents_port_is_told_nothing_and_gives_no_snapshot():
    with stranger(listening(b"")) as said:
        pull = snapshots_at(said.recv())
        with pytest.raises(StateError, match="the memory of n1 answered 200 and did not prove"):
            pull.head()
        head, _ = said.recv()
    assert head.startswith(b"GET /snapshots/10/1/0/1/head ")
    assert b"the-token" not in head


@needs_root
def test_nobody_waits_for_a_stranger_whose_answer_never_ends(monkeypatch):
    monkeypatch.setattr(snapshot_server, "STALL_S", 0.5)

    def listen(told):
        with socket.create_server(("127.0.0.1", 0)) as server:
            told.send(server.getsockname()[1])
            with server.accept()[0] as connection:
                head_of(connection)
                with contextlib.suppress(ConnectionError):
                    while True:
                        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")

    with stranger(listen) as said, pytest.raises(StateError, match="the memory of n1 does not answer"):
        snapshots_at(said.recv()).head()


@pytest.fixture
def shared_memory(monkeypatch):
    """A place like /dev/shm; HOLDFAST_MEMORY names it. (nobody may not look into pytest's folders.)"""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o1777)
        monkeypatch.setenv("HOLDFAST_MEMORY", folder)
        yield Path(folder)


SQUATS = {
    "a folder": lambda path: path.mkdir(mode=0o755),
    "one that all may write to": lambda path: (path.mkdir(), path.chmod(0o777)),
    "a link": lambda path: path.symlink_to("/tmp"),
    "a file": lambda path: path.touch(),
}


@needs_root
@pytest.mark.parametrize("squat", SQUATS.values(), ids=SQUATS.keys())
def test_snapshots_are_kept_where_another_user_took_the_folders_name(shared_memory, squat):
    squat(shared_memory / f"holdfast-{NOBODY}")

    def save():
        """An agent has its memory; it and its job are killed."""
        folder = memory_base()
        pool = SlotPool(folder / "home" / "job" / "n0", 1 << 20)
        snapshots.save(pool, snapshots.key_of(10), 1000)
        return str(folder)

    def find():
        """The next start of the job."""
        folder = memory_base()
        pool = SlotPool(folder / "home" / "job" / "n0", 1 << 20)
        steps = snapshots.steps_of(pool)
        remove_memory(pool.folder)
        return str(folder), steps

    def basic_check():
        return [str(r.condition) for r in check_shm(memory_base() / "home" / "job" / "n0")]

    folder = as_stranger(save)
    kind = os.stat(folder)
    assert (kind.st_uid, kind.st_mode & 0o777) == (NOBODY, 0o700)
    assert as_stranger(find) == (folder, [10])
    assert as_stranger(basic_check) == ["healthy"]


@needs_root
@pytest.mark.parametrize("mode", [0o755, 0o777])
def test_memory_in_a_folder_of_somebody_elses_is_refused_and_is_not_the_nodes_fault(shared_memory, mode):
    """HOLDFAST_MEMORY names it: who owns it could exchange what is in it. The job goes on without snapshots."""
    shared_memory.chmod(mode)

    def make():
        try:
            SlotPool(memory_base() / "home" / "job" / "n0", 1 << 20)
        except TierError as error:
            return str(error)
        return "it was made"

    def basic_check():
        return [str(r.condition) for r in attempt("shm", lambda task: check_shm(memory_base()), Task())]

    assert "set HOLDFAST_MEMORY" in as_stranger(make)
    assert as_stranger(basic_check) != ["faulty"]


@needs_root
def test_commands_tell_a_stranger_nothing_and_believe_nothing_of_his(job, monkeypatch):
    monkeypatch.setattr(client, "PATIENCE_S", 0.5)

    async def ask():
        async with JobClient(job.path) as asking:
            await asking.get("/status")

    with stranger(listening(b"")) as said:
        token = left_to(job, said.recv())
        with pytest.raises(NoAnswer, match="has not proved that it is the job's coordinator"):
            asyncio.run(ask())
        head, _ = said.recv()
    assert head.startswith(b"GET /status ")
    assert token.encode() not in head


@needs_root
def test_a_stranger_is_not_the_coordinator_whose_presence_slurms_nodes_watch(job, tmp_path):
    standing_by = StandBy(spec_of(tmp_path), job.path, ThisNode("n0", "127.0.0.1", "7", 0), SlurmCommands())

    async def present():
        async with asyncio.timeout(10):
            return await standing_by._present()

    with stranger(listening(b"")) as said:
        token = left_to(job, said.recv())
        assert not asyncio.run(present())
        head, _ = said.recv()
    assert head.startswith(b"GET /presence ")
    assert token.encode() not in head
