"""Machines with a bad history: taken last, and swapped out when there is a better one."""

from __future__ import annotations

from desk import Desk, running
from findings import ERROR, FATAL, come_back, finds, marked, park_all, train_on

from holdfast.coordinator.kernel import events as e
from holdfast.coordinator.kernel import transitions
from holdfast.coordinator.kernel.history import RecordKind, Remembered
from holdfast.protocol import messages as m
from holdfast.protocol.health import Remedy
from holdfast.protocol.job_options import HealthSpec

LEMON = [Remembered(kind=RecordKind.INCIDENT, age_s=3600.0, job=f"job{i}", rule="ecc") for i in range(3)]


def sour(lemons: int = 1, **spec: object) -> Desk:
    """A job of three that trains on lemons, because there was nothing else."""
    desk = Desk(3, **spec)
    for i in range(3):
        past = LEMON if i < lemons else []
        come_back(desk, f"n{i}", *past, identity=f"M{i}")
    for worker in desk.workers():
        desk.ready(worker)
    assert len(desk.members()) == 3
    return desk


def better(desk: Desk, name: str, *past: Remembered) -> None:
    come_back(desk, name, *past, identity=name.upper())
    desk.ready(desk.worker_on(name))


def there(desk: Desk) -> set[str]:
    return {w.partition(".")[0] for w in desk.members()}


def test_a_lemon_is_used_last():
    desk = running(2, spares=0)
    come_back(desk, "m0", *LEMON)
    assert desk.records("lemon")
    come_back(desk, "m1", identity="M2")
    for name in ("m0", "m1"):
        desk.ready(desk.worker_on(name))
    desk.lose("n1")
    park_all(desk)
    assert {w.partition(".")[0] for w in desk.members()} == {"n0", "m1"}


def test_a_lemon_that_trains_leaves_at_a_step_edge_when_a_better_node_is_ready():
    desk = sour()
    assert desk.did(e.ProvideNode)  # it was not counted on
    better(desk, "m0")
    assert not desk.state.membership.yielding  # not before this generation has brought something
    desk.commit(3)
    assert desk.state.membership.yielding
    [told] = desk.records("lemon-leaves")
    assert (told["node"], told["instead"]) == ("n0", "m0")
    assert told["reason"] == "3 incidents in 3 jobs within 30 days"
    train_on(desk)
    desk.commit(desk.state.membership.committed + 1)
    assert there(desk) == {"m0", "n1", "n2"}
    assert not desk.state.membership.nodes["n0"].alive
    assert [(a.node, a.planned) for a in desk.did(e.ReleaseNode)] == [("n0", True)]
    assert marked(desk) == []  # it did nothing wrong in this job
    assert desk.state.health.quarantine == {}
    assert not desk.did(e.Remember)
    assert desk.incidents() == []
    assert desk.state.membership.restarts_used == desk.state.membership.lost_steps == 0


def test_an_engine_that_has_only_lemons_is_not_asked_without_end():
    desk = Desk(2)
    for i in range(12):
        come_back(desk, f"n{i}", *LEMON, identity=f"M{i}")
    assert len(desk.did(e.ProvideNode)) == 2  # until there is one more than are wanted


def test_another_lemon_is_not_better():
    desk = sour()
    desk.commit(3)
    better(desk, "m0", *LEMON)
    desk.wait(20.0)
    assert not desk.records("lemon-leaves")


def test_nor_is_a_node_of_which_something_was_just_found():
    desk = sour()
    better(desk, "m0")
    finds(desk, "m0", "ecc", ERROR)
    desk.commit(3)
    assert not desk.records("lemon-leaves")


