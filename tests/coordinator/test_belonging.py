"""Which entries of the ledger belong to an incident: by what they name, and not by when they were written."""

from __future__ import annotations

import pytest
from desk import Desk, running
from findings import ERROR, finds, train_on

from holdfast.coordinator.kernel import events as e
from holdfast.observe.incident_report import belonging
from holdfast.protocol.causes import ConnectionClosed
from holdfast.protocol.health import Remedy, Severity
from holdfast.protocol.messages import CollectiveError, KillWorker


def entries(desk: Desk) -> list[dict[str, object]]:
    records = [a for a in desk.actions if isinstance(a, e.Record)]
    return [{"seq": n, "t_s": 0.0, "kind": r.kind, "fields": r.fields} for n, r in enumerate(records)]


def told(desk: Desk, number: int) -> set[tuple[str, object]]:
    """Kinds of an incident's entries, and whom they are about."""
    found = belonging(number, entries(desk))
    return {(x["kind"], x["fields"].get("worker") or x["fields"].get("node")) for x in found}  # type: ignore[attr-defined]


def test_two_faults_of_one_moment_have_each_their_own_entries():
    desk = running(4, spares=2)
    desk.node("n4")
    desk.node("n5")
    first, second = desk.worker_on("n1"), desk.worker_on("n2")
    desk.do(e.NodeLost("n1", desk.state.membership.nodes["n1"].session, ConnectionClosed()), 0.0)
    desk.exits(second, -9)
    assert [i.node for i in desk.incidents()] == ["n1", "n2"]
    one, two = told(desk, 1), told(desk, 2)
    assert ("node-lost", "n1") in one
    assert ("worker-exited", second) in two
    assert not {x for x in one if x[1] in ("n2", second)}
    assert not {x for x in two if x[1] in ("n1", first)}
    # Both broke the same generation, and the next one follows from both.
    train_on(desk)
    assert {"broke", "formed"} <= {kind for kind, _ in told(desk, 1)} & {kind for kind, _ in told(desk, 2)}


def test_a_repair_that_is_carried_out_much_later_belongs_to_the_incident_that_it_is_for():
    desk = running(3, spares=1)
    desk.node("n3")
    finds(desk, "n1", "ecc", ERROR, Remedy.REPLACE)
    desk.wait(60.0)
    finds(desk, "n2", "fan", Severity.WARNING, Remedy.WATCH)
    desk.ready(desk.worker_on("n3"))
    train_on(desk)
    desk.wait(60.0)
    mine = told(desk, 1)
    assert {("finding", "n1"), ("verdict", "n1"), ("node-leaving", "n1"), ("node-left", "n1")} <= mine
    assert not {x for x in mine if x[1] == "n2"}


@pytest.mark.parametrize(("severity", "explains"), [(Severity.INFO, False), (Severity.WARNING, True)])
@pytest.mark.parametrize("before", [True, False])
def test_what_is_only_to_be_watched_is_no_cause_of_an_end(severity: Severity, explains: bool, before: bool):
    desk = running(3)
    worker = desk.worker_on("n1")
    if before:
        finds(desk, "n1", "throttled", severity, Remedy.WATCH, worker=worker)
    desk.exits(worker, -9)
    if not before:
        finds(desk, "n1", "throttled", severity, Remedy.WATCH, worker=worker)
    [incident] = desk.incidents()
    assert (incident.rule == "throttled") is explains
    assert ("SIGKILL" in str(incident.cause)) is not explains


def test_what_a_rule_found_is_decided_before_the_next_generation_is_formed():
    """A break that names nobody is the effect of what was found: whom the remedy ends is not taken in first."""
    desk = running(3)
    sick = desk.worker_on("n1")
    finds(desk, "n1", "restart-later", ERROR, Remedy.RESTART_WORKER)
    members = desk.members()
    for worker in members:
        desk.says(
            worker, CollectiveError(generation=desk.state.membership.number, step=0, detail="reset by peer")
        )
    for worker in members:
        desk.parks(worker, desk.state.membership.committed)
    assert sick in [a.message.worker for a in desk.did(e.Send) if isinstance(a.message, KillWorker)]
    assert sick not in [name for formed in desk.records("formed")[1:] for name in formed["workers"]]
    assert desk.state.membership.number == 2
