"""SIGTERM asks a coordinator to hand over. Only those who may stop a job stop it."""

import os
import signal

import pytest
from conftest import STEPS
from drive import Deed, Driver
from harness import TINY, finish, leftovers, start, wait_for

from holdfast.protocol.network.endpoint import read_endpoint


def sigterm(job_dir, others=lambda: ()):
    """To the coordinator, and then to others."""

    async def deed(client, status):
        for pid in (read_endpoint(job_dir).pid, *others()):
            os.kill(pid, signal.SIGTERM)

    return deed


def asked_meanwhile(job_dir):
    """One who asks while the coordinator hands over is answered, by it or by the next one."""
    told = sigterm(job_dir)

    async def deed(client, status):
        await told(client, status)
        await client.post("/clear?machine=nobody")

    return deed


@pytest.mark.long
def test_a_coordinator_that_hands_over_costs_no_step_and_is_no_incident(tmp_path, undisturbed):
    # Training goes on while there is no coordinator. Its steps take so long that the job is not over before the second one.
    process = start(tmp_path, "--nnodes", 3, TINY, STEPS, "--device-s", 0.01)
    job_dir = tmp_path / "jobs" / "job"
    wait_for(process, "generation 1")
    with Driver(job_dir, [Deed(sigterm(job_dir), 15), Deed(asked_meanwhile(job_dir), 15)]) as driver:
        ran = finish(process, tmp_path)
    assert not driver.left
    assert ran.code == 0, ran.output[-3000:]
    assert ran.output.count("the coordinator hands over; starting another") == 2
    assert [f["away_s"] >= 0 for f in ran.fields("handed-over")] == [True, True]
    assert ran.report["incidents"] == []
    assert ran.report["steps"]["lost"] == 0
    assert ran.kinds().count("formed") == 1
    assert ran.report["final"] == undisturbed.report["final"]
    assert ran.losses() == undisturbed.losses()


def test_sigterm_to_all_of_a_job_stops_it_with_its_state_saved(tmp_path):
    """As a scheduler signals every process of a step: the stop that the launcher asks for is not lost between two
    coordinators, and agents that are to leave wait for the second one."""
    process = start(tmp_path, "--nnodes", 2, TINY, 1_000_000)
    job_dir = tmp_path / "jobs" / "job"
    wait_for(process, "generation 1")

    def all_others():
        return [process.pid, *(pid for pid, command in leftovers(tmp_path).items() if "--node=" in command)]

    with Driver(job_dir, [Deed(sigterm(job_dir, all_others), 10)]):
        ran = finish(process, tmp_path)
    assert ran.code == 75, ran.output[-3000:]
    assert ran.report["outcome"] == "stopped"
    assert ran.report["reason"] == "interrupted"
    assert ran.report["saved"]["step"] == ran.report["steps"]["committed"]
    assert ran.report["steps"]["lost"] == 0
