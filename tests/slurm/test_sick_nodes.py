"""What becomes of sick nodes on a real Slurm: booted, replaced, kept out by the site's own scripts."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
from realslurm import TRAIN, Job, cluster, hurry, members, paced, slurm, state, told, until, usable

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(240)]
FOLDER = Path(os.environ.get("HOLDFAST_SLURM_DIR", "/nonexistent"))


def reason(node: str) -> str:
    return slurm("sinfo", "-h", "-n", node, "-p", "train", "-o", "%E")


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
        status = job.training(
            3, beyond=status["step"], spares=2
        )  # it came back, or another one of a follow-up

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
