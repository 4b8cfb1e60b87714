"""What is made of findings: cases, one core each."""

from __future__ import annotations

import msgspec
import pytest
from desk import Desk, running
from findings import (
    ERROR,
    FATAL,
    WARNING,
    WIDE,
    come_back,
    finds,
    marked,
    park_all,
    train_on,
    verdicts,
)

from holdfast.coordinator.kernel import events as e
from holdfast.coordinator.kernel import incidents
from holdfast.coordinator.kernel.history import RecordKind, Remembered
from holdfast.coordinator.kernel.state import Incident
from holdfast.protocol import messages as m
from holdfast.protocol.engine_orders import EngineTraits
from holdfast.protocol.health import CheckResult, Condition, Remedy, Severity
from holdfast.protocol.job_options import HealthSpec

# ---------------------------------------------------------------- one incident


def test_a_fatal_finding_breaks_the_generation_and_replaces_the_node():
    desk = running(3, spares=1)
    finds(desk, "n1")
    assert not desk.state.membership.nodes["n1"].alive
    assert marked(desk) == ["n1"]
    assert verdicts(desk) == [("replace", "")]
    [incident] = desk.incidents()
    assert str(incident.cause) == "xid-79: xid-79 was seen"
    assert (incident.quiet, incident.ranks, incident.rule) == (False, [1], "xid-79")
    train_on(desk)
    assert not incident.open
    assert {w.partition(".")[0] for w in desk.members()} == {"n0", "n2", "n3"}


def test_a_finding_and_then_a_dead_worker_are_one_incident_with_the_finding_as_its_cause():
    desk = running(3, spares=1)
    finds(desk, "n1", "xid-48", ERROR)
    worker = desk.worker_on("n1")
    desk.exits(worker, -9)
    [incident] = desk.incidents()
    assert str(incident.cause) == "xid-48: xid-48 was seen"
    assert [x.text for x in incident.evidence] == ["xid-48 was seen", "killed by signal 9 (SIGKILL)"]
    assert not incident.quiet
    assert verdicts(desk) == [("replace", "")]  # not only a new worker
    assert desk.records("incident-joined")
    train_on(desk)
    assert not incident.open


def test_a_dead_worker_and_then_a_finding_are_one_incident_too():
    desk = running(3, spares=1)
    desk.exits(desk.worker_on("n1"), -6)
    finds(desk, "n1")
    [incident] = desk.incidents()
    assert str(incident.cause) == "xid-79: xid-79 was seen"
    assert desk.records("incident-explained")[0]["was"] == "killed by signal 6 (SIGABRT)"
    assert marked(desk) == ["n1"]
    assert not desk.state.membership.nodes["n1"].alive
    train_on(desk)
    assert not incident.open


def test_a_finding_after_training_went_on_still_explains_and_still_replaces():
    desk = running(3, spares=1)
    desk.exits(desk.worker_on("n1"), -6)
    train_on(desk)
    assert not desk.incidents()[0].open
    finds(desk, "n1")
    assert len(desk.incidents()) == 1
    assert not desk.state.membership.nodes["n1"].alive


def test_a_failed_collective_is_explained_by_a_link_that_went_down():
    desk = running(3, spares=1)
    finds(desk, "n1", "link-down", ERROR)
    desk.says(desk.worker_on("n0"), m.CollectiveError(1, 5, "reset by peer"))
    park_all(desk)
    [incident] = desk.incidents()
    assert incident.rule == "link-down"
    assert incident.node == "n1"


def test_a_failed_collective_and_then_a_link_down():
    desk = running(3, spares=1)
    desk.says(desk.worker_on("n0"), m.CollectiveError(1, 5, "reset by peer"))
    train_on(desk)
    finds(desk, "n1", "link-down", ERROR)
    [incident] = desk.incidents()
    assert (incident.node, incident.rule) == ("n1", "link-down")


def test_a_lost_node_is_explained_by_what_was_found_before():
    desk = running(3, spares=1)
    finds(desk, "n1", "ecc", ERROR)
    desk.lose("n1")
    [incident] = desk.incidents()
    assert incident.rule == "ecc"
    assert marked(desk) == []  # it was not decided yet, and is gone


def test_findings_of_several_sources_are_one_incident_with_all_evidence():
    desk = running(3, spares=1)
    for source in ("kmsg", "nvml", "dcgm", "kmsg"):
        finds(desk, "n1", "xid-48", ERROR, source=source)
    [incident] = desk.incidents()
    assert [(x.source, x.count) for x in incident.evidence] == [("kmsg", 2), ("nvml", 1), ("dcgm", 1)]
    assert len(desk.records("finding")) == 3


