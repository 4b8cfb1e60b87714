"""A coordinator that is stopped or hangs is replaced, and what happened meanwhile is made good."""

import os
import select
import signal
from pathlib import Path

import pytest
from conftest import STEPS
from drive import Deed, Driver
from harness import TINY, finish, leftovers, start, wait_for

from holdfast.coordinator.service.store import Store
from holdfast.engines.coordinator_supervisor import Look, Silence
from holdfast.protocol.job_options import Timing
from holdfast.protocol.network.endpoint import read_endpoint

HANGING = str(Path(__file__).parent / "hanging")


def hang(job_dir, number):
    """The coordinator hangs, and then a worker is killed."""

    def deed(client, status):
        store = Store(job_dir / "job.sqlite", read_only=True)
        pids = {e.fields["worker"]: e.fields["pid"] for e in store.events() if e.kind == "worker-started"}
        store.close()
        victim = next(w.worker for w in status.workers if w.rank == 1)
        os.kill(read_endpoint(job_dir).pid, number)
        os.kill(pids[victim], signal.SIGKILL)

        async def done():
            return None

        return done()

    return deed


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "why"),
    [
        (signal.SIGSTOP, "its process has been stopped"),
        pytest.param(signal.SIGUSR2, "its event loop has not run", marks=pytest.mark.nightly),
        pytest.param(signal.SIGUSR1, "its event loop has not run", marks=pytest.mark.nightly),
    ],
    ids=["stopped", "waiting", "busy"],
)
def test_a_coordinator_that_hangs_is_replaced_and_a_worker_killed_meanwhile_too(
    tmp_path, monkeypatch, undisturbed, number, why
):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([HANGING, os.environ.get("PYTHONPATH", "")]))
    process = start(tmp_path, "--nnodes", 3, "--spares", 1, "--detection", 1, TINY, STEPS)
    job_dir = tmp_path / "jobs" / "job"
    wait_for(process, "generation 1")
    with Driver(job_dir, [Deed(hang(job_dir, number), after=30)]):
        ran = finish(process, tmp_path)
    assert ran.code == 0, ran.output[-3000:]
    assert f"killing the coordinator: {why}" in ran.output
    assert {"the coordinator was lost"} <= {x["cause"] for x in ran.fields("incident-opened")}
    assert ran.report["steps"]["lost"] == 0
    assert ran.report["final"] == undisturbed.report["final"]
    assert ran.losses() == undisturbed.losses()


def suspend(home, launcher, seconds):
    """Everything of the job is stopped for a while, and goes on: the launcher first, which finds the others silent."""

    async def deed(client, status):
        handles = {pid: os.pidfd_open(pid) for pid in leftovers(home)}
        for handle in handles.values():
            signal.pidfd_send_signal(handle, signal.SIGSTOP)
        select.select([], [], [], seconds)  # nothing of it can tell that time passes
        for pid in sorted(handles, key=lambda pid: pid != launcher):
            signal.pidfd_send_signal(handles[pid], signal.SIGCONT)
            os.close(handles[pid])

    return deed


@pytest.mark.nightly
def test_a_job_that_was_suspended_goes_on(tmp_path, undisturbed):
    """For longer than a stopped, or hanging, coordinator is given."""
    timing = Timing(0.5)
    process = start(tmp_path, "--nnodes", 3, "--detection", timing.detection_s, TINY, STEPS)
    job_dir = tmp_path / "jobs" / "job"
    wait_for(process, "generation 1")
    with Driver(job_dir, [Deed(suspend(tmp_path, process.pid, 2 * timing.hang_s), after=30)]):
        ran = finish(process, tmp_path)
    assert ran.code == 0, ran.output[-3000:]
    assert "killing the coordinator" not in ran.output
    assert "the coordinator ended" not in ran.output
    assert "node-lost" not in ran.kinds()
    assert ran.report["final"] == undisturbed.report["final"]
    assert ran.losses() == undisturbed.losses()


RUNS, WAITS, DISK, STOPPED = "R", "S", "D", "T"
LONG = 1000


def told(*looks):
    """What is said of a coordinator after looks of (spoke, state, seconds of the processor since the last one)."""
    silence, used_s = Silence(Timing()), 0.0
    for spoke, state, more_s in looks:
        used_s += more_s
        silence.looked(spoke, Look(state, used_s))
    return silence.verdict()


def test_silence_counts_as_long_as_it_was_looked_at():
    """A launcher that was stopped, or came late, looks once."""
    beats = int(Timing().hang_s / Silence(Timing()).every_s)
    silent = [(False, WAITS, 0.0)] * (beats - 1)
    assert told((True, WAITS, 0.0), *silent) is None
    assert told((True, WAITS, 0.0), *silent, (True, WAITS, 0.0), *silent) is None
    assert told((True, WAITS, 0.0), *silent, (False, WAITS, 0.0)) is not None


def test_a_coordinator_that_gets_no_processor_or_waits_for_a_disk_does_not_hang():
    assert told((True, RUNS, 0.1), *[(False, RUNS, 0.001)] * LONG) is None
    assert told((True, RUNS, 0.1), *[(False, DISK, 0.0)] * LONG) is None
    assert told((True, RUNS, 0.1), *[(False, RUNS, 0.5)] * 20) is not None


def test_a_start_takes_as_long_as_it_takes_unless_it_is_stopped():
    assert told(*[(False, WAITS, 0.0)] * LONG) is None
    assert told(*[(False, STOPPED, 0.0)] * 3) is None
    assert told(*[(False, STOPPED, 0.0)] * 4) is not None
    assert told(*[(False, STOPPED, 0.0)] * 3, (False, WAITS, 0.0), (False, STOPPED, 0.0)) is None
