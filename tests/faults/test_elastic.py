"""Jobs that grow and shrink while they train, with real processes."""

import os
import signal
from collections import Counter
from contextlib import closing
from itertools import groupby

import pytest
from conftest import STEPS
from drive import Deed, Driver, drain, engine, fault, resize, stop
from harness import TINY, finish, leftovers, run, start
from test_life import wait_for

from holdfast.coordinator.service.store import Store
from holdfast.engines.starts import all_starts

FOR_EVER = 1_000_000


def drive(home, deeds, *args, tell=()):
    """One job to which things are done while it runs; the last of them is to stop it."""
    process = start(home, *args, TINY, FOR_EVER, *tell)
    wait_for(process, "waiting for nodes")  # the job's folder is there
    with Driver(home / "jobs" / "job", deeds) as driver:
        ran = finish(process, home)
    assert not driver.left, f"{len(driver.left)} deeds were not done:\n{ran.output[-3000:]}"
    is_whole(ran)
    return ran


def sizes(ran):
    return [world for _, world in ran.report["world"]["history"]]


def is_whole(ran):
    """Every step was committed once, and nothing counted as a failure."""
    assert ran.report["outcome"] in ("finished", "stopped"), ran.output[-3000:]
    assert ran.steps() == list(range(ran.report["steps"]["committed"]))
    assert ran.report["steps"]["lost"] == 0
    assert ran.report["incidents"] == []
    assert all(change["stall_s"] is not None for change in ran.report["changes"])


def warned(home, within_s=None):
    """How often each worker's script was told what: by worker and words. within_s: all were told that so long is left at
    most."""
    told = [
        (log.stem, *line.split("warned of ")[1].split("; left: "))
        for log in (home / "jobs" / "job" / "logs").rglob("*.log")
        for line in log.read_text().splitlines()
        if "warned of " in line
    ]
    if within_s is not None:
        assert all(0 < float(left) <= within_s for _, _, left in told), told
    return Counter((worker, text) for worker, text, _ in told)


@pytest.mark.nightly  # test_exact_elastic has it, among other things
def test_a_job_shrinks_and_grows_between_steps(tmp_path):
    deeds = [Deed(resize(1), 20, 3), Deed(resize(3), 20, 1), Deed(stop(), 20, 3)]
    ran = drive(tmp_path, deeds, "--nnodes", "1:3")
    assert sizes(ran)[:2] == [3, 1]
    assert ran.kinds().count("resize") == 2
    assert ran.kinds().count("node-left") == 2


@pytest.mark.long
def test_a_drained_node_and_a_preempted_one_are_replaced(tmp_path):
    deeds = [Deed(drain(1), 20, 3), Deed(fault("preempt-node:rank=0"), 20, 3), Deed(stop(), 200, 3)]
    ran = drive(tmp_path, deeds, "--nnodes", "1:3", "--spares", 1, tell=["--warn"])
    assert sizes(ran)[:2] == [3, 3]  # the spare was ready
    told = warned(tmp_path)
    assert [text for _, text in told].count("the job: stop") == 3
    # Those that left at once, for the spare was ready, may have done so before they heard of it.
    assert set(told.values()) == {1}
    assert [f["reason"] for f in ran.fields("node-leaving")] == ["test", "SIGTERM"]


@pytest.mark.long
def test_sigterm_to_an_agent_is_a_drain(tmp_path):
    process = start(tmp_path, "--nnodes", "1:2", TINY, 600, "--warn")
    wait_for(process, "generation 1")
    agents = [pid for pid, command in leftovers(tmp_path).items() if "--node=node1" in command]
    os.kill(agents[0], signal.SIGTERM)
    ran = finish(process, tmp_path)
    is_whole(ran)
    assert ran.fields("node-leaving")[0] == {
        "node": "node1",
        "reason": "SIGTERM",
        "within_s": 30.0,
        "cause": "preemption",
    }
    # Nobody can take its place yet, so it trains on and hears of it.
    assert [(w[:5], text, n) for (w, text), n in warned(tmp_path, within_s=30).items()] == [
        ("node1", "the node: preemption", 1)
    ]