def test_devices_of_one_node_have_incidents_of_their_own():
    desk = running(3, spares=1)
    finds(desk, "n1", "ecc", ERROR, Remedy.WATCH)
    finds(desk, "n1", "ecc", ERROR, Remedy.WATCH, device="GPU-2")
    assert len(desk.incidents()) == 2


def test_a_warning_explains_a_death_but_is_no_incident():
    desk = running(3)
    finds(desk, "n1", "oom-kill", WARNING, Remedy.RESTART_WORKER)
    assert not desk.incidents()
    desk.exits(desk.worker_on("n1"), -9)
    [incident] = desk.incidents()
    assert str(incident.cause) == "oom-kill: oom-kill was seen"
    assert verdicts(desk) == []


def test_what_is_only_watched_explains_nothing():
    desk = running(3)
    finds(desk, "n1", "hot", WARNING, Remedy.WATCH)
    desk.exits(desk.worker_on("n1"), -9)
    assert desk.incidents()[0].rule == ""


# ---------------------------------------------------------------- at a step's edge


def test_an_error_lets_the_node_go_at_a_step_edge():
    desk = running(3, spares=1)
    finds(desk, "n1", "ecc", ERROR)
    assert verdicts(desk) == []  # others may report the same in a moment
    desk.wait(desk.core.timing.detection_s + 0.1)
    assert verdicts(desk) == [("replace", "")]
    assert desk.state.membership.yielding
    train_on(desk)
    desk.commit(desk.state.membership.committed + 1)
    assert marked(desk) == ["n1"]
    assert not desk.state.membership.nodes["n1"].alive
    [incident] = desk.incidents()
    assert incident.quiet
    assert not incident.open
    assert desk.state.membership.lost_steps == desk.state.membership.restarts_used == 0
    assert incidents.shown(desk.state, incident)["stall_s"] is None


def test_without_another_node_it_trains_on_until_there_is_one():
    desk = running(2, wait_for_spare=True)
    finds(desk, "n1", "ecc", ERROR)
    desk.wait(3.0)
    assert desk.did(e.ProvideNode)
    desk.do(e.NodeUnavailable("none"))
    assert desk.records("node-trains-on")
    desk.wait(60.0)
    assert not desk.state.membership.yielding
    desk.commit(20)
    desk.node("n9")
    desk.ready(desk.worker_on("n9"))
    desk.wait(3.0)
    assert desk.state.membership.yielding
    train_on(desk)
    assert not desk.state.membership.nodes["n1"].alive


def test_a_node_that_leaves_while_its_device_is_reset_gets_one_order():
    desk = running(2, spares=1, min_nodes=1)
    finds(desk, "n1", "xid-95", ERROR, Remedy.RESET_DEVICE)
    desk.wait(3.0)
    train_on(desk)
    desk.commit(desk.state.membership.committed + 1)
    desk.exits(
        next(w.name for w in desk.state.membership.workers.values() if w.node == "n1" and not w.exited), -9
    )
    [(_, order)] = desk.sent(m.Repair)
    desk.do(e.NodeGoing("n1", "a person wants it", None))
    desk.wait(5.0)
    assert len(desk.sent(m.Repair)) == 1
    assert desk.state.membership.nodes["n1"].alive
    desk.do(e.NodeSays("n1", m.Repaired(order.request)))
    assert not desk.state.membership.nodes["n1"].alive
    assert not any(i.open for i in desk.incidents())


def test_a_node_that_must_leave_does_not_wait_for_its_reset():
    desk = running(2, spares=1, min_nodes=1)
    finds(desk, "n1", "xid-95", ERROR, Remedy.RESET_DEVICE)
    desk.wait(3.0)
    train_on(desk)
    desk.commit(desk.state.membership.committed + 1)
    desk.exits(
        next(w.name for w in desk.state.membership.workers.values() if w.node == "n1" and not w.exited), -9
    )
    desk.do(e.NodeGoing("n1", "preempted", 10.0))
    desk.wait(11.0)
    assert not desk.state.membership.nodes["n1"].alive
    assert len(desk.sent(m.Repair)) == 1
    assert not any(i.open for i in desk.incidents())


