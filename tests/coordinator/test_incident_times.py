"""For how long an incident stopped training, where it did so more than once."""

from __future__ import annotations

import pytest
from desk import Desk, running
from findings import ERROR, finds, train_on
from prometheus_client.parser import text_string_to_metric_families

from holdfast.coordinator.kernel import incidents
from holdfast.coordinator.service.metrics import metrics_text
from holdfast.observe.tables import stood_s
from holdfast.protocol.health import Remedy
from reports import incident_of


def strikes(desk: Desk, first_step_s: float = 0.0) -> float:
    """A rule finds something on n1, whose worker then dies; its successor is ready so much later. Returns the stall."""
    finds(desk, "n1", "ecc", ERROR, Remedy.WATCH)
    desk.exits(desk.worker_on("n1"), -9)
    died_s = desk.now
    for worker in desk.members():
        if not worker.startswith("n1"):
            desk.parks(worker, desk.state.membership.committed)
    desk.wait(first_step_s)
    desk.ready(desk.worker_on("n1"))
    assert desk.worker_on("n1") in desk.members()
    desk.commit(desk.state.membership.committed + 1)
    return desk.now - died_s


def stalls_in_metrics(desk: Desk) -> tuple[float, float]:
    """How many, and for how long."""
    families = text_string_to_metric_families(metrics_text(desk.state, desk.tally(), desk.now).decode())
    seen = {s.name: s.value for f in families for s in f.samples if s.labels.get("kind") == "health"}
    name = "holdfast_incident_stall_seconds"
    return seen[f"{name}_count"], seen[f"{name}_sum"]


def test_an_incident_that_strikes_again_stalls_for_as_long_as_nobody_trained():
    desk = running(3, wait_for_spare=True)
    strikes(desk, 0.6)
    [incident] = desk.incidents()
    first = incidents.shown(desk.state, incident)
    for _ in range(20):
        desk.wait(1.0)
        desk.commit(desk.state.membership.committed + 1)
    took_s = strikes(desk, 0.5)
    assert desk.incidents() == [incident]
    told = incidents.shown(desk.state, incident)
    assert told["stall_s"] == pytest.approx(took_s, abs=0.05)
    assert told["decide_s"] <= told["stall_s"] <= told["full_strength_s"] < 1.0
    assert (told["earlier_stalls"], told["earlier_stall_s"]) == (1, first["stall_s"])
    assert stood_s(incident_of(told)) == pytest.approx(first["stall_s"] + took_s, abs=0.05)


def test_each_stall_counts_once_in_the_metrics_which_never_go_back():
    desk = running(3, wait_for_spare=True)
    first_s = strikes(desk, 0.6)
    assert stalls_in_metrics(desk) == (1, pytest.approx(first_s, abs=0.05))
    desk.wait(20.0)
    desk.commit(desk.state.membership.committed + 1)
    assert stalls_in_metrics(desk) == (1, pytest.approx(first_s, abs=0.05))
    second_s = strikes(desk)
    assert stalls_in_metrics(desk) == (2, pytest.approx(first_s + second_s, abs=0.05))


def test_an_incident_that_strikes_again_before_full_strength_has_two_stalls():
    desk = running(3, min_nodes=1)
    finds(desk, "n1", "ecc", ERROR, Remedy.WATCH)
    desk.exits(desk.worker_on("n1"), -9)
    for node in ("n0", "n2"):
        desk.parks(desk.worker_on(node), desk.state.membership.committed)
    desk.commit(desk.state.membership.committed + 1)  # two go on
    [incident] = desk.incidents()
    assert incident.open
    assert incident.first_commit_at_s is not None
    first = incidents.shown(desk.state, incident)["stall_s"]
    newcomer = desk.worker_on("n1")
    desk.ready(newcomer)
    desk.commit(desk.state.membership.committed + 1)
    for worker in desk.members():
        desk.parks(worker, desk.state.membership.committed)
    assert newcomer in desk.members()
    desk.exits(newcomer, -9)  # before a step was committed with it
    told = incidents.shown(desk.state, incident)
    assert (told["stall_s"], told["earlier_stalls"], told["earlier_stall_s"]) == (None, 1, first)


def test_training_that_went_on_after_a_finding_is_no_part_of_the_stall():
    desk = running(3, spares=1)
    finds(desk, "n1", "ecc", ERROR, Remedy.WATCH)
    desk.wait(0.8)
    desk.commit(desk.state.membership.committed + 1)
    desk.wait(0.8)
    died_s = desk.now
    desk.exits(desk.worker_on("n1"), -9)
    train_on(desk)
    [incident] = desk.incidents()
    assert incidents.shown(desk.state, incident)["stall_s"] == pytest.approx(desk.now - died_s, abs=0.05)


def test_a_fault_that_stopped_training_as_it_was_found_stalls_from_then_on():
    desk = running(3, spares=1)
    finds(desk, "n1", "ecc", ERROR, Remedy.WATCH)
    found_s = desk.now
    desk.wait(1.6)
    desk.exits(desk.worker_on("n1"), -9)
    train_on(desk)
    [incident] = desk.incidents()
    assert incidents.shown(desk.state, incident)["stall_s"] == pytest.approx(desk.now - found_s, abs=0.05)