@pytest.mark.nightly
def test_less_capacity_than_the_minimum_ends_the_job_with_its_state_saved(tmp_path, undisturbed):
    body = '{"type": "capacity", "nodes": 1, "within_s": 30, "reason": "preempted by job 17"}'
    process = start(tmp_path, "--nnodes", 3, TINY, 150)
    wait_for(process, "waiting for nodes")
    with Driver(tmp_path / "jobs" / "job", [Deed(engine(body))]):
        first = finish(process, tmp_path)
    assert first.report["outcome"] == "stopped", first.output[-3000:]
    assert "1 of at least 3 nodes" in first.report["reason"]
    losses = first.losses()
    second = run(tmp_path, "--nnodes", 3, TINY, 150)
    assert second.report["final"] == undisturbed.report["final"]
    assert losses + second.losses() == undisturbed.losses()
    with closing(Store(second.job_dir / "job.sqlite", read_only=True)) as store:
        together = all_starts(second.job_dir, store)
    assert (together["starts"], together["recomputed_s"]) == (2, 0.0)  # its state was saved
    made = [ran.report["goodput"] for ran in (first, second)]
    assert together["productive_s"] == pytest.approx(sum(one["productive_s"] for one in made), abs=0.01)
    assert together["wall_s"] == pytest.approx(sum(one["wall_s"] for one in made), abs=1.0)


def test_scripts_that_want_to_know_are_told(tmp_path):
    deeds = [Deed(resize(1), 20, 2), Deed(resize(2), 20, 1), Deed(stop(), 20, 2)]
    ran = drive(tmp_path, deeds, "--nnodes", "1:2", tell=["--tell"])
    lines = [line.split("resized ")[1] for line in ran.output.splitlines() if "resized " in line]
    told = [line for line, _ in groupby(lines)]  # at the start rank 0 may change its place
    expected = [f"{n} workers, {12 // n} micro-batches here" for n in (2, 1, 2)]
    assert told == expected, ran.output[-3000:]


@pytest.mark.long
def test_a_library_that_makes_a_process_group_on_sight_finds_a_world_of_one(tmp_path, undisturbed):
    """Of all workers it would be a group that cannot lose one of them, and a newcomer would wait in it for ever."""
    fault = ("--fault", "kill-worker:rank=1,step=20")
    ran = run(tmp_path, "--nnodes", 3, "--spares", 1, *fault, TINY, STEPS, "--library")
    assert ran.report["outcome"] == "finished", ran.output[-3000:]
    assert ran.losses() == undisturbed.losses()
    logs = "".join(path.read_text() for path in ran.job_dir.rglob("*.log"))
    assert logs.count("library: rank 0 of 1\n") >= 4, logs


@pytest.mark.nightly
def test_workers_without_a_micro_batch_are_spares(tmp_path):
    ran = run(tmp_path, "--nnodes", "1:3", "--fault", "kill-worker:rank=1,step=8", TINY, STEPS, "--few")
    assert ran.report["outcome"] == "finished", ran.output[-3000:]
    assert ran.steps() == list(range(STEPS))
    assert set(sizes(ran)) <= {1, 2}
    assert ran.report["world"]["target"] == 2
    assert ran.fields("few-micro-batches") == [{"micro_batches": 2, "workers": 2, "wanted": 3}]


@pytest.mark.long
def test_a_job_of_one_size_needs_a_micro_batch_for_each_worker(tmp_path):
    ran = run(tmp_path, "--nnodes", 3, TINY, STEPS, "--few")
    assert ran.code != 0
    assert "2 micro-batches are too few for 3 workers" in ran.output


@pytest.mark.long
def test_a_newcomer_with_other_data_is_set_aside_for_the_next(tmp_path, monkeypatch):
    monkeypatch.setenv("OTHER_DATA_ON", "node2")  # the first one in the place of another
    given = ("--nnodes", 2, "--fault", "kill-node:rank=1,step=8")
    ran = run(tmp_path, *given, TINY, STEPS)
    assert ran.report["outcome"] == "finished", ran.output[-3000:]
    assert ran.steps() == list(range(STEPS))
    (lost,) = [x for x in ran.fields("node-lost") if x["node"] == "node2"]
    assert "Seed your split" in lost["cause"]