@pytest.mark.parametrize("remedy", [Remedy.REBOOT, Remedy.RESET_DEVICE])
def test_a_node_whose_worker_ends_before_it_could_leave_is_repaired_while_the_others_wait(remedy):
    desk = running(2, wait_for_spare=True)
    finds(desk, "n1", "ecc", ERROR, remedy)
    desk.wait(3.0)
    desk.do(e.NodeUnavailable("none"))
    desk.commit(20)
    assert desk.state.membership.nodes["n1"].health.then is remedy
    assert desk.state.membership.nodes["n1"].leaving
    desk.exits(desk.worker_on("n1"), -9)
    assert not desk.did(e.RebootNode)  # what it has in its memory may be needed yet
    desk.parks(desk.worker_on("n0"), 20)
    if remedy is Remedy.REBOOT:
        assert [a.node for a in desk.did(e.RebootNode)] == ["n1"]
        come_back(desk, "n1", identity="")
    else:
        desk.do(e.NodeSays("n1", m.Repaired(desk.sent(m.Repair)[-1][1].request)))
    desk.ready(desk.worker_on("n1"))
    assert len(desk.members()) == 2
    desk.commit(21)
    assert not any(i.open for i in desk.incidents())


def test_a_fatal_finding_does_not_wait_for_what_was_planned():
    desk = running(2, wait_for_spare=True)
    finds(desk, "n1", "ecc", ERROR)
    desk.wait(3.0)
    finds(desk, "n1", "xid-79")
    assert not desk.state.membership.nodes["n1"].alive
    assert len(desk.incidents()) == 1


def test_a_second_trouble_does_not_weaken_or_forget_what_is_planned():
    desk = running(2, wait_for_spare=True, health=WIDE)
    finds(desk, "n1", "ecc", ERROR)
    desk.wait(3.0)
    finds(desk, "n1", "hot", ERROR, Remedy.RESET_DEVICE, device="GPU-2")
    desk.wait(3.0)
    assert verdicts(desk) == [("replace", "")]
    assert desk.state.membership.nodes["n1"].health.then is Remedy.REPLACE
    finds(desk, "n1", "xid-13", FATAL, Remedy.RESTART_WORKER, device="GPU-3")
    assert verdicts(desk)[-1] == ("replace", "")
    assert not desk.state.membership.nodes["n1"].alive
    assert not any(i.open and i.quiet for i in desk.incidents())


def test_at_level_0_an_error_waits_for_the_next_start():
    desk = Desk(2, spares=1)
    for i in range(3):
        desk.node(f"n{i}")
    finds(desk, "n1", "ecc", ERROR)
    desk.wait(3.0)
    assert desk.state.membership.nodes["n1"].held
    assert desk.state.membership.number == 1
    desk.exits(desk.worker_on("n0"), 1)
    desk.exits(desk.worker_on("n1"), -15)
    assert not desk.state.membership.nodes["n1"].alive
    assert desk.state.membership.nodes["n1"].left  # and is not shown as lost
    assert {x.node for x in desk.state.membership.generation.members} == {"n0", "n2"}


# ---------------------------------------------------------------- the ladder


def test_a_reset_ends_the_workers_first_and_then_the_node_is_used_again():
    desk = running(3)
    worker = desk.worker_on("n1")
    finds(desk, "n1", "xid-95", FATAL, Remedy.RESET_DEVICE)
    assert worker in desk.killed()
    assert not desk.sent(m.Repair)
    park_all(desk)
    assert desk.worker_on("n0")
    assert not [w for w in desk.core.alive_workers() if w.node == "n1"]
    desk.exits(worker, -9)
    [(node, order)] = desk.sent(m.Repair)
    assert (node, order.remedy, order.device) == ("n1", Remedy.RESET_DEVICE, "GPU-1")
    desk.do(e.NodeSays("n1", m.Repaired(order.request)))
    assert desk.state.membership.nodes["n1"].held is None
    desk.ready(desk.worker_on("n1"))
    train_on(desk)
    train_on(desk)
    assert len(desk.members()) == 3
    assert not desk.incidents()[0].open


def reset(desk: Desk, node: str, error: str | None = None) -> None:
    for worker in list(desk.state.membership.workers.values()):
        if worker.node == node and not worker.exited:
            desk.exits(worker.name, -9)
    request = desk.sent(m.Repair)[-1][1].request
    desk.do(e.NodeSays(node, m.Repaired(request, error)))


def test_a_reset_that_fails_becomes_a_reboot():
    desk = running(3)
    finds(desk, "n1", "xid-95", FATAL, Remedy.RESET_DEVICE)
    park_all(desk)
    reset(desk, "n1", "the driver is busy")
    assert [a.node for a in desk.did(e.RebootNode)] == ["n1"]
    assert [a.node for a in desk.did(e.ReleaseNode)] == ["n1"]
    assert verdicts(desk) == [("reset-device", ""), ("reboot", "")]


