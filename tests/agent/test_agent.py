"""A real agent process whose orders fail, or whose link breaks for good."""

import asyncio
import os
import re
import resource
import select
import signal
import sys
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from aiohttp import WSCloseCode
from test_coordinator_link import serving

from holdfast.agent.agent import _may_wait
from holdfast.protocol import messages as m
from holdfast.protocol.generation_difference import NOTHING, difference
from holdfast.protocol.job import JobSpec
from holdfast.protocol.notices import Going, Notice, NoticeCause
from holdfast.protocol.wire.frames import encode

SLEEPER = "import signal\nsignal.pause()\n"


@asynccontextmanager
async def agent(job_dir, *command):
    """An agent process and the coordinator that it has."""
    (job_dir / "token").write_text("token")
    (job_dir / "sleeper.py").write_text(SLEEPER)
    spec = JobSpec(name="job", script="sleeper.py", preload=("holdfast.train.worker",))
    (job_dir / "spec.json").write_bytes(msgspec.json.encode(spec))
    arguments = ["--node=n0", f"--job-dir={job_dir}", f"--memory={job_dir / 'memory'}"]
    async with serving(job_dir) as coordinator:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *command,
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            yield process, coordinator
        finally:
            if process.returncode is None:
                process.kill()
            await process.communicate()


async def heard(coordinator, kind, worker):
    """Waits for a message about a worker."""

    def those():
        return [x for said in coordinator.said for x in said if isinstance(x, kind) and x.worker == worker]

    async with coordinator.news:
        await asyncio.wait_for(coordinator.news.wait_for(those), 60)
    return those()[0]


def order_to_start(job_dir, worker):
    return m.StartWorker(
        worker=worker,
        slot=0,
        script=str(job_dir / "sleeper.py"),
        args=(),
        module=False,
        cwd=str(job_dir),
        env={},
    )


def start(job_dir, worker):
    return encode(order_to_start(job_dir, worker))


async def hello(coordinator):
    async with coordinator.news:
        await asyncio.wait_for(
            coordinator.news.wait_for(lambda: coordinator.said and coordinator.said[0]), 60
        )


def test_a_worker_that_cannot_be_started_is_said_to_have_ended(tmp_path):
    """As where the agent has no descriptors left. The core would wait for it for the time of a start."""

    async def start_without_descriptors():
        async with agent(tmp_path, "-m", "holdfast.agent") as (process, coordinator):
            await hello(coordinator)
            before = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (3, before[1]))
            await coordinator.connection.send_bytes(start(tmp_path, "n0.0#1"))
            exited = await heard(coordinator, m.Exited, "n0.0#1")
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, before)
            await coordinator.connection.send_bytes(start(tmp_path, "n0.0#2"))
            await heard(coordinator, m.Started, "n0.0#2")
            return exited

    exited = asyncio.run(start_without_descriptors())
    assert "Too many open files" in exited.tail[0]


def test_an_agent_whose_link_ends_for_good_ends_with_its_workers(tmp_path):
    async def break_the_link():
        deaf = str(Path(__file__).with_name("deaf_agent.py"))
        async with agent(tmp_path, deaf) as (process, coordinator):
            await hello(coordinator)
            await coordinator.connection.send_bytes(start(tmp_path, "n0.0#1"))
            started = await heard(coordinator, m.Started, "n0.0#1")
            worker = os.pidfd_open(started.pid)
            await coordinator.connection.close()
            output, _ = await asyncio.wait_for(process.communicate(), 60)
            ended = select.select([worker], [], [], 0)[0]
            os.close(worker)
            return process.returncode, output.decode(), bool(ended)

    code, output, ended = asyncio.run(break_the_link())
    assert code == 1
    assert re.search(
        r"level=error logger=agent.agent msg=\"the agent's link to the coordinator broke.* node=n0$",
        output,
        re.M,
    )
    assert "nothing more to say" in output
    assert ended


ASKS = """import sys
import holdfast
while (notice := holdfast.notice()) is None:
    pass
sys.exit(notice.number)
"""