def test_what_kills_two_workers_of_one_lemon_among_others_is_no_fault_of_the_script():
    desk = Desk(3)
    for i in range(3):
        come_back(desk, f"n{i}", *LEMON, identity=f"M{i}")
    for worker in (desk.worker_on("n1"), desk.worker_on("n2")):
        desk.ready(worker)
    for _ in range(2):
        worker = desk.worker_on("n0")
        desk.started(worker)
        desk.says(
            worker,
            m.Failed(
                generation=0,
                step=None,
                phase=0,
                error="CudaError",
                message="ECC",
                traceback="Traceback\nCudaError: ECC",
            ),
        )
        desk.exits(worker, 1)
    assert desk.state.membership.outcome is None


def test_one_lemon_leaves_in_a_window():
    desk = sour(lemons=2)
    better(desk, "m0")
    better(desk, "m1")
    desk.commit(3)
    train_on(desk)
    desk.commit(desk.state.membership.committed + 1)
    assert there(desk) == {"m0", "n1", "n2"}
    desk.wait(500.0)
    assert len(desk.records("lemon-leaves")) == 1
    desk.wait(110.0)
    assert len(desk.records("lemon-leaves")) == 2
    train_on(desk)
    assert there(desk) == {"m0", "m1", "n2"}


def test_the_limit_of_nodes_that_are_acted_on_holds_for_lemons():
    desk = sour()
    better(desk, "m0")
    finds(desk, "n2", "xid-79", FATAL, Remedy.REPLACE)
    train_on(desk)
    better(desk, "m1")
    desk.commit(desk.state.membership.committed + 1)
    assert not desk.records("lemon-leaves")
    desk.wait(601.0)
    assert desk.records("lemon-leaves")


def test_and_so_does_the_budget_of_repairs():
    desk = sour(max_restarts=1, health=HealthSpec(blast_radius="100%"))
    better(desk, "m0")
    finds(desk, "n2", "xid-79", FATAL, Remedy.REPLACE)
    train_on(desk)
    better(desk, "m1")
    desk.commit(desk.state.membership.committed + 1)
    desk.wait(700.0)
    assert not desk.records("lemon-leaves")


def test_what_a_person_has_cleared_stays():
    desk = sour()
    desk.do(e.MachineCleared("M0"))
    better(desk, "m0")
    desk.commit(3)
    assert not desk.records("lemon-leaves")


def test_a_coordinator_that_comes_back_keeps_the_window():
    desk = sour(lemons=2)
    better(desk, "m0")
    better(desk, "m1")
    desk.commit(3)
    train_on(desk)
    desk.crash()
    desk.back()
    desk.commit(desk.state.membership.committed + 1)
    desk.wait(500.0)
    assert len(desk.records("lemon-leaves")) == 1


def test_of_a_sharded_replica_a_lemon_leaves_when_the_spare_was_built_for_its_shard():
    desk = running(4, shape=(2, 1))
    transitions.set_lemon(desk.core, desk.state.membership.nodes["n1"], "3 incidents")
    come_back(desk, "m0", identity="M0")
    desk.started(desk.worker_on("m0"))
    desk.gets_ready(desk.worker_on("m0"), (2, 1), shard_index=0)
    assert [r["node"] for r in desk.records("lemon-leaves")] == ["n1"]
    assert desk.told(desk.worker_on("m0"), m.Rebuild) == [m.Rebuild(1)]
    assert not any(desk.told(w, m.EndAtCommit) for w in desk.members())
    desk.gets_ready(desk.worker_on("m0"), (2, 1), shard_index=1)
    assert desk.state.membership.yielding
    train_on(desk)
    assert there(desk) == {"n0", "m0", "n2", "n3"}
    assert desk.state.membership.lost_steps == 0


def test_what_comes_in_the_place_of_a_lemon_is_not_too_many_for_a_job_that_was_resized():
    desk = sour()
    desk.do(e.ResizeRequested(3, "as it is"))
    asked = len(desk.did(e.ProvideNode))
    come_back(desk, "m0", *LEMON, identity="M9")
    desk.wait(60.0)
    assert not any(n.leaving for n in desk.core.alive_nodes())
    assert len(desk.did(e.ProvideNode)) == asked
