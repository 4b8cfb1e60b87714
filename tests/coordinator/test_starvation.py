"""An agent that does not get a processor is silent and well; one that is stopped is not. Real processes, the real service."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest
from fakeagents import serving

from holdfast.coordinator.service.starvation import Starving
from holdfast.protocol import messages as m
from holdfast.protocol.frames import encode
from holdfast.protocol.processes import kernel_id

RIVALS = 8
BUSY = """
import os, sys, time
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
said = 0.0
while True:
    if time.process_time() - said > 0.25:
        said = time.process_time()
        os.write(1, b".")
"""


@pytest.fixture
def starved() -> Iterator[subprocess.Popen[bytes]]:
    """A process that shares one processor with others. It writes for every quarter of a second that it got of it."""
    command = [sys.executable, "-c", BUSY]
    rivals = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for _ in range(RIVALS)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    yield process
    for each in (process, *rivals):
        each.kill()
        each.wait()
    assert process.stdout is not None
    process.stdout.close()


def a_quarter(process: subprocess.Popen[bytes]) -> None:
    """Returns when it got a quarter of a second more of the processor."""
    assert process.stdout is not None
    assert os.read(process.stdout.fileno(), 1)


def test_what_a_process_waits_for_a_processor_is_no_silence(starved):
    look = Starving(0.5)
    look.on_agent_joined("n0", kernel_id(), starved.pid)
    look.on_agent_joined("n1", "another machine", starved.pid)
    assert look.look([("n0", 0.0), ("n1", 0.0)], 1.0) == {}
    a_quarter(starved)
    assert look.look([("n0", 0.0), ("n1", 0.0)], 1000.0)["n0"] > 0.5
    assert look.look([("n0", 1000.0)], 1000.1) == {}, "it was heard of"
    starved.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, starved.pid, os.WSTOPPED | os.WNOWAIT)
    look.look([("n0", 1000.0)], 1001.0)
    assert look.look([("n0", 1000.0)], 1002.0).get("n0", 0.0) == 0.0


def test_a_node_whose_agent_only_starves_is_not_given_up_and_one_that_is_stopped_is(tmp_path, starved):
    detection_s = 1.0

    async def story() -> None:
        async with serving(tmp_path, detection_s) as plane:
            hello = m.Hello(
                version=m.PROTOCOL_VERSION,
                node="n0",
                session="s",
                host="127.0.0.1",
                slots=1,
                pid=starved.pid,
                kernel=kernel_id(),
            )
            line = await plane.session.ws_connect(f"{plane.url}/agent")
            await line.send_bytes(encode(hello))
            await plane.event("node-joined")
            began_s = asyncio.get_running_loop().time()
            await asyncio.to_thread(a_quarter, starved)
            silent_s = asyncio.get_running_loop().time() - began_s
            assert silent_s > 1.5 * detection_s, "it had rivals"
            assert plane.state.membership.nodes["n0"].alive
            starved.send_signal(signal.SIGSTOP)
            assert "silent" in (await plane.event("node-lost"))["cause"]
            await line.close()

    asyncio.run(story())


def test_a_hello_of_before_says_nothing_of_where_its_process_is():
    old = encode(m.Hello(version=m.PROTOCOL_VERSION, node="n0", session="s", host="h", slots=1, pid=1))
    assert msgspec.msgpack.decode(old, type=m.Hello).kernel == ""
