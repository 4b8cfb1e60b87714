"""Strangers on every port of every worker, and one worker is killed: recovery takes what it takes, and nobody else is ended."""

import asyncio
import contextlib
import encodings.idna  # noqa: F401 - another user cannot import it any more
import os
import random
import re
import resource
import select
import signal
import socket
import struct
from pathlib import Path

import msgspec
from harness import TINY, finish, leftovers, start, wait_for
from stranger import needs_root, stranger

from holdfast.engines.client import JobClient
from holdfast.protocol.network.sockets import MOST_DESCRIPTORS

WORKER = re.compile(r"\S*python\S* -u \S")
"""Begins the command line of a worker, which is the script's."""
SILENT, TRICKLING = 20, 5
"""Connections that are held to every port."""


def workers(home):
    """The workers of a job's nodes, and where each listens, in the order in which it began: for the mesh, with its state,
    and, a member of the generation, for gloo."""
    named = [pid for pid, command in leftovers(home).items() if WORKER.match(command)]
    return {pid: ports for pid in named if (ports := listening(pid))}


def listening(pid):
    links = {}
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                links[str(entry.readlink())] = int(entry.name)
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    open_ones = [
        (links.get(f"socket:[{r[9]}]"), int(r[1].partition(":")[2], 16)) for r in rows if r[3] == "0A"
    ]
    return [port for fd, port in sorted((fd, port) for fd, port in open_ones if fd is not None)]


def garbage(rng):
    """What ended or held up the accepting thread once, and whatever else."""
    fields = {"token": "é", "credential": "é", "generation": 1, "rank": 1}
    deep = b"\x81\xa1x" + b"\x91" * 900 + b"\x90"
    bodies = [msgspec.msgpack.encode(fields), deep, rng.randbytes(200)]
    body = rng.choice(bodies)
    return rng.choice([struct.pack(">I", len(body)) + body, rng.randbytes(300), b"GET / HTTP/1.1\r\n\r\n"])


def flood(told):
    """Silent and trickling connections to every port, made anew when they are closed, and garbage all the time."""
    rng = random.Random(1)
    ports = told.recv()
    held, rounds = {}, 0
    while not told.poll(0.02):
        for port in ports:
            with contextlib.suppress(OSError):
                with socket.create_connection(("127.0.0.1", port), timeout=1) as sock:
                    sock.sendall(garbage(rng))
                while sum(p == port for p in held.values()) < SILENT + TRICKLING:
                    held[socket.create_connection(("127.0.0.1", port), timeout=1)] = port
        for number, sock in enumerate(list(held)):
            try:
                if number % (SILENT + TRICKLING) < TRICKLING:
                    sock.send(b"\0")
                if select.select([sock], [], [], 0)[0] and not sock.recv(1000):
                    raise ConnectionResetError
            except OSError:
                held.pop(sock)
                sock.close()
        rounds += 1
        if rounds == 3:
            told.send("flooding")


def soft_limits(home):
    """Of open files, of every process that others connect to."""
    found = {}
    for pid, command in leftovers(home).items():
        ours = re.search(r"holdfast\.(agent) .*--node|-m holdfast\.(coordinator)", command)
        name = "worker" if WORKER.match(command) else next(filter(None, ours.groups())) if ours else ""
        if name and listening(pid):
            soft, _ = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            found.setdefault(name, set()).add(soft)
    return found


@contextlib.contextmanager
def few_descriptors():
    """What is started meanwhile begins with what many systems begin with."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def until_all_are_there(home):
    """Its members train, so all of them listen for gloo, and the spare is ready."""
    async with JobClient(home / "jobs" / "job") as client:
        async for told in client.watch():
            if told.kind != "status" or told.value.phase != "running":
                continue
            if (told.value.step or 0) > 3 and any(w.state == "ready" for w in told.value.workers):
                return


@needs_root
def test_a_flood_on_all_ports_and_one_kill_cost_one_worker(tmp_path):
    with few_descriptors():
        launcher = start(tmp_path, "--nnodes", 3, "--spares", 1, TINY, 1_000_000)
    wait_for(launcher, "generation 1")
    asyncio.run(until_all_are_there(tmp_path))
    found = workers(tmp_path)
    assert sorted(map(len, found.values())) == [2, 3, 3, 3]
    limits = soft_limits(tmp_path)
    with stranger(flood) as told:
        told.send([port for ports in found.values() for port in ports[:2]])
        assert told.recv() == "flooding"
        os.kill(next(pid for pid, ports in found.items() if len(ports) == 3), signal.SIGKILL)
        wait_for(launcher, "full strength")
        launcher.send_signal(signal.SIGINT)
        ran = finish(launcher, tmp_path)
    assert ran.report["outcome"] == "stopped", ran.output[-3000:]
    assert [i["cause"] for i in ran.report["incidents"]] == ["killed by signal 9 (SIGKILL)"]
    assert (
        ran.report["incidents"][0]["stall_s"] < 2.0
    )  # 0.1 to 0.2 s; one caller that is waited for costs 2 or more
    assert not {"stall-judged", "worker-ended"} & set(ran.kinds())
    hard = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], MOST_DESCRIPTORS)
    assert limits == {"worker": {hard}, "agent": {hard}, "coordinator": {hard}}
