"""`--engine ssh` on four hosts behind real sshds (`make ssh-test`)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from realssh import SOURCES, TRAIN, Hosts, Job, wait_until

pytestmark = [pytest.mark.ssh, pytest.mark.timeout(240)]
STEPS, PAUSE_S = 150, 0.5
AGENT = r"-m holdfast\.agent "
NODE = r"^\S*python\S* -P -m holdfast\.engines\.ssh\.node"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> list[float]:
    """The losses of the same training on one worker that nothing happens to."""
    home = tmp_path_factory.mktemp("alone")
    env = dict(os.environ, HOLDFAST_HOME=str(home), PYTHONPATH=str(SOURCES))
    argv = [sys.executable, "-m", "holdfast.cli", "run", "--no-ui", "--job", "job", str(TRAIN), str(STEPS)]
    subprocess.run(argv, env=env, check=True, timeout=100, capture_output=True)
    from holdfast.coordinator.service.store import Store

    store = Store(home / "jobs" / "job" / "job.sqlite", read_only=True)
    try:
        return [s.loss for s in store.steps()]
    finally:
        store.close()


def go_on(tmp_path: Path) -> Path:
    return tmp_path / "go"


def joins(job: Job, node: str) -> int:
    """How often the node has joined."""
    return [e["node"] for e in job.events("node-joined")].count(node)


def nothing_left(hosts: Hosts) -> None:
    """Of a job that has ended."""
    for host in hosts.hosts.values():
        wait_until(
            lambda host=host: not host.pids("holdfast"), f"{host.name} is empty: {host.pids('holdfast')}", 20
        )


def test_a_run_with_a_spare_loses_hosts_and_the_curve_is_the_same(hosts, tmp_path, undisturbed) -> None:
    go = go_on(tmp_path)
    job = hosts.start("--hosts", "a,b,c,d", "--spares", 1, TRAIN, STEPS, PAUSE_S, go)
    job.wait_for_step(3)
    # The token reached the hosts, and nobody can read it from a process list there.
    token = (job.dir / "token").read_text()
    own = hosts.folder / "b" / "disk" / "jobs" / "job" / "token"
    assert own.read_text() == token
    assert own.stat().st_mode & 0o777 == 0o600
    for path in Path("/proc").glob("[0-9]*"):
        for name in ("cmdline", "environ"):
            try:
                assert token.encode() not in (path / name).read_bytes()
            except OSError:
                continue

    # Only a connection of ssh: nobody is lost for it, and the launcher connects again.
    (sshd,) = (pid for pid in hosts["a"].pids("^sshd: root"))
    os.kill(sshd, signal.SIGKILL)
    job.wait_for("connected to a again; its agent kept running")
    assert job.events("node-lost") == []

    # A host without power: its place is taken, and when it is back it joins again.
    trains = [worker.partition(".")[0] for worker in job.events("formed")[-1]["workers"]]
    first, second = trains[:2]
    hosts[first].off()
    job.wait_for_step(job.step() + 3)
    assert [e["node"] for e in job.events("node-lost")] == [first]
    hosts[first].boot()
    wait_until(lambda: joins(job, first) == 2, f"{first} is back", 60)

    # An agent alone: its host gets another one.
    for pid in hosts[second].pids(AGENT):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: joins(job, second) == 2, f"{second} is back", 60)

    go.touch()
    report = job.finish()
    assert report["outcome"] == "finished", job.output
    assert job.losses() == undisturbed
    nothing_left(hosts)
    for host in hosts.hosts.values():
        assert not list((host.home / "hosts").glob("*"))


def test_a_killed_launcher_leaves_nothing_behind(hosts, tmp_path) -> None:
    job = hosts.start("--hosts", "a,b", TRAIN, 10_000, PAUSE_S, go_on(tmp_path))
    job.wait_for_step(5)
    job.process.kill()
    job.process.wait()
    nothing_left(hosts)


def test_a_new_coordinator_is_found_by_hosts_that_share_no_folder(hosts, tmp_path, undisturbed) -> None:
    go = go_on(tmp_path)
    job = hosts.start("--hosts", "a,b", TRAIN, STEPS, PAUSE_S, go)
    job.wait_for_step(5)
    endpoint = (job.dir / "coordinator.json").read_text()
    import json

    os.kill(json.loads(endpoint)["pid"], signal.SIGKILL)
    wait_until(lambda: (job.dir / "coordinator.json").read_text() != endpoint, "a new coordinator")
    job.wait_for_step(job.step() + 5)
    assert job.events("node-lost") == []
    go.touch()
    assert job.finish()["outcome"] == "finished", job.output
    assert job.losses() == undisturbed


def test_what_rank_0_prints_is_shown_once_over_a_broken_connection(hosts, tmp_path) -> None:
    script, go = tmp_path / "say.py", go_on(tmp_path)
    script.write_text(
        TRAIN.read_text().replace("with step:", "print('at', step.index, flush=True)\n        with step:")
    )
    job = hosts.start("--hosts", "a", script, STEPS, PAUSE_S, go)
    job.wait_for("\nat 5\n")
    for pid in hosts["a"].pids("^sshd: root") + hosts["a"].pids(NODE):
        os.kill(pid, signal.SIGKILL)
    job.wait_for("connected to a again; its agent kept running")
    go.touch()
    assert job.finish()["outcome"] == "finished", job.output
    said = [line for line in job.output.splitlines() if line.startswith("at ")]
    assert said == [f"at {step}" for step in range(STEPS)]


def test_ctrl_c_stops_in_order(hosts, tmp_path) -> None:
    job = hosts.start("--hosts", "a,b", TRAIN, 10_000, PAUSE_S, go_on(tmp_path))
    job.wait_for_step(5)
    os.killpg(job.process.pid, signal.SIGINT)
    assert job.finish()["outcome"] == "stopped", job.output
    nothing_left(hosts)


def test_hosts_that_cannot_be_used_are_named_and_the_rest_begins(hosts, tmp_path) -> None:
    hosts["b"].off()
    (hosts.folder / "c" / "host_key.pub").write_text("")
    known = [line for line in hosts.known.read_text().splitlines() if hosts["c"].address not in line]
    hosts.known.write_text("\n".join(known) + "\n")
    job = hosts.start("--hosts", "a,b,c,nowhere.invalid", "--nnodes", "4", TRAIN, 10)
    assert job.finish() == {}
    assert "1 of the 4 hosts that the job needs can be used" in job.output
    assert "b: nothing listens for ssh there" in job.output
    assert "c: its host key is not known here; connect once with `ssh c`" in job.output
    assert "nowhere.invalid: ssh does not know this name" in job.output
    assert not job.dir.exists()

    job = hosts.start("--hosts", "a,b,d", "--nnodes", "1:3", TRAIN, 10)
    assert job.finish()["outcome"] == "finished", job.output
    assert "b: nothing listens for ssh there" in job.output


def test_a_wrong_environment_is_refused(hosts, tmp_path) -> None:
    job = hosts.start("--hosts", "a,b", "--remote-python", "/nowhere/python", TRAIN, 10)
    job.finish()
    assert "a: there is no Python at /nowhere/python" in job.output
    bare = tmp_path / "bare"
    bare.mkdir()
    config = hosts.folder / "a" / "sshd_config"
    config.write_text(config.read_text().replace(str(SOURCES), str(bare)))
    hosts["a"].off()
    hosts["a"].boot()
    job = hosts.start("--hosts", "a", "--remote-python", "/usr/bin/python3", TRAIN, 10)
    job.finish()
    assert "a: its Python environment is incomplete" in job.output


def test_checkpoints_that_hosts_do_not_share_are_refused(hosts, tmp_path) -> None:
    job = hosts.start("--hosts", "a,b", "--checkpoint", hosts.home / "own", TRAIN, 10)
    job.finish()
    assert "a: the checkpoints' folder" in job.output
    assert "is not shared with the launching machine" in job.output