def test_a_job_of_one_node_waits_for_a_reset_without_an_answer():
    desk = running(1)
    finds(desk, "n0", "xid-95", FATAL, Remedy.RESET_DEVICE)
    park_all(desk)
    desk.exits(desk.killed().pop(), -9)
    desk.wait(desk.core.timing.start_s + 1)
    assert desk.state.membership.outcome is None
    assert [a.node for a in desk.did(e.RebootNode)] == ["n0"]


def test_a_reset_without_an_answer_becomes_a_reboot():
    desk = running(3)
    finds(desk, "n1", "xid-95", FATAL, Remedy.RESET_DEVICE)
    park_all(desk)
    desk.exits(desk.killed().pop(), -9)
    desk.wait(desk.core.timing.start_s + 1)
    assert [a.node for a in desk.did(e.RebootNode)] == ["n1"]


def test_an_order_is_repeated_after_the_coordinator_came_back():
    desk = running(3)
    finds(desk, "n1", "xid-95", FATAL, Remedy.RESET_DEVICE)
    park_all(desk)
    desk.exits(desk.killed().pop(), -9)
    desk.crash()
    desk.back()
    orders = desk.sent(m.Repair)
    assert len(orders) == 2
    assert orders[0] == orders[1]


def test_the_same_again_on_the_same_device_climbs():
    desk = running(3)
    finds(desk, "n1", "xid-95", FATAL, Remedy.RESET_DEVICE)
    park_all(desk)
    reset(desk, "n1")
    desk.wait(20.0)
    finds(desk, "n1", "xid-95", FATAL, Remedy.RESET_DEVICE)
    assert verdicts(desk) == [("reset-device", ""), ("reboot", "")]
    assert "which was done before: reset-device" in str(desk.records("verdict")[-1]["reason"])
    assert len(desk.incidents()) == 2


def test_what_is_told_again_a_moment_later_does_not_climb():
    desk = running(3)
    finds(desk, "n1", "xid-95", FATAL, Remedy.RESET_DEVICE)
    park_all(desk)
    reset(desk, "n1")
    finds(desk, "n1", "xid-95", FATAL, Remedy.RESET_DEVICE, source="nvml")
    assert verdicts(desk) == [("reset-device", "")]
    assert len(desk.incidents()) == 1


def test_two_reboots_for_the_same_and_the_node_is_replaced():
    desk = running(2, health=WIDE)
    for i in range(3):
        come_back(desk, f"m{i}")
        finds(desk, f"m{i}", "xid-79", FATAL, Remedy.REBOOT)
        park_all(desk)
        desk.wait(20.0)
    assert [does for does, _ in verdicts(desk)] == ["reboot", "reboot", "replace"]
    assert marked(desk) == ["m2"]


def test_reboots_of_earlier_jobs_count():
    desk = running(2)
    past = [Remembered(kind=RecordKind.ACTED, age_s=3600.0, job="old", rule="xid-79", remedy="reboot")] * 2
    come_back(desk, "m0", *past)
    finds(desk, "m0", "xid-79", FATAL, Remedy.REBOOT)
    assert [does for does, _ in verdicts(desk)] == ["replace"]


BOOTS = HealthSpec(reboot_s=200.0)


def rebooted(*said: e.Event) -> Desk:
    """A job of two, one of which was sent away to boot. said: by the engine, before that."""
    desk = running(2, spares=1, health=BOOTS)
    for event in said:
        desk.do(event)
    come_back(desk, "m0")
    finds(desk, "m0", "xid-79", FATAL, Remedy.REBOOT)
    assert desk.did(e.RebootNode)
    return desk


def test_a_machine_that_comes_back_from_its_boot_is_used_again():
    desk = rebooted()
    desk.wait(100.0)
    come_back(desk, "m0", session="after")
    assert desk.records("rebooted")[0]["took_s"] == pytest.approx(100.0, abs=1.0)
    assert desk.state.membership.nodes["m0"].held is None
    desk.wait(210.0)
    assert marked(desk) == []


def test_so_is_one_that_comes_back_under_another_name():
    desk = rebooted()
    come_back(desk, "m9")
    assert desk.records("rebooted")[0]["node"] == "m9"
    desk.wait(210.0)
    assert marked(desk) == []


@pytest.mark.parametrize("planned", [False, True])
def test_a_machine_that_does_not_come_back_from_its_boot_is_given_up(planned):
    desk = running(2, spares=1, health=BOOTS)
    come_back(desk, "m0")
    finds(desk, "m0", "xid-79", ERROR if planned else FATAL, Remedy.REBOOT)
    desk.wait(5.0)
    assert [a.node for a in desk.did(e.RebootNode)] == ["m0"]
    desk.wait(190.0)
    assert marked(desk) == []
    desk.wait(10.0)
    assert marked(desk) == ["m0"]
    assert verdicts(desk) == [("reboot", ""), ("replace", "")]
    assert "did not come back within 200 s" in str(desk.records("verdict")[-1]["reason"])
    assert desk.did(e.Remember)[-1].kind is RecordKind.QUARANTINED
    come_back(desk, "m0", session="after")
    assert desk.state.membership.nodes["m0"].health.checking is not None


