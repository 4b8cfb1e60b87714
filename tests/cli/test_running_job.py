"""The commands on a job that runs: a real coordinator, which waits for nodes that never come."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from holdfast.engines.client import JobClient
from holdfast.engines.jobs import JobFolder
from holdfast.errors import UsageError
from holdfast.protocol.job import JobSpec


@pytest.fixture
def job(home):
    """The coordinator of a job, as the launcher starts it; commands wait for one that is still starting."""
    folder = JobFolder("live")
    folder.prepare(JobSpec(name="live", script="train.py", min_nodes=1, max_nodes=2))
    ends, begins = os.pipe()
    listener = socket.create_server(("127.0.0.1", 0))
    passed = [f"--job-dir={folder.path}", f"--listen-fd={listener.fileno()}", f"--lifeline={ends}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "holdfast.coordinator", *passed],
        pass_fds=(folder.lock, listener.fileno(), ends),
    )
    listener.close()
    folder.close()
    yield folder
    process.kill()
    process.wait()
    os.close(ends)
    os.close(begins)


def test_status(job, holdfast):
    assert "live  gathering workers  0 of 2 workers  step 0  loss –  – steps/s" in holdfast("status").out
    assert json.loads(holdfast("status", "--json").out)["running"] is True


def test_a_machine_that_no_job_knows_is_not_cleared(job, holdfast):
    """A running job is asked where no history has it."""
    said = holdfast("node", "clear", "m7")
    assert (said.code, said.out) == (2, "")
    assert "there is no history of a machine 'm7'" in said.err


def test_a_fault_that_names_no_rank_is_refused_by_the_coordinator(job, holdfast):
    said = holdfast("fault", "kill-worker:rank=3")
    assert (said.code, said.out) == (2, "")
    assert "this job does not have a rank 3" in said.err


def test_a_fault_that_cannot_be_read_is_refused_here(job, holdfast):
    said = holdfast("fault", "kill-everything")
    assert said.code == 2
    assert "choose one of kill-worker" in said.err


def test_a_fault_is_taken(job, holdfast):
    said = holdfast("fault", "kill-node:step=40")
    assert said.code == 0
    assert "injected kill-node:step=40 into the job live" in said.out


def test_its_memory_is_not_given_back_while_it_runs(job, holdfast):
    said = holdfast("checkpoint", "free", "--job", "live")
    assert said.code == 2
    assert "a job named 'live' is running" in said.err


def test_a_tracker_follows_until_the_job_is_stopped(job, start, holdfast, tmp_path):
    target = tmp_path / "out.jsonl"
    tracking = start("track", "--to", f"jsonl:{target}")
    assert holdfast("stop").code == 0
    assert tracking.wait(60) == 0
    kinds = [json.loads(line)["event"] for line in target.read_text().splitlines()]
    assert kinds == [json.loads(line)["kind"] for line in holdfast("events", "--json").out.splitlines()]
    assert kinds[-1] == "ended"


def test_events_are_followed_until_the_job_is_stopped(job, start, holdfast):
    following = start("events", "--follow", "--json")
    assert json.loads(following.stdout.readline())["kind"] == "waiting"
    stopped = holdfast("stop")
    assert stopped.code == 0
    assert "the job live stopped at step 0" in stopped.out
    rest = [json.loads(line)["kind"] for line in following.stdout]
    assert rest[0] == "stop-requested"
    assert rest[-1] == "ended"
    assert following.wait() == 0


def test_a_second_start_is_refused(job, holdfast):
    said = holdfast("run", "--job", "live", "train.py")
    assert said.code == 2
    assert "is running" in said.err


def test_a_resize_outside_the_bounds_is_refused(job, holdfast):
    said = holdfast("resize", 3)
    assert said.code == 2
    assert "--nnodes 1:2; choose 1 to 2" in said.err


def test_a_resize_is_taken_and_recorded(job, holdfast):
    said = holdfast("resize", 1, "--reason", "night")
    assert (said.code, said.out) == (0, "the job live goes from 2 to 1 nodes\n")
    assert "from 2 to 1 node: night" in holdfast("events").out
    assert json.loads(holdfast("status", "--json").out)["target"] == 1


def test_a_node_that_is_not_there_cannot_be_drained(job, holdfast):
    said = holdfast("drain", "node7", "--within", "2m")
    assert said.code == 2
    assert "this job does not have a node 'node7'" in said.err
    assert "is not a time" in holdfast("drain", "node7", "--within", "soon").err


def test_what_an_engine_says_must_be_understood(job, holdfast):
    async def say(body):
        async with JobClient(job.path) as client:
            await client.post("/engine", body)

    asyncio.run(say('{"type": "capacity", "nodes": 1, "reason": "preempted"}'))
    assert "the engine now allows at most 1 node: preempted" in holdfast("events").out
    with pytest.raises(UsageError, match="type"):
        asyncio.run(say('{"type": "wish"}'))


def test_attach_shows_the_job_and_leaves_it_running(job, home):
    command = [sys.executable, "-m", "holdfast.cli", "attach", "--job", "live", "--no-ui"]
    with subprocess.Popen(
        command, env=os.environ | {"HOLDFAST_HOME": str(home)}, stderr=subprocess.PIPE, text=True
    ) as shown:
        # Its first event: from here on it looks on.
        assert any("waiting for nodes" in line for line in shown.stderr)
        shown.send_signal(signal.SIGINT)
        said = shown.stderr.read()
    assert shown.returncode == 130, said
    assert "the job live continues without this command" in said


def test_attach_wants_a_name_for_a_place(job, holdfast):
    said = holdfast("attach", "--namespace", "research")
    assert (said.code, said.out) == (2, "")
    assert "pass its name with --job, too" in said.err
