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

from holdfast.coordinator.service.decision_loop import Starving
from holdfast.protocol import messages as m
from holdfast.protocol.machine.processes import ThreadTimes, kernel_id, memory_stall_s
from holdfast.protocol.wire.frames import encode

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


def excused_s(threads_at, until_s: float, stall_at=lambda s: 0.0) -> float:
    """What is excused of the silence of an agent that was heard of at 0, by looks every 0.25 s. threads_at(s), stall_at(s): what
    the kernel says then."""
    now = 0.0
    look, heard_s = Starving(0.5, lambda pid: threads_at(now), lambda: stall_at(now)), 0.0
    look.on_agent_joined("n0", kernel_id(), 1)
    for quarter in range(int(until_s / 0.25) + 1):
        now = quarter * 0.25
        heard_s += look.look([("n0", heard_s)], now).get("n0", 0.0)
        assert heard_s <= now
    return heard_s


def waits_of(length_s: float):
    """A thread that runs for a millisecond after each wait of that length. The kernel counts a wait when it ends."""

    def at(s: float) -> dict[int, ThreadTimes]:
        ended = int(s / (length_s + 0.001))
        return {7: ThreadTimes(ended * 0.001, ended * length_s, True)}

    return at


@pytest.mark.parametrize("length_s", [0.02, 0.6, 1.1, 30.0])
def test_waits_are_excused_whole_however_long_each_is(length_s):
    # All of it but what comes before the first look, and one look's time.
    assert excused_s(waits_of(length_s), 10.0) > 10.0 - 1.25


def test_a_thread_that_sleeps_or_computes_does_not_wait():
    assert excused_s(lambda s: {7: ThreadTimes(s, 0.1, True), 8: ThreadTimes(0.1, 3.0, False)}, 10.0) == 0.0


def test_a_wait_that_ended_excuses_nothing_of_the_silence_after_it():
    stopped_s = 5.0

    def at(s: float) -> dict[int, ThreadTimes]:
        times = waits_of(0.6)(min(s, stopped_s))[7]
        return {7: times._replace(runnable=s < stopped_s)}

    assert stopped_s - 1.25 < excused_s(at, 20.0) <= stopped_s


def test_a_machine_that_looks_for_memory_is_excused_for_so_long_and_no_longer():
    still = {7: ThreadTimes(1.0, 0.0, False)}
    assert (
        excused_s(lambda s: still, 20.0, lambda s: 60.0 + min(s, 5.0)) == 5.0 - 0.75
    )  # from the first look on
    assert excused_s(lambda s: still, 20.0, lambda s: 60.0) == 0.0
    # Half of the time it waits for a processor, all of it while the kernel looks for memory: it waits once.
    assert excused_s(waits_of(0.6), 10.0, lambda s: s / 2) <= 10.0


def test_what_the_kernel_says_of_memory(tmp_path):
    told = tmp_path / "memory"
    told.write_text(
        "some avg10=0.00 avg60=0.00 avg300=0.06 total=205148173\nfull avg10=0.00 avg300=0.04 total=160346241\n"
    )
    assert memory_stall_s(told) == 160.346241
    assert memory_stall_s(tmp_path / "none") == 0.0
    told.write_text("full total=\n")
    assert memory_stall_s(told) == 0.0


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