def test_a_coordinator_that_comes_back_waits_for_machines_that_boot():
    desk = rebooted()
    desk.crash()
    desk.back()
    desk.wait(210.0)
    assert marked(desk) == ["m0"]


def test_an_engine_that_watches_boots_itself_is_not_waited_for():
    """As Slurm's says of itself, also over a lost coordinator."""
    desk = rebooted(EngineTraits(watches_boots=True))
    assert not desk.state.membership.nodes["m0"].health.boots_until_s
    desk.crash()
    desk.back()
    desk.wait(210.0)
    assert marked(desk) == []
    assert desk.state.health.engine.watches_boots


@pytest.mark.parametrize("machines", [True, False])
def test_a_lost_node_counts_against_its_machine_only_where_nodes_are_machines(machines):
    desk = running(2)
    desk.do(EngineTraits(nodes_are_machines=machines))
    desk.lose("n1")
    come_back(desk, "m0")
    desk.ready(desk.worker_on("m0"))
    train_on(desk)
    desk.lose("m0")
    remembered = [a for a in desk.did(e.Remember) if a.kind is RecordKind.LOST]
    assert [a.node for a in remembered] == (["m0"] if machines else [])


def test_what_asks_for_a_person_is_not_acted_on():
    desk = running(3)
    finds(desk, "n1", "xid-142", FATAL, Remedy.ASK)
    assert verdicts(desk) == [("ask", "")]
    assert [a.rule for a in desk.state.health.asks] == ["xid-142"]
    assert desk.state.membership.nodes["n1"].alive
    assert not desk.incidents()[0].open


def test_a_worker_that_does_not_end_by_itself_is_ended():
    desk = running(3)
    worker = desk.worker_on("n1")
    finds(desk, "n1", "xid-13", ERROR, Remedy.RESTART_WORKER)
    assert worker not in desk.killed()
    desk.wait(2.1)
    assert worker in desk.killed()
    [incident] = desk.incidents()
    train_on(desk)
    assert not incident.quiet


def test_a_worker_that_ended_by_itself_is_not_ended_again():
    desk = running(3)
    finds(desk, "n1", "xid-13", ERROR, Remedy.RESTART_WORKER)
    desk.exits(desk.worker_on("n1"), 1)
    park_all(desk)
    desk.wait(3.0)
    assert not desk.killed()
    assert len(desk.incidents()) == 1


# ---------------------------------------------------------------- limits


@pytest.mark.parametrize(
    ("more", "against"),
    [({"shared": True}, "shared"), ({"dry_run": True}, "trial"), ({"condition": Condition.UNKNOWN}, None)],
)
def test_what_is_never_acted_on(more, against):
    desk = running(3, spares=1)
    finds(desk, "n1", **more)
    desk.wait(5.0)
    assert all(n.alive and not n.leaving for n in desk.state.membership.nodes.values())
    assert [a for _, a in verdicts(desk)] == ([against] if against else [])
    if against == "trial":
        assert desk.records("verdict")[0]["would"] == "replace"
    assert desk.records("finding")


def test_what_is_unknown_for_long_is_asked_about():
    desk = running(3)
    for _ in range(3):
        finds(desk, "n1", "nvml-hang", condition=Condition.UNKNOWN)
        desk.wait(301.0)
    assert len(desk.records("asked")) == 1
    finds(desk, "n1", "nvml-hang", condition=Condition.HEALTHY)
    assert desk.state.membership.nodes["n1"].health.unknown == {}


def test_what_is_well_again_before_it_is_decided_is_let_be():
    desk = running(3, spares=1)
    finds(desk, "n1", "link-down", ERROR)
    finds(desk, "n1", "link-down", condition=Condition.HEALTHY)
    desk.wait(5.0)
    assert verdicts(desk) == [("watch", "well")]


def test_repairs_of_one_machine_back_off():
    desk = running(3, spares=2, health=WIDE)
    past = [Remembered(kind=RecordKind.ACTED, age_s=10.0, job="old", rule="ecc", remedy="reset-device")]
    come_back(desk, "m0", *past)
    finds(desk, "m0", "hot", ERROR, Remedy.RESET_DEVICE)
    desk.wait(5.0)
    assert desk.state.membership.nodes["m0"].health.then is None
    assert desk.incidents()[0].due_s is not None
    desk.wait(46.0)
    reset(desk, "m0")
    assert desk.state.membership.nodes["m0"].held is None


