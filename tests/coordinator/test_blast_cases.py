"""The nodes taken together: how many are acted on, what becomes of those that were left alone, and storms."""

from __future__ import annotations

from desk import Desk, running
from findings import ERROR, come_back, finds, marked, park_all, train_on, verdicts

from holdfast.coordinator.health import limits
from holdfast.coordinator.kernel import events as e
from holdfast.protocol import messages as m
from holdfast.protocol.health import Condition, Remedy
from holdfast.protocol.job_options import HealthSpec, Timing

PATIENT = Timing(detection_s=60.0)

# ---------------------------------------------------------------- the limit


def test_no_more_nodes_than_the_blast_limit_are_acted_on_and_that_is_said_once():
    desk = running(8)
    for i in range(5):
        finds(desk, f"n{i}", f"xid-{i}")
    assert limits.nodes_at_once(desk.core) == 2
    assert marked(desk) == ["n0", "n1"]
    assert verdicts(desk)[2:] == [("watch", "blast")] * 3
    assert len(desk.records("blast-limit")) == 1
    assert not any(i.open for i in desk.incidents()[2:])


def left_alone(rule: str = "xid-62", node: str = "n1", **more: object) -> Desk:
    """A job whose limit is reached, and one more node of which a fault was found."""
    desk = running(4, spares=1)
    finds(desk, "n0")
    train_on(desk)
    finds(desk, node, rule, **more)
    assert marked(desk) == ["n0"]
    assert verdicts(desk)[-1] == ("watch", "blast")
    return desk


def test_what_was_left_alone_is_done_when_the_window_has_passed():
    desk = left_alone()
    told = desk.records("verdict")[-1]
    assert 599.0 < told["again_s"] < 600.0
    desk.wait(598.0)
    assert marked(desk) == ["n0"]
    desk.wait(3.0)
    assert marked(desk) == ["n0", "n1"]
    assert verdicts(desk)[-2:] == [("watch", "blast"), ("replace", "")]
    assert len(desk.incidents()) == 2


def test_of_those_that_were_left_alone_one_is_done_in_a_window_the_worst_first():
    desk = running(4, spares=1)
    finds(desk, "n0")
    train_on(desk)
    finds(desk, "n1", "ecc", ERROR)
    desk.wait(2.1)
    finds(desk, "n2", "xid-62")
    assert verdicts(desk)[1:] == [("watch", "blast")] * 2
    desk.wait(601.0)
    assert marked(desk) == ["n0", "n2"]
    assert verdicts(desk)[-1] == ("watch", "blast")  # said again, of the other
    train_on(desk)
    desk.wait(601.0)
    assert verdicts(desk)[-1] == ("replace", "")
    assert desk.state.membership.nodes["n1"].leaving


def test_what_is_well_again_meanwhile_is_let_be():
    desk = left_alone("link-down")
    finds(desk, "n1", "link-down", condition=Condition.HEALTHY)
    desk.wait(700.0)
    assert marked(desk) == ["n0"]
    assert verdicts(desk)[-1] == ("watch", "well")


def test_what_a_person_says_is_well_is_let_be():
    desk = left_alone()
    desk.do(e.MachineCleared("n1"))
    desk.wait(700.0)
    assert marked(desk) == ["n0"]
    assert verdicts(desk)[-1] == ("watch", "cleared")


def test_what_turns_out_to_be_a_storm_is_not_tried_again():
    desk = left_alone("link-down")
    for node in ("n2", "n3"):
        finds(desk, node, "link-down")
    desk.wait(700.0)
    assert marked(desk) == ["n0"]
    assert verdicts(desk)[-1] == ("watch", "storm")


def test_what_workers_said_must_have_been_said_lately():
    desk = running(4, spares=1)
    finds(desk, "n0")
    train_on(desk)
    for _ in range(2):
        finds(desk, "n1", "nan", source="worker")
    assert verdicts(desk)[-1] == ("watch", "blast")
    desk.wait(601.0)
    assert marked(desk) == ["n0"]
    assert verdicts(desk)[-1] == ("watch", "past")


def test_what_a_repair_since_has_cured_is_not_repaired_again():
    desk = left_alone("hot", remedy=Remedy.RESET_DEVICE)
    desk.wait(300.0)
    desk.state.health.acts.clear()  # as if the window were over: another fault of the same device is acted on
    finds(desk, "n1", "xid-95", remedy=Remedy.RESET_DEVICE)
    assert verdicts(desk)[-1] == ("reset-device", "")
    park_all(desk)
    desk.exits(
        next(w.name for w in desk.state.membership.workers.values() if w.node == "n1" and not w.exited), -9
    )
    request = next(a.request for a in desk.state.health.acts)
    desk.do(e.NodeSays("n1", m.Repaired(request)))
    desk.wait(400.0)
    assert verdicts(desk)[-1] == ("watch", "done")


def test_a_coordinator_that_comes_back_still_tries_again():
    desk = left_alone()
    desk.crash()
    desk.back()
    desk.wait(601.0)
    assert marked(desk) == ["n0", "n1"]


def test_the_limit_of_a_large_fleet_holds():
    desk = Desk(400, timing=PATIENT)
    for i in range(400):
        desk.node(f"n{i}")
    for i in range(200):
        finds(desk, f"n{i}", f"rule-{i}")
    assert len(marked(desk)) == len(limits.acted_on(desk.core)) == 100


# ---------------------------------------------------------------- storms


def test_the_same_on_many_nodes_is_the_network_s():
    desk = running(8)
    for i in range(5):
        finds(desk, f"n{i}", "link-down", ERROR)
    desk.wait(3.0)
    assert marked(desk) == []
    assert not any(n.leaving for n in desk.state.membership.nodes.values())
    [storm] = desk.records("storm")
    assert (storm["nodes"], storm["of"]) == (3, 8)
    assert {against for _, against in verdicts(desk)} == {"storm"}
    assert not any(i.open or i.due_s for i in desk.incidents())


def test_what_was_planned_is_called_off_when_many_report_the_same():
    desk = running(4, wait_for_spare=True)
    finds(desk, "n0", "link-down", ERROR)
    desk.wait(3.0)
    assert desk.state.membership.nodes["n0"].leaving
    for i in (1, 2):
        finds(desk, f"n{i}", "link-down", ERROR)
    assert desk.state.membership.nodes["n0"].leaving is None
    assert desk.records("node-stays")
    assert limits.acted_on(desk.core) == set()


def test_machines_that_were_replaced_since_count_on_both_sides():
    desk = running(4, health=HealthSpec(blast_radius="50%", blast_window_s=5.0))
    finds(desk, "n0", "link-down")
    for name in ("m1", "m2"):
        come_back(desk, name, identity=name.upper())
        desk.wait(6.0)
        finds(desk, name, "link-down")
    assert marked(desk) == ["n0", "m1", "m2"]  # three of the six that were there
    assert len(desk.core.alive_nodes()) < 6
    assert not desk.records("storm")


def test_a_storm_of_a_large_fleet_is_seen_though_one_node_talks_without_end():
    desk = Desk(300, timing=PATIENT)
    for i in range(300):
        desk.node(f"n{i}")
    for i in range(76):
        finds(desk, f"n{i}", "link-down", ERROR)
        finds(desk, "n299", f"chatter-{i % 3}", ERROR, Remedy.WATCH)
    [storm] = desk.records("storm")
    assert (storm["nodes"], storm["of"]) == (76, 300)