def test_workers_hear_what_is_to_go_away_also_those_that_start_later(tmp_path):
    def notify(number):
        notice = Notice(
            number=number, going=Going.JOB, cause=NoticeCause.TIME_LIMIT, reason="x", deadline_s=9.0
        )
        return encode(m.Notify((notice,)))

    async def end_by_notices():
        async with agent(tmp_path, "-m", "holdfast.agent") as (_, coordinator):
            (tmp_path / "sleeper.py").write_text(ASKS)
            await hello(coordinator)
            await coordinator.connection.send_bytes(start(tmp_path, "n0.0#1"))
            await heard(coordinator, m.Started, "n0.0#1")
            await coordinator.connection.send_bytes(notify(3))
            first = await heard(coordinator, m.Exited, "n0.0#1")
            await coordinator.connection.send_bytes(start(tmp_path, "n0.0#2"))
            return first.code, (await heard(coordinator, m.Exited, "n0.0#2")).code

    assert asyncio.run(end_by_notices()) == (3, 3)


def test_only_further_steps_of_members_beside_rank_0_may_wait():
    """The first step of a generation is what a recovery ends with, and rank 0 reports every one."""

    def report(generation, committed):
        return m.Progress(generation=generation, committed=committed, median_s=0.1)

    def waits(worker, message):
        return _may_wait(worker, message)

    zero, one, none = (SimpleNamespace(rank=rank, reported=0) for rank in (0, 1, None))
    assert [waits(one, report(1, 5)), waits(one, report(1, 6)), waits(one, report(2, 6))] == [
        False,
        True,
        False,
    ]
    assert not waits(one, m.Parked(generation=2, committed=7))
    for worker in (zero, none):  # at level 0 and 1 nobody is told to join
        assert [waits(worker, report(1, step)) for step in (1, 2)] == [False, False]


def test_a_generation_that_does_not_fit_is_asked_for_whole(tmp_path):
    """An agent applies what has changed since the generation that it has; after a reconnection as well."""

    def generation(number, nodes):
        members = tuple(
            m.Member(
                rank=at,
                worker=f"n{node}.0#1",
                node=f"n{node}",
                slot=0,
                host="h",
                vote_port=1,
                data_port=2,
                replica=at,
            )
            for at, node in enumerate(nodes)
        )
        return m.Generation(
            number=number, members=members, shape=(1, 1), groups_connected_in=(1,) * len(nodes)
        )

    first, second, third = generation(1, [0, 1, 2]), generation(2, [0, 2]), generation(3, [0, 2, 3])

    def form(base, new):
        return encode(m.Form(change=difference(base, new), orders=()))

    async def hellos():
        async with agent(tmp_path, "-m", "holdfast.agent") as (_, coordinator):

            def said():
                return [x.generation for said in coordinator.said for x in said if isinstance(x, m.Hello)]

            async def next_one(count):
                await coordinator.until(lambda: len(said()) == count)

            await next_one(1)
            await coordinator.connection.send_bytes(form(first, second))  # of which it has not heard
            await next_one(2)
            await coordinator.connection.send_bytes(form(NOTHING, second))
            await coordinator.connection.close()
            await next_one(3)
            damaged = difference(second, third)
            damaged = msgspec.structs.replace(damaged, start=7)
            await coordinator.connection.send_bytes(form(second, third))
            await coordinator.connection.send_bytes(encode(m.Form(change=damaged, orders=())))
            await next_one(4)
            await coordinator.connection.send_bytes(form(NOTHING, third))
            await coordinator.connection.close()
            await next_one(5)
            return said()

    none, known = (0, NOTHING.digest), [(g.number, g.digest) for g in (second, third)]
    assert asyncio.run(hellos()) == [none, none, known[0], none, known[1]]


PRINTS = """
print("taken for rank 0", flush=True)
open("go").read()
print("is rank 1", flush=True)
"""