def test_a_machine_that_was_repaired_too_often_is_replaced():
    desk = running(3)
    past = [
        Remembered(kind=RecordKind.ACTED, age_s=86400.0 * 4, job="old", rule=f"r{i}", remedy="reset-device")
        for i in range(5)
    ]
    come_back(desk, "m0", *past)
    finds(desk, "m0", "xid-95", FATAL, Remedy.RESET_DEVICE)
    assert [does for does, _ in verdicts(desk)] == ["replace"]


def test_the_job_s_budget_of_repairs_holds():
    desk = running(4, max_restarts=2, health=WIDE)
    for i in range(4):
        finds(desk, f"n{i}", f"xid-{i}")
    assert verdicts(desk) == [("replace", ""), ("replace", ""), ("watch", "budget"), ("watch", "budget")]
    assert len(desk.records("asked")) == 2


# ---------------------------------------------------------------- whose fault


def test_nan_on_one_of_two_nodes_blames_nobody():
    desk = running(2)
    for _ in range(3):
        finds(desk, "n1", "nan", source="worker")
    assert {against for _, against in verdicts(desk)} == {"canary"}


def test_nan_twice_on_one_node_while_the_majority_is_well_is_the_node_s():
    desk = running(4, spares=1)
    finds(desk, "n1", "nan", source="worker")
    assert verdicts(desk) == [("watch", "canary")]
    finds(desk, "n1", "nan", source="worker")
    assert marked(desk) == ["n1"]


def test_nan_on_most_nodes_is_nobody_s():
    desk = running(4, health=WIDE)
    for _ in range(2):
        for i in (0, 1, 2):
            finds(desk, f"n{i}", "nan", source="worker", worker=f"w{i}")
    assert marked(desk) == []


def test_what_follows_the_step_across_nodes_is_the_script_s():
    desk = running(4, spares=2)
    finds(desk, "n1", "xid-31", FATAL, Remedy.RESTART_WORKER)
    train_at = desk.state.membership.committed
    park_all(desk)
    assert desk.state.membership.number == 2
    desk.state.membership.committed = train_at
    finds(desk, "n2", "xid-31", FATAL, Remedy.RESTART_WORKER)
    assert verdicts(desk) == [("restart-worker", ""), ("watch", "script")]


# ---------------------------------------------------------------- who may be used


def test_a_node_whose_basic_checks_are_faulty_is_refused_and_another_asked_for():
    desk = running(2)
    desk.lose("n1")
    asked = len(desk.did(e.ProvideNode))
    bad = CheckResult(name="disk", condition=Condition.FAULTY, detail="12 GB/s were promised, 0.1 measured")
    come_back(desk, "m0", checks=(bad,))
    assert "m0" not in desk.state.membership.nodes
    assert "0.1 measured" in str(desk.records("node-refused")[0]["reason"])
    assert marked(desk) == ["m0"]
    desk.wait(2.0)
    assert len(desk.did(e.ProvideNode)) == asked + 1


def test_unknown_checks_are_said_and_no_reason_to_refuse():
    desk = running(2)
    come_back(desk, "m0", checks=(CheckResult(name="nvml", condition=Condition.UNKNOWN),))
    assert desk.state.membership.nodes["m0"].held is None
    assert desk.records("checks-unknown")[0]["checks"] == ["nvml"]


def test_a_replaced_machine_that_comes_back_owes_deep_checks():
    desk = running(2, spares=1)
    come_back(desk, "m0")
    finds(desk, "m0")
    assert [a.kind for a in desk.did(e.Remember)] == [
        RecordKind.INCIDENT,
        RecordKind.ACTED,
        RecordKind.QUARANTINED,
    ]
    come_back(desk, "m1")
    node = desk.state.membership.nodes["m1"]
    assert node.held
    assert not [w for w in desk.core.alive_workers() if w.node == "m1"]
    [(to, order)] = desk.sent(m.RunChecks)
    assert (to, order.deep) == ("m1", True)
    desk.do(
        e.NodeSays("m1", m.Checked(order.request, (CheckResult(name="memory", condition=Condition.HEALTHY),)))
    )
    assert node.held is None
    assert desk.worker_on("m1")
    assert desk.did(e.Remember)[-1].kind is RecordKind.READMITTED
    assert desk.state.health.quarantine == {}


