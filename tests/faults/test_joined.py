"""Nodes that somebody else starts, each with a home of its own: nothing is shared with the launcher."""

import os
import re
import signal
import subprocess

import pytest
from conftest import STEPS
from drive import Deed, Driver
from harness import TINY, end_leftovers, finish, leftovers, start, wait_for

import preloaded
from holdfast.protocol.network.endpoint import read_endpoint

pytestmark = pytest.mark.long


def joins(tmp_path, name, address, token):
    """A node; its home is not the launcher's."""
    home = tmp_path / name
    home.mkdir(exist_ok=True)
    with (home / "out").open("ab") as out:
        return subprocess.Popen(
            [
                *preloaded.launcher(),
                "agent",
                "--join",
                address,
                "--token-file",
                token,
                "--node",
                name,
                "--shared-machine",
            ],
            env=dict(os.environ, HOLDFAST_HOME=str(home)),
            stdout=out,
            stderr=out,
        )


@pytest.fixture
def job(tmp_path):
    """A job of three nodes that waits for them: launcher, the address to join, and a copy of its token."""
    options = ("--engine", "join", "--address", "127.0.0.1", "--nnodes", 3, "--wait-for-spare")
    tier = ("--checkpoint", tmp_path / "tier")
    process = start(tmp_path, *options, *tier, TINY, STEPS, "--device-s", 0.02)
    said = []
    for line in process.stdout:
        said.append(line)
        if found := re.search(r"--join (\S+) --token-file (\S+)", line):
            break
    else:
        pytest.fail("".join(said))
    copy = tmp_path / "token"
    copy.write_text((tmp_path / "jobs" / "job" / "token").read_text())
    yield process, found[1], copy
    for name in ("a", "b", "c", "d"):
        end_leftovers(tmp_path / name)


def test_a_coordinator_and_a_node_are_killed_and_nothing_is_lost(tmp_path, job, undisturbed):
    process, address, token = job
    nodes = {name: joins(tmp_path, name, address, token) for name in "abc"}
    wait_for(process, "generation 1: 3 workers")
    job_dir = tmp_path / "jobs" / "job"

    async def kill_coordinator(client, status):
        os.kill(read_endpoint(job_dir).pid, signal.SIGKILL)

    async def replace_node(client, status):
        nodes["b"].kill()
        nodes["d"] = joins(tmp_path, "d", address, token)

    with Driver(job_dir, [Deed(kill_coordinator, 40), Deed(replace_node, 70)]) as driver:
        ran = finish(process, tmp_path)
    assert not driver.left
    assert (ran.code, ran.report["outcome"]) == (0, "finished"), ran.output[-3000:]
    assert ran.report["steps"]["lost"] == 0
    assert "the job needs another node; start it on another machine with: holdfast agent --join" in ran.output
    assert (ran.report["final"], ran.losses()) == (undisturbed.report["final"], undisturbed.losses())
    ended = {name: node.wait(30) for name, node in nodes.items()}
    assert ended["b"] == -signal.SIGKILL
    assert {ended["a"], ended["c"]} == {0}
    assert not any(leftovers(tmp_path / name) for name in nodes)