def test_a_worker_that_was_only_taken_for_rank_0_is_printed_no_further(tmp_path):
    """Its rank at the start is a guess. The node of the true rank 0 prints, and the same lines would stand there twice."""
    os.mkfifo(tmp_path / "go")
    join = m.JoinGeneration(
        generation=m.Generation(
            number=1,
            members=tuple(
                m.Member(rank=rank, worker=worker, node=worker[:2], slot=0)
                for rank, worker in enumerate(("n1.0#1", "n0.0#1"))
            ),
        ),
        rank=1,
    )

    async def printed():
        async with agent(tmp_path, "-m", "holdfast.agent") as (process, coordinator):
            (tmp_path / "sleeper.py").write_text(PRINTS)
            await hello(coordinator)
            order = msgspec.structs.replace(order_to_start(tmp_path, "n0.0#1"), env={"RANK": "0"})
            await coordinator.connection.send_bytes(encode(order))
            await heard(coordinator, m.Started, "n0.0#1")
            while b"taken for rank 0" not in (line := await asyncio.wait_for(process.stdout.readline(), 60)):
                assert line, "the agent ended"
            await coordinator.connection.send_bytes(encode(m.Relay("n0.0#1", join)))
            # Orders are taken one after the other: once the next one is answered, the agent knows the rank.
            await coordinator.connection.send_bytes(encode(order_to_start(tmp_path, "n0.0#2")))
            await heard(coordinator, m.Started, "n0.0#2")
            (tmp_path / "go").write_text("")
            await heard(coordinator, m.Exited, "n0.0#1")
            process.kill()
            return (await process.communicate())[0].decode().splitlines()

    lines = asyncio.run(printed())
    assert [line for line in lines if not line.startswith("time=")] == [], "\n".join(lines)


LIMIT = 1 << 30
GROWS = "open('go').read()\ngrown = b'x' * (2 << 30)\n"


@pytest.fixture
def small_group():
    """A control group with a memory limit, as a container has; only where this user may make one."""
    for parent, name in (
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
        ("/sys/fs/cgroup", "memory.max"),
    ):
        folder = Path(parent, f"holdfast-{os.getpid()}")
        try:
            folder.mkdir()
            with (folder / name).open("r+") as limit:
                limit.write(str(LIMIT))
        except OSError:
            if folder.exists():
                folder.rmdir()
            continue
        yield folder
        # What ran in it may need a moment to be gone for the kernel, too.
        while folder.exists():
            with suppress(OSError):
                folder.rmdir()
        return
    pytest.skip("no control group can be made here")


def test_a_worker_that_the_kernel_killed_for_memory_is_told_from_one_that_a_person_killed(
    tmp_path, small_group
):
    into = (
        f"import os, sys; open({str(small_group / 'cgroup.procs')!r}, 'w').write('0'); "
        "os.execv(sys.executable, [sys.executable, '-m', 'holdfast.agent', *sys.argv[1:]])"
    )

    os.mkfifo(tmp_path / "go")

    async def ends():
        async with agent(tmp_path, "-c", into) as (_, coordinator):
            (tmp_path / "sleeper.py").write_text(GROWS)
            await hello(coordinator)
            await coordinator.connection.send_bytes(start(tmp_path, "n0.0#1"))
            os.kill((await heard(coordinator, m.Started, "n0.0#1")).pid, signal.SIGKILL)
            by_hand = await heard(coordinator, m.Exited, "n0.0#1")
            await coordinator.connection.send_bytes(start(tmp_path, "n0.0#2"))
            await heard(coordinator, m.Started, "n0.0#2")
            (tmp_path / "go").write_text("")
            return by_hand, await heard(coordinator, m.Exited, "n0.0#2")

    by_hand, by_kernel = asyncio.run(ends())
    assert (by_hand.code, by_hand.out_of_memory, by_hand.memory_limit) == (-9, False, None)
    assert (by_kernel.code, by_kernel.out_of_memory, by_kernel.memory_limit) == (-9, True, LIMIT)


def test_an_agent_that_leaves_waits_for_the_coordinator_that_follows(tmp_path):
    """A scheduler signals agent and coordinator at once. The agent's workers have a state that is still to be saved."""

    async def leaving():
        async with agent(tmp_path, "-m", "holdfast.agent") as (process, coordinator):
            await coordinator.hears(0, m.Hello)
            process.send_signal(signal.SIGTERM)
            await coordinator.hears(0, m.Hello, m.Leaving)
            await coordinator.connection.close(code=WSCloseCode.SERVICE_RESTART)
            hello, *_ = await coordinator.hears(1, m.Hello)
            assert hello.leaving == m.Leaving("SIGTERM", 30.0)
            await coordinator.connection.close()  # this one is lost
            return await asyncio.wait_for(process.wait(), 30)

    assert asyncio.run(leaving()) == 0