@pytest.mark.parametrize("result", [Condition.FAULTY, Condition.UNKNOWN, None])
def test_a_machine_that_does_not_pass_is_turned_away(result):
    desk = running(2)
    come_back(
        desk,
        "m0",
        Remembered(kind=RecordKind.QUARANTINED, age_s=60.0, job="old", rule="xid-79", text="xid-79"),
    )
    order = desk.sent(m.RunChecks)[0][1]
    results = (CheckResult(name="memory", condition=result),) if result else ()
    desk.do(e.NodeSays("m0", m.Checked(order.request, results)))
    assert not desk.state.membership.nodes["m0"].alive
    assert marked(desk) == ["m0"]


def test_deep_checks_that_never_answer():
    desk = running(2)
    come_back(desk, "m0", Remembered(kind=RecordKind.QUARANTINED, age_s=60.0, job="old", rule="xid-79"))
    desk.wait(1900.0)
    assert not desk.state.membership.nodes["m0"].alive


def test_with_deep_every_new_node_is_checked_and_what_is_unknown_is_no_reason_to_refuse_it():
    desk = Desk(2, health=HealthSpec(deep_checks=True))
    desk.node("n0")
    assert not desk.workers()
    request = desk.sent(m.RunChecks)[0][1].request
    desk.do(e.NodeSays("n0", m.Checked(request, (CheckResult(name="disk", condition=Condition.UNKNOWN),))))
    assert desk.state.membership.nodes["n0"].held is None


def test_a_job_waits_for_deep_checks_however_long_they_take():
    desk = Desk(2, health=HealthSpec(deep_checks=True))
    for name in ("n0", "n1"):
        desk.node(name)
    desk.wait(900.0)
    assert desk.state.membership.stop_reason is None
    for node, order in desk.sent(m.RunChecks):
        desk.do(
            e.NodeSays(
                node, m.Checked(order.request, (CheckResult(name="memory", condition=Condition.HEALTHY),))
            )
        )
    assert len(desk.workers()) == 2


def test_nobody_is_asked_for_in_the_place_of_nodes_that_are_checked_because_they_are_new():
    desk = Desk(2, health=HealthSpec(deep_checks=True))
    for name in ("n0", "n1"):
        desk.node(name)
    assert not desk.did(e.ProvideNode)
    request = desk.sent(m.RunChecks)[0][1].request
    desk.do(e.NodeSays("n0", m.Checked(request, (CheckResult(name="disk", condition=Condition.FAULTY),))))
    assert len(desk.did(e.ProvideNode)) == 1


def test_whoever_keeps_histories_knows_what_was_injected():
    desk = running(2, spares=1)
    come_back(desk, "m0")
    desk.do(e.Injected(fault="xid=79:node=9", kind="xid", node="m0", worker=None))
    finds(desk, "m0")
    assert marked(desk) == ["m0"]
    about = {record.incident for record in desk.did(e.Remember)}
    assert about == {1}
    assert incidents.was_injected(desk.state, 1)
    assert not incidents.was_injected(desk.state, 0)


# ---------------------------------------------------------------- state


def test_the_state_stays_small_and_survives_in_a_storm_of_findings():
    desk = running(3, spares=1)
    for i in range(2000):
        finds(desk, f"n{i % 3}", f"rule-{i % 300}", WARNING if i % 2 else ERROR, evidence="x" * 400)
    small = msgspec.structs.replace(desk.state, incidents=[])
    assert len(msgspec.msgpack.encode(small)) < 64 << 10
    for incident in desk.incidents():
        assert len(msgspec.msgpack.encode(incident)) < 4096
    encoded = msgspec.msgpack.encode(desk.state)
    assert msgspec.msgpack.encode(msgspec.msgpack.decode(encoded, type=type(desk.state))) == encoded
    assert isinstance(desk.incidents()[0], Incident)


def test_a_rule_that_was_wrong_lifts_its_own_quarantine_only():
    desk = running(2)
    given_up = Remembered(
        kind=RecordKind.QUARANTINED, age_s=60.0, job="before", rule="xid-79", text="xid-79: gone"
    )
    come_back(desk, "m0", given_up)
    desk.do(e.MachineCleared("M1", "xid-63"))
    assert desk.state.membership.nodes["m0"].held
    assert "M1" in desk.state.health.quarantine
    desk.do(e.MachineCleared("M1", "xid-79"))
    assert not desk.state.membership.nodes["m0"].held
    assert desk.state.health.quarantine == desk.state.health.quarantine_rules == {}
    come_back(desk, "m1", given_up, identity="M2")
    desk.do(e.MachineCleared("M2"))
    assert not desk.state.membership.nodes["m1"].held


