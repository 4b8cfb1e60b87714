"""What becomes of sick nodes on a real Slurm: booted, replaced, kept out by the site's own scripts."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from realslurm import (
    NODES,
    TRAIN,
    Job,
    cluster,
    configured,
    hurry,
    members,
    on_node,
    paced,
    reason,
    slurm,
    state,
    told,
    until,
    usable,
)

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(240)]
FOLDER = Path(os.environ.get("HOLDFAST_SLURM_DIR", "/nonexistent"))


def switch(node: str) -> str:
    """Another one after every boot."""
    path = FOLDER / "pid" / f"power-{node}"
    return path.read_text() if path.exists() else ""


def test_sick_nodes_are_booted_or_replaced(home: Path, undisturbed: list[float]) -> None:
    asked = home / "asked"
    command = home / "replace.sh"
    command.write_text(f'#!/bin/sh\necho "$1 $HOLDFAST_REASON" >> {shlex.quote(str(asked))}\n')
    command.chmod(0o755)
    args = [
        "--nnodes",
        3,
        "--spares",
        2,
        "--wait-for-spare",
        "--blast-radius",
        1,
        "--replace-command",
        command,
    ]
    with Job(home, "sick", *args, TRAIN, *paced(home, "sick")) as job:
        status = job.training(3, spares=2)
        head = job.coordinator

        booted = next(n for n in members(status) if n != head)
        before = switch(booted)
        assert job.command("fault", "xid=154", f"node={booted}").returncode == 0
        said = job.event("rebooting", node=booted)
        job.event("incident-closed", said["seq"])
        until(lambda: switch(booted) not in ("", before), "Slurm has booted it")
        until(lambda: state(booted) in ("idle", "allocated"), "it can be used again")
        status = job.training(3, beyond=status.step, spares=2)  # it came back, or another one of a follow-up

        replaced = next(n for n in members(status) if n != head)
        assert job.command("fault", "xid=79", f"node={replaced}").returncode == 0
        left = job.event("node-lost", node=replaced)
        job.event("incident-closed", left["seq"])
        until(asked.exists, "the site is asked for another machine")
        name, _, why = asked.read_text().strip().partition(" ")
        assert name == replaced
        assert "79" in why
        assert "holdfast sick: xid-79" in reason(replaced)
        hurry(job)
        assert job.wait(120) == 0
    until(lambda: state(replaced) == "drained", "nothing of the job is there any more")
    cluster("exchange", replaced)  # what the site does
    until(lambda: usable(replaced), "the new machine is there")
    told("sick", job.report())
    assert job.losses() == undisturbed
    assert asked.read_text().count("\n") == 1  # a node that is booted is none to replace


def site_script(folder: Path, name: str) -> Path:
    """What `holdfast slurm NAME` prints, where a site may put it."""
    argv = [sys.executable, "-m", "holdfast.cli", "slurm", name]
    path = folder / f"{name}.sh"
    path.write_text(subprocess.run(argv, check=True, capture_output=True, text=True, timeout=20).stdout)
    path.chmod(0o755)
    return path


def run_what_gets_away(node: str) -> None:
    """A job whose agent leaves its step, so that Slurm loses sight of it."""
    agent = "setsid bash -c 'exec -a holdfast.agent sleep 300' & sleep 0.2"
    out = f"--output={FOLDER}/shared/away-%j.out"
    slurm("sbatch", f"--nodelist={node}", "--wait", out, f"--wrap={agent}")


@pytest.fixture
def small() -> Iterator[str]:
    """A node with too little shared memory."""
    cluster("exec", "n3", "mount", "-o", "remount,size=8m", "/dev/shm")
    yield "n3"
    cluster("exec", "n3", "mount", "-o", "remount,size=1g", "/dev/shm")


@pytest.fixture
def program(home: Path) -> Path:
    """The site's health program, with the command that it needs."""
    folder = home / "site"
    folder.mkdir(exist_ok=True)
    holdfast, program = folder / "holdfast", folder / "health.sh"
    paths, conf = (shlex.quote(os.environ.get(name, "")) for name in ("PYTHONPATH", "SLURM_CONF"))
    holdfast.write_text(f'#!/bin/sh\nPYTHONPATH={paths} exec {sys.executable} -m holdfast.cli "$@"\n')
    check = f"HOLDFAST={holdfast} SLURM_CONF={conf} exec {site_script(folder, 'health-program')}"
    program.write_text(f"#!/bin/sh\n{check}\n")
    for path in (holdfast, program):
        path.chmod(0o755)
    return program


def test_the_epilog_ends_what_got_away(home: Path, program: Path) -> None:
    node = "n4"
    run_what_gets_away(node)
    assert on_node(node, "holdfast.agent")
    cluster("exec", node, "pkill", "-f", "^holdfast.agent")
    with configured(Epilog=site_script(program.parent, "epilog")):
        run_what_gets_away(node)
        until(lambda: not on_node(node, "holdfast.agent"), "the epilog has ended it")


def test_the_health_program_drains_a_sick_node_only(small: str, program: Path) -> None:
    health = {"HealthCheckProgram": program, "HealthCheckInterval": 10, "HealthCheckNodeState": "IDLE"}
    with configured(**health):
        until(lambda: state(small) == "drained", "the node with too little shared memory is drained")
        assert reason(small).startswith("holdfast: shm faulty")
        assert {state(node) for node in NODES if node != small} == {"idle"}


def test_one_health_program_at_a_time(small: str, program: Path) -> None:
    run = ("exec", small, "env", "-i", f"SLURMD_NODENAME={small}")  # as slurmd does
    cluster(*run, "flock", f"/run/holdfast-health-{small}.lock", str(program))
    assert state(small) == "idle"
    cluster(*run, str(program))
    assert state(small) == "drained"
