"""What a user's rules over workers' logs lead to: what they call a fault is one at once, within the usual limits."""

from __future__ import annotations

import pytest
from desk import running
from findings import ERROR, WIDE, finds, log_says, marked, train_on, verdicts

from holdfast.coordinator.kernel import events as e
from holdfast.protocol.health import Remedy
from holdfast.protocol.job_options import HealthSpec


def restarted(desk):
    """The killed workers are gone, and new ones are members."""
    for worker in sorted(desk.killed()):
        if not desk.known(worker).exited:
            desk.exits(worker, -9)
    for worker in desk.workers():
        if desk.known(worker).ready is None:
            desk.ready(worker)
    train_on(desk)
    desk.commit(desk.state.membership.committed + 1)


def test_a_fault_on_match_ends_its_worker_at_the_first_line():
    desk = running(2, nproc=2)
    worker = desk.worker_on("n1")
    log_says(desk, worker)
    assert verdicts(desk) == [("restart-worker", "")]
    assert desk.killed() == {worker}  # not the other one of its node
    restarted(desk)
    [incident] = desk.incidents()
    assert not incident.open
    assert desk.state.membership.restarts_used == 1


def test_what_does_not_say_how_much_is_a_fault_must_come_again():
    desk = running(4, spares=1)
    log_says(desk, desk.worker_on("n1"), firm=False, remedy=Remedy.REPLACE)
    desk.wait(3.0)
    assert verdicts(desk) == [("watch", "canary")]
    log_says(desk, desk.worker_on("n1"), firm=False, remedy=Remedy.REPLACE)
    desk.wait(3.0)
    assert verdicts(desk)[-1] == ("replace", "")


def test_two_workers_of_one_node_that_say_it_both_end():
    desk = running(2, nproc=2)
    both = sorted(w for w in desk.members() if w.startswith("n1"))
    for worker in both:
        log_says(desk, worker)
    assert sorted(desk.killed()) == both
    assert verdicts(desk) == [("restart-worker", "")]
    assert len(desk.incidents()) == 1


def test_a_new_worker_that_says_it_too_climbs():
    desk = running(2, nproc=2, health=WIDE)
    for _ in range(3):
        log_says(desk, desk.worker_on("n1"))
        restarted(desk)
    assert [does for does, _ in verdicts(desk)] == ["restart-worker", "restart-worker", "reset-device"]
    assert len(desk.incidents()) == 3


def test_an_echo_of_a_worker_that_was_ended_is_nothing_new():
    desk = running(2)
    worker = desk.worker_on("n1")
    for _ in range(3):
        log_says(desk, worker)
    assert verdicts(desk) == [("restart-worker", "")]
    assert len(desk.incidents()) == 1


def test_a_replacement_that_a_log_asks_for_keeps_to_the_blast_radius():
    desk = running(4, spares=2)
    for node in ("n0", "n1"):
        log_says(desk, desk.worker_on(node), remedy=Remedy.REPLACE)
    assert verdicts(desk) == [("replace", ""), ("watch", "blast")]
    train_on(desk)
    desk.commit(desk.state.membership.committed + 1)
    assert marked(desk) == ["n0"]


def test_restarts_keep_to_the_budget():
    desk = running(3, max_restarts=0)
    log_says(desk, desk.worker_on("n1"))
    restarted(desk)
    log_says(desk, desk.worker_on("n2"))
    assert verdicts(desk) == [("restart-worker", ""), ("watch", "budget")]
    assert len(desk.records("asked")) == 1
    assert len(desk.killed()) == 1


def test_the_same_on_many_nodes_is_a_storm():
    desk = running(6)
    for i in range(5):
        log_says(desk, desk.worker_on(f"n{i}"), remedy=Remedy.REPLACE)
    assert verdicts(desk)[-1] == ("watch", "storm")
    assert len(desk.records("storm")) == 1
    desk.wait(3.0)
    desk.commit(desk.state.membership.committed + 1)
    assert marked(desk) == []  # what was planned for the first one is called off


def test_on_trial_it_is_only_said():
    desk = running(3)
    log_says(desk, desk.worker_on("n1"), dry_run=True)
    assert not desk.killed()
    [verdict] = desk.records("verdict")
    assert (verdict["would"], verdict["against"]) == ("restart-worker", "trial")


def test_a_firm_line_is_decided_though_something_soft_was_there_before():
    desk = running(4, spares=1)
    finds(desk, "n1", "slow", ERROR, Remedy.REPLACE, source="peers")
    log_says(desk, desk.worker_on("n1"))
    assert verdicts(desk) == [("restart-worker", "")]


def test_a_successor_decides_what_had_to_wait_as_firmly():
    health = HealthSpec(blast_window_s=60.0)
    desk = running(4, spares=2, health=health)
    finds(desk, "n0")
    train_on(desk)
    log_says(desk, desk.worker_on("n1"), remedy=Remedy.REPLACE)
    assert verdicts(desk)[-1] == ("watch", "blast")
    desk.crash()
    desk.back()
    desk.wait(62.0)
    assert verdicts(desk)[-1] == ("replace", "")


@pytest.mark.parametrize("told", ["before", "after"])
def test_a_worker_that_said_it_and_died_is_one_incident(told):
    desk = running(2)
    worker = desk.worker_on("n1")
    if told == "before":
        log_says(desk, worker)
    desk.exits(worker, 1)
    if told == "after":
        log_says(desk, worker)
    [incident] = desk.incidents()
    assert incident.rule == "ours"
    restarted(desk)
    assert not incident.open
    assert len(desk.incidents()) == 1
    assert not desk.did(e.MarkNode)