@pytest.mark.parametrize(
    ("identity", "kept"), [("serial:4c4c", ["serial:4c4c"]), ("k8s:gpu-7", []), ("", [])]
)
@pytest.mark.parametrize(("rule", "kind"), [("", RecordKind.CLEARED), ("xid-79", RecordKind.FALSE_POSITIVE)])
def test_a_word_that_no_history_has_is_remembered(identity, kept, rule, kind):
    desk = running(2, spares=1)
    come_back(desk, "m0", identity=identity)
    finds(desk, "m0")
    before = len(desk.did(e.Remember))
    desk.do(e.MachineCleared(identity or "m0", rule))
    assert len(desk.did(e.Remember)) == before
    desk.do(e.MachineCleared(identity or "m0", rule, remember=True))
    said = desk.did(e.Remember)[before:]
    assert [(one.machine, one.kind, one.node, one.rule) for one in said] == [
        (name, kind, "m0", rule) for name in kept
    ]


def test_what_a_watcher_may_not_read_in_a_container_is_written_once_for_the_job_and_asked_of_nobody():
    desk = running(3)
    for name in ("n0", "n1", "n2"):
        finds(desk, name, "kmsg-unreadable", Severity.INFO, Remedy.WATCH, condition=Condition.UNKNOWN)
    for _ in range(4):
        desk.wait(301.0)
    finds(desk, "n1", "kmsg-unreadable", Severity.INFO, Remedy.WATCH, condition=Condition.UNKNOWN)
    assert [(f["node"], f["rule"]) for f in desk.records("finding")] == [("n0", "kmsg-unreadable")]
    assert desk.state.health.asks == []


@pytest.mark.parametrize(("identity", "kept"), [("uuid:4c4c", 3), ("k8s:gpu-7", 0), ("", 0)])
def test_nothing_is_kept_for_other_jobs_under_a_name_that_a_cluster_gives_again(identity, kept):
    desk = running(2, spares=1)
    come_back(desk, "m0", identity=identity)
    finds(desk, "m0")
    assert [a.machine for a in desk.did(e.Remember)] == [identity] * kept
    assert list(desk.state.health.quarantine) == [identity or "m0"]


# ---------------------------------------------------------------- the same refusal from all


def small(name: str) -> CheckResult:
    return CheckResult(name=name, condition=Condition.FAULTY, detail="64 MB free in /dev/shm/" + name)


def test_nodes_that_are_all_refused_for_the_same_checks_end_the_job():
    desk = Desk(3, spares=2)
    for i in range(3):
        assert desk.state.membership.outcome is None
        come_back(desk, f"n{i}", checks=(small("shm"),))
    assert desk.state.membership.outcome == "failed"
    reason = "3 nodes were refused for the same reason (shm: 64 MB free in /dev/shm/shm)"
    assert desk.state.membership.stop_reason == reason


def test_one_node_that_comes_again_and_again_is_one():
    desk = Desk(2)
    for session in "abcd":
        come_back(desk, "n0", checks=(small("shm"),), session=session)
    assert desk.state.membership.outcome is None


@pytest.mark.parametrize("names", [("shm", "disk", "shm"), ("shm", "files", "disk")])
def test_nodes_that_are_refused_for_different_checks_are_broken_themselves(names):
    desk = Desk(3)
    for i, name in enumerate(names):
        come_back(desk, f"n{i}", checks=(small(name),))
    assert desk.state.membership.outcome is None


def test_where_one_node_is_well_the_job_waits_for_others():
    desk = Desk(2)
    come_back(desk, "n0", checks=(small("shm"),))
    come_back(desk, "good")
    for i in (1, 2, 3):
        come_back(desk, f"n{i}", checks=(small("shm"),))
    assert desk.state.membership.outcome is None


def test_a_kill_of_somebody_else_is_one_line_for_a_machine():
    """Each node that is a part of a machine sees it, in the kernel's log and as a counter in /proc."""
    desk = running(3)
    for name, identity in (("n0", "machine-id:a/n0"), ("n1", "machine-id:a/n1"), ("n2", "machine-id:b/n2")):
        desk.state.membership.nodes[name].identity = identity
    for name in ("n0", "n1", "n2"):
        finds(desk, name, "oom-kill", WARNING, Remedy.WATCH, device="")
        finds(desk, name, "oom-kills", WARNING, Remedy.WATCH, device="", source="proc")
    assert [found["node"] for found in desk.records("finding")] == ["n0", "n2"]
    desk.wait(121.0)
    finds(desk, "n1", "oom-kills", WARNING, Remedy.WATCH, device="", source="proc")
    assert [found["node"] for found in desk.records("finding")] == ["n0", "n2", "n1"]
