"""Level 2, one situation after the other: what the core does when this happens."""

import msgspec
import pytest
from desk import TIER, Desk, running

from holdfast.coordinator.kernel import events as e
from holdfast.coordinator.kernel import incidents
from holdfast.coordinator.kernel.state import JobPhase, WorkerPhase
from holdfast.protocol import messages as m
from holdfast.protocol.engine_orders import OrderDone
from holdfast.protocol.job import Durable
from holdfast.protocol.machine.progress_record import PageReading, Phase


def lose_worker_and_park(desk: Desk, worker: str, committed: int, prepared: bool = False) -> None:
    desk.exits(worker, -9)
    for other in desk.members():
        if other != worker:
            desk.parks(other, committed, prepared)


def started(desk: Desk, node: str) -> bool:
    """A worker starts there, or is ready."""
    return any(w.node == node and w.phase is not WorkerPhase.MEMBER for w in desk.core.alive_workers())


# ---------------------------------------------------------------- the first generation


def test_all_nodes_are_there_and_one_generation_forms():
    desk = running(3, committed=0)
    assert desk.members() == ["n0.0#1", "n1.0#2", "n2.0#3"]
    assert [f.rank for w in desk.members() for f in desk.told(w, m.JoinGeneration)] == [0, 1, 2]
    assert not any(f.restore or f.apply for w in desk.members() for f in desk.told(w, m.JoinGeneration))


def test_models_that_were_built_differently_take_the_state_of_rank_0():
    desk = Desk(2)
    desk.node("n0")
    desk.node("n1")
    for worker in desk.workers():
        desk.ready(worker, digest=worker)
    first, second = (desk.told(w, m.JoinGeneration)[0] for w in desk.members())
    assert first.serve
    assert not first.restore
    assert second.restore
    assert second.donors == (0,)


def test_the_first_generation_waits_a_while_for_the_target_and_then_goes():
    desk = Desk(3, min_nodes=2)
    desk.node("n0")
    desk.node("n1")
    assert not desk.sent(m.StartWorker)
    desk.wait(desk.core.timing.form_s + 0.1)
    for worker in desk.workers():
        desk.ready(worker)
    assert desk.state.membership.phase is JobPhase.GATHERING
    desk.wait(desk.core.timing.form_s + 0.1)
    assert len(desk.members()) == 2


def test_who_was_not_listened_to_is_not_silent():
    """The coordinator got no processor for ten detection times; the heartbeats of that time are still to be read."""
    desk = running(2)
    away_s = 10 * desk.core.timing.detection_s
    desk.do(e.Overslept(away_s), after_s=away_s)
    assert len(desk.core.alive_nodes()) == 2
    desk.wait(desk.core.timing.detection_s + 0.1, alive=("n0",))
    assert [n.name for n in desk.core.alive_nodes()] == ["n0"]


def wait_a_minute_and_park(desk: Desk, left: list[str]) -> None:
    """They have stood still for a minute when they hear of the break, and all of them go on."""
    for worker in left:
        waits = desk.view(
            worker, page=PageReading(generation=1, committed=5, phase=Phase.REDUCE), idle_s=60.0
        )
        desk.do(e.NodeSays(desk.known(worker).node, m.Stalled(worker, waits)))
    for worker in left:
        desk.parks(worker, 5)
    assert desk.members() == left
    assert not desk.killed()


def test_who_was_told_late_is_not_late():
    """A node is lost; the orders that follow leave a minute later, for until then the ledger could not be written."""
    desk = running(3)
    desk.lose("n2")
    desk.do(e.Overslept(60.0), after_s=60.0)
    left = desk.workers(WorkerPhase.MEMBER)
    assert len(left) == 2
    wait_a_minute_and_park(desk, left)


def test_who_hears_of_a_break_from_the_next_coordinator_is_not_late():
    """A node is lost, and so is the coordinator, before its orders left; the next one comes a minute later."""
    desk = running(3)
    desk.lose("n2")
    left = desk.workers(WorkerPhase.MEMBER)
    desk.crash(away_s=60.0)
    desk.back()
    wait_a_minute_and_park(desk, left)


@pytest.mark.parametrize(
    ("nodes", "nproc", "readers"), [(1, 1, [0]), (2, 1, [0]), (8, 1, [0]), (9, 1, [0, 1]), (3, 3, [0, 3])]
)
def test_a_checkpoint_on_disk_is_where_a_new_job_goes_on(nodes, nproc, readers):
    """One of eight reads it, on nodes of their own; the others have it from those."""
    desk = Desk(nodes, nproc=nproc)
    desk.do(e.DurableFound(Durable(40, "kept")))
    for i in range(nodes):
        desk.node(f"n{i}", slots=nproc)
    for worker in desk.workers():
        desk.ready(worker)
    forms = [desk.told(w, m.JoinGeneration)[0] for w in desk.members()]
    assert len(forms) == nodes * nproc
    assert all(f.restore and f.generation.start == 40 for f in forms)
    assert [f.rank for f in forms if f.durable] == readers
    assert [f.rank for f in forms if f.serve] == (readers if len(forms) > 1 else [])
    for form in forms:
        reads = form.rank in readers
        assert form.durable == (Durable(40, "kept") if reads else None)
        assert form.donors == (() if reads else tuple(readers))


def test_an_initial_node_that_never_comes_is_replaced():
    desk = Desk(2, min_nodes=2)
    desk.node("n0")
    desk.wait(desk.core.timing.wait_s / 2 - 1.0)
    assert not desk.did(e.ProvideNode)
    desk.wait(2.0)
    assert len(desk.did(e.ProvideNode)) == 1


# ---------------------------------------------------------------- a worker or a node is lost


def test_a_spare_takes_the_rank_of_the_dead_at_an_unchanged_world_size():
    desk = running(3, spares=1)
    desk.lose("n1")
    assert {a.reason for w in ("n0.0#1", "n2.0#3") for a in desk.told(w, m.Break)} == {
        "its agent's connection closed"
    }
    desk.parks("n0.0#1", 5)
    desk.parks("n2.0#3", 5)
    assert desk.members() == ["n0.0#1", "n3.0#4", "n2.0#3"]
    newcomer = desk.told("n3.0#4", m.JoinGeneration)[0]
    assert newcomer.restore
    assert newcomer.donors == (0, 2)
    assert desk.did(e.ReleaseNode)[0].node == "n1"
    assert len(desk.did(e.ProvideNode)) == 1
    desk.commit(6)
    incident = desk.incidents()[0]
    assert (incident.rung, incident.ranks, incident.open, incident.lost_steps) == ("spare", [1], False, 0)


def test_the_next_spare_starts_when_the_job_trains_again():
    """Its start would take a processor from those that are to go on."""
    desk = running(3, spares=1)
    lose_worker_and_park(desk, "n1.0#2", 5)
    assert desk.members() == ["n0.0#1", "n3.0#4", "n2.0#3"]
    assert not started(desk, "n1")
    desk.commit(6)
    assert started(desk, "n1")


def test_the_next_spare_does_not_wait_for_a_long_first_step():
    desk = running(3, spares=1)
    lose_worker_and_park(desk, "n1.0#2", 5)
    desk.wait(desk.core.timing.detection_s + 0.1)
    assert started(desk, "n1")


def test_a_second_loss_before_that_starts_it_at_once():
    desk = running(3, spares=1)
    lose_worker_and_park(desk, "n1.0#2", 5)
    desk.exits("n2.0#3", -9)
    assert started(desk, "n1")
    assert started(desk, "n2")


def test_without_a_spare_it_goes_on_smaller_and_grows_by_a_yield():
    desk = running(3)
    lose_worker_and_park(desk, "n1.0#2", 5)
    assert desk.members() == ["n0.0#1", "n2.0#3"]
    desk.ready("n1.0#4")
    assert desk.members() == ["n0.0#1", "n2.0#3"]  # not before this generation was worth its start
    desk.commit(6)
    assert desk.told("n0.0#1", m.EndAtCommit)[0].generation == 2
    assert desk.incidents()[0].open
    desk.parks("n0.0#1", 7)
    assert not desk.told("n2.0#3", m.Break, newest=True)
    desk.parks("n2.0#3", 7)
    assert desk.members() == ["n0.0#1", "n2.0#3", "n1.0#4"]
    assert desk.told("n1.0#4", m.JoinGeneration)[0].generation.start == 7
    desk.commit(8)
    assert not desk.incidents()[0].open


def test_wait_for_spare_never_trains_smaller():
    desk = running(3, wait_for_spare=True)
    lose_worker_and_park(desk, "n1.0#2", 5)
    assert desk.state.membership.phase is JobPhase.GATHERING
    desk.ready("n1.0#4")
    assert desk.members() == ["n0.0#1", "n1.0#4", "n2.0#3"]


def test_a_step_that_everyone_prepared_counts():
    desk = running(3)
    lose_worker_and_park(desk, "n1.0#2", 5, prepared=True)
    forms = [desk.told(w, m.JoinGeneration)[-1] for w in desk.members()]
    assert [(f.apply, f.restore, f.generation.start) for f in forms] == [(True, False, 6)] * 2


def test_one_that_committed_gives_to_one_that_did_not():
    desk = running(3)
    desk.exits("n1.0#2", -9)
    desk.parks("n0.0#1", 6)
    desk.parks("n2.0#3", 5)
    assert desk.told("n2.0#3", m.JoinGeneration)[-1].restore
    assert desk.told("n2.0#3", m.JoinGeneration)[-1].donors == (0,)
    assert desk.told("n0.0#1", m.JoinGeneration)[-1].serve


def test_a_late_word_about_an_earlier_step_does_not_change_what_a_parked_worker_holds():
    desk = running(3)
    desk.exits("n1.0#2", -9)
    desk.parks("n0.0#1", 7)
    desk.says("n0.0#1", m.Progress(generation=1, committed=6, median_s=0.1), age_s=0.5)
    desk.parks("n2.0#3", 6, prepared=True)
    assert desk.state.membership.generation.start == 7
    assert desk.told("n2.0#3", m.JoinGeneration)[-1].apply


def test_a_death_while_a_generation_yields_frees_the_others():
    desk = running(3)
    lose_worker_and_park(desk, "n1.0#2", 5)
    desk.ready("n1.0#4")
    desk.commit(6)
    desk.parks("n0.0#1", 7)  # its vote closed, the other's did not
    desk.lose("n0")
    assert desk.told("n2.0#3", m.Break, newest=True)


def test_a_silent_node_is_lost_after_the_detection_time():
    desk = running(3)
    desk.wait(1.9, alive=("n0", "n2"))
    assert desk.state.membership.nodes["n1"].alive
    desk.wait(0.3, alive=("n0", "n2"))
    assert not desk.state.membership.nodes["n1"].alive
    assert desk.did(e.ReleaseNode)[0].reason == "silent for 2 s"


def test_a_lost_node_that_speaks_is_fenced_once_and_comes_back_as_a_new_one():
    desk = running(3)
    desk.wait(2.2, alive=("n0", "n2"))
    for _ in range(3):
        desk.do(e.NodeSays("n1", m.Heartbeat()))
    assert [n for n, _ in desk.sent(m.Fence)] == ["n1"]
    desk.node("n1", session="1")
    assert len(desk.sent(m.Fence)) == 2  # it said hello without having heard
    desk.node("n1", session="2")
    assert desk.state.membership.nodes["n1"].alive
    assert desk.sent(m.StartWorker, newest=True)[0][0] == "n1"


def test_a_new_agent_on_the_same_machine_is_not_released_with_the_old_one():
    desk = running(3)
    desk.node("n1", session="2")
    assert desk.state.membership.nodes["n1"].alive
    assert desk.state.membership.workers["n1.0#2"].phase is WorkerPhase.GONE
    assert not desk.did(e.ReleaseNode)


def test_an_agent_of_another_version_is_refused():
    desk = running(2)
    desk.do(
        e.NodeJoined(
            m.Hello(version=m.PROTOCOL_VERSION + 1, node="n9", session="s", host="n9", slots=1, pid=1)
        )
    )
    assert [n for n, _ in desk.sent(m.Shutdown)] == ["n9"]
    assert "n9" not in desk.state.membership.nodes
    assert desk.records("node-refused")


def test_torn_survivors_without_any_state_start_as_new_processes():
    desk = running(2)
    desk.exits("n0.0#1", -9)
    desk.parks("n1.0#2", None)
    assert desk.killed() == {"n1.0#2"}
    for worker in desk.workers(WorkerPhase.STARTING):
        desk.ready(worker)
    forms = [desk.told(w, m.JoinGeneration)[0] for w in desk.members()]
    assert [(f.generation.start, f.restore) for f in forms] == [(0, False)] * len(forms)
    assert desk.state.membership.lost_steps == 5
    assert desk.state.membership.committed == 0


def test_torn_survivors_go_on_from_the_disk_if_a_checkpoint_is_there():
    desk = running(2)
    desk.do(e.DurableFound(Durable(3, "kept")))
    desk.exits("n0.0#1", -9)
    desk.parks("n1.0#2", None)
    assert desk.told("n1.0#2", m.JoinGeneration)[-1].durable == Durable(3, "kept")
    assert desk.state.membership.lost_steps == 2


def test_a_break_that_nobody_explains_is_an_incident_too():
    desk = running(2)
    desk.says("n0.0#1", m.CollectiveError(1, 5, "timed out"))
    desk.parks("n0.0#1", 5)
    desk.parks("n1.0#2", 5)
    desk.commit(6)
    incident = desk.incidents()[0]
    assert (str(incident.cause), incident.rung, incident.open) == (
        "a collective failed",
        "retry in process",
        False,
    )
    assert not desk.killed()


def test_collectives_that_fail_for_ever_end_the_job_with_its_state_saved():
    desk = running(2)
    attempts = 0
    while desk.state.membership.phase is not JobPhase.STOPPING:
        number = desk.state.membership.number
        desk.says("n0.0#1", m.CollectiveError(number, 5, "unreachable"))
        desk.parks("n0.0#1", 5)
        desk.parks("n1.0#2", 5)
        attempts += 1
        while desk.state.membership.number == number and desk.state.membership.phase is JobPhase.GATHERING:
            desk.wait(1.0)
    assert 10 < attempts < 20
    assert (
        desk.state.membership.stop_reason
        == f"no step could be completed in {attempts - 1} attempts: a collective failed"
    )
    assert desk.told("n0.0#1", m.Stop)[0].save_to == TIER


# ---------------------------------------------------------------- user code and NaN


def test_user_code_that_raises_is_retried_then_restarted_then_blamed():
    desk = running(2)
    desk.fails("n0.0#1", 5)
    assert desk.incidents()[0].rung == "retry in process"
    desk.parks("n0.0#1", 5)
    desk.parks("n1.0#2", 5)
    assert desk.members() == ["n0.0#1", "n1.0#2"]
    desk.fails("n0.0#1", 5)
    assert desk.killed() == {"n0.0#1"}
    desk.parks("n1.0#2", 5)
    assert desk.members() == ["n1.0#2"]
    desk.ready("n0.0#3")
    desk.says("n1.0#2", m.Progress(generation=3, committed=6, median_s=0.1))
    desk.parks("n1.0#2", 6)
    assert desk.members() == ["n1.0#2", "n0.0#3"]
    desk.fails("n0.0#3", 5)
    assert desk.state.membership.outcome == "failed"
    assert desk.state.membership.stop_reason == "the same error at step 5 in 3 attempts on 2 workers"
    assert str(desk.state.membership.root_cause.cause) == "ValueError in forward: bad"
    assert desk.state.membership.root_cause.rank == 0


def test_not_a_number_on_all_ranks_at_once_is_retried_in_process():
    desk = running(3)
    for worker in desk.members():
        desk.fails(worker, 5, "NonFiniteGradient", "step.py:1")
    for worker in desk.members():
        desk.parks(worker, 5)
    assert len(desk.members()) == 3
    assert desk.state.membership.number == 2
    assert not desk.killed()
    assert [i.kind for i in desk.incidents()] == ["nan"]
    desk.commit(6)
    assert desk.state.membership.outcome is None


def test_not_a_number_that_another_rank_says_first_is_the_injected_fault_all_the_same():
    desk = running(3)
    desk.fails("n1.0#2", 5, "NonFiniteGradient", "step.py:1")
    desk.do(e.Injected(fault="nan:rank=0", kind="nan", node="n0", worker="n0.0#1"))
    assert [(i.kind, i.injected) for i in desk.incidents()] == [("nan", "nan:rank=0")]
    assert not desk.state.injections


def test_a_fault_is_injected_at_the_step_that_the_worker_is_in():
    """The coordinator hears of commits once in a while, and would call it an earlier one."""
    desk = running(3)
    desk.do(
        e.Injected(fault="kill-worker:rank=1,step=7", kind="kill-worker", node="n1", worker="n1.0#2", step=7)
    )
    assert desk.records("fault-injected")[-1]["step"] == 7


def test_not_a_number_again_is_the_scripts():
    desk = running(3)
    for attempt in (1, 2):
        for worker in desk.members():
            desk.says(
                worker,
                m.Failed(
                    generation=attempt,
                    step=5,
                    phase=int(Phase.UPDATE),
                    error="NonFiniteGradient",
                    message="nan",
                    traceback="",
                    where="step.py:1",
                ),
            )
        for worker in desk.members():
            desk.parks(worker, 5)
    assert desk.state.membership.outcome == "failed"
    assert desk.told("n0.0#1", m.Stop)[0].save_to == TIER


def test_what_an_agent_says_again_counts_once():
    desk = running(2)
    desk.fails("n0.0#1", 5)
    desk.fails("n0.0#1", 5)
    assert len(desk.incidents()) == 1
    assert not desk.killed()


@pytest.mark.parametrize("told", [True, False])
def test_an_injected_fault_is_judged_as_one_that_nobody_injected(told):
    desk = running(4)
    for _ in range(3):
        worker = desk.members()[0]
        if told:
            desk.do(e.Injected(fault="kill-worker", kind="kill-worker", node=None, worker=worker))
        lose_worker_and_park(desk, worker, 5)
    assert [i.injected for i in desk.incidents()] == ["kill-worker" if told else None] * 3
    assert desk.state.membership.outcome == "failed"
    assert (
        "which have only the script and the samples of that step in common"
        in desk.state.membership.stop_reason
    )


def test_an_injection_that_is_heard_of_late_explains_the_incident():
    desk = running(4)
    desk.exits("n0.0#1", -9)
    failures = list(desk.state.membership.failures)
    desk.do(e.Injected(fault="kill-worker", kind="kill-worker", node=None, worker="n0.0#1"))
    assert desk.incidents()[0].injected == "kill-worker"
    assert desk.state.membership.failures == failures


# ---------------------------------------------------------------- workers that do not start


def test_a_spare_that_cannot_start_does_not_disturb_the_job():
    desk = running(2)
    desk.node("n2")
    for attempt in range(3):
        worker = desk.worker_on("n2")
        desk.started(worker)
        desk.says(
            worker,
            m.Failed(
                generation=0, step=None, phase=0, error="CudaError", message="ECC", traceback="CudaError: ECC"
            ),
        )
        desk.exits(worker, 1)
        desk.wait(5.0)
        assert (desk.state.membership.nodes["n2"].alive, desk.state.membership.outcome) == (attempt < 2, None)
    assert desk.state.membership.number == 1
    assert desk.did(e.ReleaseNode)[0].node == "n2"
    desk.node("n2", session="2")
    assert [n for n, _ in desk.sent(m.Shutdown)] == ["n2"]


def test_a_spare_that_is_slow_to_start_is_replaced_without_a_break():
    desk = running(2)
    desk.node("n2")
    slow = desk.worker_on("n2")
    for _ in range(160):
        desk.wait(2.0)
        desk.commit(desk.state.membership.committed + 1)
    assert slow in desk.killed()
    assert desk.state.membership.number == 1
    assert desk.state.membership.phase is JobPhase.RUNNING


def test_the_same_error_before_the_first_step_on_two_nodes_is_the_scripts():
    desk = Desk(2)
    desk.node("n0")
    desk.node("n1")
    for worker in desk.workers():
        desk.started(worker)
    for worker in desk.workers():
        desk.says(
            worker,
            m.Failed(
                generation=0,
                step=None,
                phase=0,
                error="KeyError",
                message="'x'",
                traceback="Traceback\nKeyError: 'x'",
            ),
        )
        desk.exits(worker, 1)
    assert desk.state.membership.outcome == "failed"
    assert str(desk.state.membership.root_cause.cause) == "KeyError: 'x'"
    assert desk.state.membership.root_cause.node == "n0"
    assert desk.state.membership.root_cause.tail == ["last line"]


def test_the_budget_ends_restarts_and_then_the_job():
    desk = running(2, min_nodes=2, max_restarts=1)
    lose_worker_and_park(desk, "n0.0#1", 5)
    desk.ready("n0.0#3")
    desk.exits("n0.0#3", -9)
    desk.parks("n1.0#2", 5)
    assert desk.state.membership.outcome == "failed"
    assert desk.state.membership.stop_reason == "the restart budget is used up"
    assert len(desk.sent(m.StartWorker)) == 3
    assert desk.told("n1.0#2", m.Stop)[0].save_to == TIER


def test_with_a_spent_budget_it_goes_on_smaller_as_long_as_it_may():
    desk = running(3, max_restarts=0)
    lose_worker_and_park(desk, "n0.0#1", 5)
    assert desk.members() == ["n1.0#2", "n2.0#3"]
    assert len(desk.sent(m.StartWorker)) == 3


def test_an_engine_without_nodes_is_asked_again_after_a_while_only():
    desk = running(2, committed=5)
    desk.lose("n1")
    desk.parks("n0.0#1", 5)
    desk.do(e.NodeUnavailable("full"))
    assert len(desk.did(e.ProvideNode)) == 1
    desk.wait(desk.core.timing.form_s - 1)
    assert len(desk.did(e.ProvideNode)) == 1
    desk.wait(2.0)
    assert len(desk.did(e.ProvideNode)) == 2
    assert desk.state.membership.replaced == 1


def test_a_node_that_was_asked_for_and_never_comes_is_asked_for_again():
    desk = running(2, min_nodes=2)
    desk.lose("n1")
    desk.parks("n0.0#1", 5)
    desk.wait(desk.core.timing.wait_s / 2 + 1)
    assert len(desk.did(e.ProvideNode)) == 2
    desk.wait(desk.core.timing.wait_s / 2)
    assert desk.state.membership.stop_reason == "too few workers for 300 s"


# ---------------------------------------------------------------- hangs


def stall(desk: Desk, worker: str, **views: m.WorkerView) -> None:
    """One agent says that its worker stands still; all answer."""
    desk.do(e.NodeSays(worker.partition(".")[0], m.Stalled(worker, views[worker.partition(".")[0]])))
    request = desk.sent(m.Inspect)[-1][1].request
    for node, view in views.items():
        desk.do(e.NodeSays(node, m.InspectReply(request, (view,))))


def at(desk: Desk, worker: str, phase: Phase, idle_s: float = 5.0, process: str = "S") -> m.WorkerView:
    number = desk.state.membership.number
    median = desk.known(worker).median_s
    return m.WorkerView(
        worker=worker,
        slot=0,
        pid=1,
        formed=number,
        page=PageReading(generation=number, committed=5, phase=int(phase)),
        process=process,
        idle_s=idle_s,
        median_s=median,
    )


def test_who_holds_the_others_up_is_taken_out():
    desk = running(3, spares=1)
    views = {
        "n0": at(desk, "n0.0#1", Phase.REDUCE),
        "n1": at(desk, "n1.0#2", Phase.BACKWARD),
        "n2": at(desk, "n2.0#3", Phase.REDUCE),
    }
    stall(desk, "n0.0#1", **views)
    assert desk.killed() == {"n1.0#2"}
    assert str(desk.incidents()[0].cause) == "hang: makes no progress in backward while others wait for it"
    assert desk.state.membership.phase is JobPhase.BREAKING


def test_who_has_not_been_told_of_the_generation_holds_nobody_up():
    """The order to join was lost with a connection, and its repetition is on the way behind the question."""
    desk = running(3, spares=1)
    views = {"n0": at(desk, "n0.0#1", Phase.JOIN), "n2": at(desk, "n2.0#3", Phase.JOIN)}
    waits = at(desk, "n1.0#2", Phase.IDLE, idle_s=50.0)
    untold = msgspec.structs.replace(waits, formed=0, page=PageReading(phase=int(Phase.IDLE)))
    stall(desk, "n0.0#1", **views, n1=untold)
    desk.wait(desk.core.timing.inspect_s)
    assert not desk.killed()
    assert not desk.incidents()
    desk.wait(desk.core.timing.stall_floor_s)
    stall(desk, "n0.0#1", **views, n1=msgspec.structs.replace(untold, formed=desk.state.membership.number))
    assert desk.killed() == {"n1.0#2"}


def test_who_went_on_since_it_was_looked_at_holds_nobody_up():
    """One node answers late or not at all, and a member that fetched its state has joined meanwhile."""
    desk = running(3, spares=1)
    number = desk.state.membership.number
    fetches, waits = at(desk, "n1.0#2", Phase.TRANSFER, idle_s=50.0), at(desk, "n0.0#1", Phase.JOIN)
    desk.do(e.NodeSays("n0", m.Stalled("n0.0#1", waits)))
    request = desk.sent(m.Inspect)[-1][1].request
    for node, view in (("n0", waits), ("n1", fetches)):
        desk.do(e.NodeSays(node, m.InspectReply(request, (view,))))
    desk.says("n1.0#2", m.Joined(generation=number, join_s=0.1))
    desk.wait(desk.core.timing.inspect_s)
    assert not desk.killed()
    assert not desk.incidents()


@pytest.mark.parametrize(
    ("phase", "joined"), [(Phase.FORWARD, True), (Phase.JOIN, False), (Phase.COMMIT, False)]
)
def test_a_member_in_a_step_has_joined_whether_or_not_that_was_written(phase, joined):
    """It may compile its first one. A member that resolves the step before is not connected yet."""
    desk = running(2)
    worker = desk.known("n1.0#2")
    worker.joined_generation = 0
    desk.crash()
    page = PageReading(generation=desk.state.membership.number, committed=5, phase=int(phase))
    desk.back(n1={"page": page})
    assert (desk.known(worker.name).joined_generation == desk.state.membership.number) is joined


def joining(desk: Desk, phase: Phase = Phase.JOIN, **waits_for: int) -> dict[str, m.WorkerView]:
    """All members connect to each other, each waiting for a rank; the last one has just come and committed nothing."""
    views, number = {}, desk.state.membership.number
    for worker in desk.members():
        node, last = worker.partition(".")[0], worker == desk.members()[-1]
        page = PageReading(
            generation=number,
            committed=0 if last else 5,
            phase=int(phase if last else Phase.JOIN),
            collectives=0 if last else 3,
        )
        page = msgspec.structs.replace(page, waits_for=waits_for.get(node, -1))
        views[node] = m.WorkerView(
            worker=worker,
            slot=0,
            pid=1,
            formed=number,
            page=page,
            process="S",
            idle_s=5.0,
            median_s=None if last else 0.1,
        )
    return views


def once_more(desk: Desk, committed: int = 5) -> None:
    """The generation breaks, all leave it, and the next one forms."""
    assert desk.state.membership.phase is JobPhase.BREAKING
    for worker in desk.members():
        desk.parks(worker, committed)
    assert desk.state.membership.phase is JobPhase.RUNNING


@pytest.mark.parametrize("phase", [Phase.JOIN, Phase.TRANSFER])
def test_a_newcomer_whose_calls_are_not_taken_is_not_the_one_that_does_not_come(phase):
    """Rank 1 waits for rank 3 to connect. Rank 3 says that it calls rank 1, whose port does not answer."""
    desk = running(4)
    stall(desk, "n1.0#2", **joining(desk, phase, n1=3, n3=1))
    assert not desk.killed()
    assert desk.records("stall-judged")[-1]["workers"] == []
    assert (
        str(desk.incidents()[-1].cause)
        == "hang: the workers cannot connect to each other: rank 1 waits for rank 3, rank 3 waits for rank 1"
    )
    assert desk.incidents()[-1].rung == "retry in process"
    once_more(desk)
    desk.commit(7)
    assert not desk.killed()
    assert not desk.incidents()[-1].open


def test_two_that_never_reach_each_other_lose_one_of_them_in_the_end():
    desk = running(4)
    for _ in range(2):
        stall(desk, "n1.0#2", **joining(desk, n1=3, n3=1))
        assert not desk.killed()
        once_more(desk)
    stall(desk, "n1.0#2", **joining(desk, n1=3, n3=1))
    assert desk.killed() == {"n1.0#2"}


def test_of_two_the_one_that_has_been_here_longer_is_lost_so_the_next_time_it_is_the_other():
    desk = running(4)
    desk.state.membership.workers["n1.0#2"].started_s += 60.0
    for _ in range(2):
        stall(desk, "n1.0#2", **joining(desk, n1=3, n3=1))
        once_more(desk)
    stall(desk, "n1.0#2", **joining(desk, n1=3, n3=1))
    assert desk.killed() == {"n3.0#4"}


def test_a_port_that_takes_nobodys_calls_is_found_by_all_who_call_it():
    """Nobody blames those whom rank 0 waits for: they call it."""
    desk = running(4)
    for _ in range(2):
        stall(desk, "n1.0#2", **joining(desk, n0=1, n1=0, n2=0, n3=0))
        assert not desk.killed()
        once_more(desk)
    stall(desk, "n1.0#2", **joining(desk, n0=1, n1=0, n2=0, n3=0))
    assert desk.killed() == {"n0.0#1"}


def test_who_calls_nobody_while_others_wait_for_it_is_taken_out_at_once():
    desk = running(4)
    stall(desk, "n1.0#2", **joining(desk, n0=3, n1=3, n2=3))
    assert desk.killed() == {"n3.0#4"}
    assert str(desk.incidents()[-1].cause) == "hang: does not open a connection while others wait for it"


def test_a_first_step_may_compile_while_others_wait():
    desk = running(3, committed=0)
    views = {
        "n0": at(desk, "n0.0#1", Phase.REDUCE, idle_s=60.0),
        "n1": at(desk, "n1.0#2", Phase.FORWARD, idle_s=61.0),
        "n2": at(desk, "n2.0#3", Phase.REDUCE, idle_s=60.0),
    }
    stall(desk, "n0.0#1", **views)
    assert desk.state.membership.phase is JobPhase.RUNNING
    views["n1"] = at(desk, "n1.0#2", Phase.FORWARD, idle_s=301.0)
    stall(desk, "n0.0#1", **views)
    assert desk.killed() == {"n1.0#2"}


def test_work_of_the_scripts_own_is_no_hang_however_its_stack_differs():
    desk = running(3)
    desk.says("n0.0#1", m.OffStep(True))
    views = {"n0": at(desk, "n0.0#1", Phase.ASIDE, idle_s=60.0)}
    views |= {n: at(desk, w, Phase.REDUCE, idle_s=60.0) for n, w in (("n1", "n1.0#2"), ("n2", "n2.0#3"))}
    desk.do(e.NodeSays("n1", m.Stalled("n1.0#2", views["n1"])))
    request = desk.sent(m.Inspect)[-1][1].request
    stacks = {"n0": "evaluate", "n1": "wait", "n2": "wait"}
    for node, view in views.items():
        desk.do(e.NodeSays(node, m.InspectReply(request, (view,), {view.worker: stacks[node]})))
    assert desk.records("stall-judged")[-1]["reason"] == "some workers are still busy: aside"
    assert desk.state.membership.phase is JobPhase.RUNNING
    assert not desk.killed()


def evaluating(desk, idle_s, busy):
    """Rank 0 is between two steps, and has not said that this takes long."""
    view = msgspec.structs.replace(at(desk, "n0.0#1", Phase.COMMIT, idle_s=idle_s), busy=busy)
    others = {n: at(desk, w, Phase.REDUCE, idle_s=idle_s) for n, w in (("n1", "n1.0#2"), ("n2", "n2.0#3"))}
    stall(desk, "n1.0#2", n0=view, **others)


def test_a_script_that_computes_between_two_steps_is_waited_for_as_long_as_a_start_may_take():
    desk = running(3)
    for idle_s in (60.0, 120.0, 0.9 * desk.core.timing.start_s):
        evaluating(desk, idle_s, busy=True)
        assert (desk.state.membership.phase, desk.killed(), desk.incidents()) == (JobPhase.RUNNING, set(), [])
    evaluating(desk, desk.core.timing.start_s + 1.0, busy=True)
    assert desk.killed() == {"n0.0#1"}


def test_a_script_that_stands_still_between_two_steps_is_told_what_to_write():
    desk = running(3)
    evaluating(desk, 60.0, busy=False)
    assert desk.killed() == {"n0.0#1"}
    assert "put it into `with run.relaxed_watchdog():`" in str(desk.incidents()[0].cause)


def test_work_of_the_scripts_own_may_last_after_a_break_but_not_for_ever():
    desk = running(3)
    desk.wait(1000.0)
    desk.says("n0.0#1", m.OffStep(True))
    desk.exits("n2.0#3", -9)
    desk.parks("n1.0#2", 5)
    desk.ready(desk.worker_on("n2"))
    desk.wait(0.9 * desk.core.timing.start_s)
    assert desk.state.membership.phase is JobPhase.BREAKING
    desk.crash()
    desk.back(
        "n0",
        "n1",
        "n2",
        n0={
            "page": PageReading(generation=desk.state.membership.number, committed=5, phase=int(Phase.ASIDE))
        },
    )
    assert desk.known("n0.0#1").aside
    desk.wait(0.2 * desk.core.timing.start_s)
    assert desk.killed() == {"n0.0#1"}
    assert desk.state.membership.phase is not JobPhase.BREAKING


def test_work_of_the_scripts_own_that_ends_lets_the_others_go_on():
    desk = running(3)
    desk.says("n0.0#1", m.OffStep(True))
    desk.exits("n2.0#3", -9)
    desk.parks("n1.0#2", 5)
    desk.wait(60.0)
    desk.says("n0.0#1", m.OffStep(False))
    desk.parks("n0.0#1", 5)
    assert desk.members() == ["n0.0#1", "n1.0#2"]


def test_a_compiling_worker_has_time_to_leave_a_broken_generation():
    desk = running(3, committed=0)
    desk.exits("n2.0#3", -9)
    desk.parks("n0.0#1", 0)
    desk.wait(60.0)
    assert desk.state.membership.phase is JobPhase.BREAKING
    desk.parks("n1.0#2", 0)
    assert desk.members() == ["n0.0#1", "n1.0#2"]


def test_a_worker_that_does_not_leave_a_broken_generation_is_taken_out():
    desk = running(3)
    desk.exits("n2.0#3", -9)
    desk.parks("n0.0#1", 5)
    desk.wait(3.1)
    assert desk.killed() == {"n1.0#2"}
    assert desk.members() == ["n0.0#1"]


def test_one_that_waits_on_in_a_broken_generation_has_no_more_than_a_stall_even_in_its_first_step():
    desk = running(3, committed=0)
    desk.exits("n2.0#3", -9)
    desk.parks("n0.0#1", 0)
    waits = at(desk, "n1.0#2", Phase.REDUCE)
    desk.do(
        e.NodeSays("n1", m.Stalled("n1.0#2", waits))
    )  # its standstill began before the break: it has time
    assert not desk.killed()
    desk.wait(desk.core.timing.stall_floor_s)
    desk.do(e.NodeSays("n1", m.Stalled("n1.0#2", at(desk, "n1.0#2", Phase.FORWARD))))  # this one computes
    assert not desk.killed()
    desk.do(e.NodeSays("n1", m.Stalled("n1.0#2", waits)))
    assert desk.killed() == {"n1.0#2"}


def test_a_stopped_worker_in_a_broken_generation_is_taken_out_at_once():
    desk = running(3)
    desk.exits("n2.0#3", -9)
    desk.do(e.NodeSays("n1", m.Stalled("n1.0#2", at(desk, "n1.0#2", Phase.FORWARD, process="T"))))
    assert desk.killed() == {"n1.0#2"}


def test_a_stopped_spare_is_replaced_without_a_break():
    desk = running(2, spares=1)
    spare = desk.worker_on("n2")
    desk.do(e.NodeSays("n2", m.Stalled(spare, desk.view(spare, process="T"))))
    assert desk.killed() == {spare}
    assert desk.state.membership.phase is JobPhase.RUNNING
    assert not desk.incidents()


def test_nobody_differs_twice_is_retried_then_half_is_replaced_and_the_state_lives_on():
    desk = running(4)
    for attempt in range(3):
        members = desk.members()
        views = {w.partition(".")[0]: at(desk, w, Phase.REDUCE) for w in members}
        stall(desk, members[0], **views)
        assert desk.state.membership.phase is JobPhase.BREAKING
        killed = desk.killed()
        for worker in members:
            if worker not in killed:
                desk.parks(worker, 5)
        assert len(killed) == (2 if attempt == 2 else 0)
    assert desk.state.membership.lost_steps == 0
    assert len(desk.members()) == 2


def test_the_half_that_is_replaced_first_is_the_older_one_so_the_next_time_it_is_the_other():
    desk = running(4)
    workers = desk.state.membership.workers
    for name in ("n0.0#1", "n2.0#3"):
        workers[name].started_s += 60.0
    for _ in range(3):
        members = desk.members()
        stall(desk, members[0], **{w.partition(".")[0]: at(desk, w, Phase.REDUCE) for w in members})
        if not desk.killed():
            for worker in members:
                desk.parks(worker, 5)
    assert desk.killed() == {"n1.0#2", "n3.0#4"}


def test_all_at_a_standstill_without_waiting_for_each_other_is_watched_for_a_while():
    desk = running(2)
    views = {w.partition(".")[0]: at(desk, w, Phase.DATA) for w in desk.members()}
    for _ in range(9):
        stall(desk, desk.members()[0], **views)
    assert desk.state.membership.phase is JobPhase.RUNNING
    stall(desk, desk.members()[0], **views)
    assert desk.state.membership.phase is JobPhase.BREAKING


def test_no_verdict_while_a_node_does_not_answer():
    desk = running(3)
    view = at(desk, "n0.0#1", Phase.VOTE)
    desk.do(e.NodeSays("n0", m.Stalled("n0.0#1", view)))
    desk.do(e.NodeSays("n0", m.InspectReply(1, (view,))))
    desk.do(e.NodeSays("n1", m.InspectReply(1, (at(desk, "n1.0#2", Phase.REDUCE),))))
    desk.wait(desk.core.timing.inspect_s + 0.1)
    assert desk.records("stall-judged")[0]["reason"] == "not every worker reported its position"
    assert desk.state.membership.phase is JobPhase.RUNNING


# ---------------------------------------------------------------- the coordinator is lost


def test_a_new_coordinator_adopts_the_running_generation():
    desk = running(3)
    desk.crash()
    assert desk.newest == [a for a in desk.newest if isinstance(a, e.Record)]
    desk.back()
    assert desk.state.membership.number == 1
    assert not desk.told("n0.0#1", m.JoinGeneration, newest=True)
    desk.commit(6)
    incident = desk.incidents()[0]
    assert (incident.rung, incident.kind, incident.open) == ("coordinator", "kill-coordinator", False)
    assert desk.state.membership.phase is JobPhase.RUNNING


def test_a_coordinator_that_handed_over_is_no_incident():
    desk = running(3)
    desk.crash(handed_over=True)
    assert desk.records("handed-over") == [{"away_s": 1.0}]
    assert desk.incidents() == []
    desk.back("n0", "n1")
    desk.wait(desk.core.timing.adopt_s + 0.1, alive=("n0", "n1"))
    assert not desk.state.membership.nodes["n2"].alive


def test_agents_that_do_not_come_back_are_lost():
    desk = running(3)
    desk.crash()
    desk.back("n0", "n1")
    desk.wait(desk.core.timing.adopt_s + 0.1, alive=("n0", "n1"))
    assert not desk.state.membership.nodes["n2"].alive
    assert desk.state.membership.phase is JobPhase.BREAKING


def test_what_is_lost_with_a_coordinator_is_lost_at_the_step_where_the_others_are():
    """Also where nobody wrote that the others had come so far, and they have not moved since."""
    desk = running(3)
    desk.crash()
    there = PageReading(generation=1, committed=7, phase=int(Phase.REDUCE))
    desk.back("n0", "n1", n0={"page": there}, n1={"page": msgspec.structs.replace(there, committed=6)})
    desk.wait(desk.core.timing.adopt_s + 0.1, alive=("n0", "n1"))
    assert desk.records("broke")[-1]["step"] == 7


def test_a_page_of_a_generation_that_is_over_says_nothing_of_this_one():
    desk = running(2)
    desk.commit(6)
    desk.crash()
    desk.back(n0={"page": PageReading(generation=0, committed=9, phase=int(Phase.PARKED))})
    assert desk.state.membership.committed == 6


def test_a_generation_that_nobody_heard_of_is_told_again():
    desk = running(3)
    lose_worker_and_park(desk, "n1.0#2", 5, prepared=True)
    desk.crash()
    desk.back("n0", n0={"formed": 1, "parked": m.Parked(generation=1, committed=5, prepared=True)})
    form = desk.told("n0.0#1", m.JoinGeneration, newest=True)[0]
    assert form.apply
    assert form.generation.number == 2


def test_a_yield_that_nobody_heard_of_is_told_again():
    desk = running(3)
    lose_worker_and_park(desk, "n1.0#2", 5)
    desk.ready("n1.0#4")
    desk.commit(6)
    desk.crash()
    desk.back("n0")
    assert desk.told("n0.0#1", m.EndAtCommit, newest=True)
    assert not desk.told("n0.0#1", m.Break, newest=True)


def test_a_break_that_nobody_heard_of_is_told_again_and_gets_its_time():
    desk = running(3)
    desk.exits("n2.0#3", -9)
    desk.crash(away_s=60.0)
    assert not desk.killed()
    desk.back("n0", "n1")
    assert desk.told("n0.0#1", m.Break)
    desk.parks("n0.0#1", 5)
    desk.parks("n1.0#2", 5)
    assert desk.members() == ["n0.0#1", "n1.0#2"]


def test_a_stop_that_nobody_heard_of_is_told_again():
    desk = running(2)
    desk.do(e.StopRequested("enough"))
    desk.parks("n0.0#1", 6)
    desk.parks("n1.0#2", 6)
    desk.crash()
    desk.back("n0", n0={"parked": m.Parked(generation=1, committed=6)})
    assert desk.told("n0.0#1", m.Stop, newest=True)[0].save_to == TIER


def test_a_worker_whose_start_was_lost_is_started_again_without_cost():
    desk = running(2)
    desk.node("n2")
    lost = desk.worker_on("n2")
    desk.crash()
    desk.back("n0", "n1")
    desk.node("n2")
    assert lost in desk.killed()
    assert desk.worker_on("n2") != lost
    assert desk.state.membership.restarts_used == 0


def test_a_worker_that_ended_meanwhile_is_lost_when_its_end_is_told():
    desk = running(2)
    desk.crash()
    view = desk.view("n0.0#1", process="X")
    desk.node("n0", workers=(view,))
    assert desk.known("n0.0#1").phase is WorkerPhase.MEMBER
    desk.exits("n0.0#1", -9)
    assert desk.state.membership.phase is JobPhase.BREAKING


def test_a_process_of_a_state_that_was_lost_is_ended_and_its_name_is_never_given_again():
    """A coordinator that begins anew would else end the new process by the order for the old one."""
    desk = Desk(2)
    left = msgspec.structs.replace(running(2).view("n0.0#1"), worker="n0.0#7")
    desk.node("n0", workers=(left,))
    desk.node("n1")
    assert desk.sent(m.KillWorker) == [("n0", m.KillWorker("n0.0#7"))]
    assert sorted(start.worker for _, start in desk.sent(m.StartWorker)) == ["n0.0#8", "n1.0#9"]


def test_a_worker_that_an_agent_no_longer_knows_is_lost_after_a_while():
    desk = running(2)
    desk.crash()
    desk.node("n0")
    desk.back("n1")
    desk.wait(1.9)
    assert desk.known("n0.0#1").phase is WorkerPhase.MEMBER
    desk.wait(0.2)
    assert desk.known("n0.0#1").phase is WorkerPhase.GONE


def test_steps_that_were_done_while_no_coordinator_listened_are_not_done_again():
    desk = running(2)
    desk.crash()
    for name, worker in (("n0", "n0.0#1"), ("n1", "n1.0#2")):
        desk.node(
            name,
            workers=(desk.view(worker, process="X", done=m.Done(committed=40, params_xxh3="end", loss=0.1)),),
        )
        desk.exits(worker, 0)
    assert desk.state.membership.outcome == "finished"
    assert desk.state.membership.committed == 40


def test_the_end_is_told_again_by_a_successor():
    desk = running(1)
    desk.says("n0.0#1", m.Done(committed=6, params_xxh3="end", loss=0.1))
    desk.exits("n0.0#1", 0)
    assert [a.outcome for a in desk.did(e.End)] == ["finished"]
    desk.crash()
    assert [a.outcome for a in desk.did(e.End, newest=True)] == ["finished"]
    desk.node("n0")
    assert desk.sent(m.Shutdown, newest=True)[0][0] == "n0"


def test_requests_for_nodes_are_made_again_by_a_successor_when_the_engine_can_hear():
    desk = running(2)
    desk.lose("n1")
    desk.parks("n0.0#1", 5)
    desk.crash()
    assert not desk.did(e.ProvideNode, newest=True)
    desk.back("n0")
    desk.wait(desk.core.timing.adopt_s)
    assert len(desk.did(e.ProvideNode)) == 2


# ---------------------------------------------------------------- stop


def stopped(desk: Desk) -> None:
    for worker in desk.workers(WorkerPhase.PARKED):
        if stop := desk.told(worker, m.Stop):
            committed = desk.known(worker).committed + stop[0].apply
            if stop[0].save_to:
                desk.says(worker, m.Saved(committed, "checkpoint"))
            desk.says(worker, m.Done(committed=committed, params_xxh3="bits", loss=None, stopped=True))
    for worker in desk.workers(WorkerPhase.DONE):
        desk.exits(worker, 0)


def test_stop_while_running_ends_at_a_commit_and_saves_once():
    desk = running(3)
    desk.do(e.StopRequested("enough"))
    assert all(desk.told(w, m.EndAtCommit) for w in desk.members())
    for worker in desk.members():
        desk.parks(worker, 6)
    saving = [w for w in desk.members() if desk.told(w, m.Stop)]
    assert saving == ["n0.0#1"]  # the others keep their copies until it is on disk
    stopped(desk)
    stopped(desk)
    assert desk.state.storage.durable == Durable(6, "checkpoint")
    assert desk.did(e.End)[0].outcome == "stopped"


def test_stop_while_gathering_the_first_generation():
    desk = Desk(2)
    desk.node("n0")
    desk.node("n1")
    desk.started("n0.0#1")
    desk.do(e.StopRequested("enough"))
    assert desk.killed() == {"n0.0#1", "n1.0#2"}
    assert desk.did(e.End)[0].outcome == "stopped"


def test_stop_while_breaking_saves_what_counts_after_all():
    desk = running(3)
    desk.exits("n1.0#2", -9)
    desk.do(e.StopRequested("enough"))
    desk.parks("n0.0#1", 5, prepared=True)
    desk.parks("n2.0#3", 5, prepared=True)
    stop = desk.told("n0.0#1", m.Stop)[0]
    assert (stop.apply, stop.save_to) == (True, TIER)
    stopped(desk)
    stopped(desk)
    assert desk.state.storage.durable.step == 6


def test_a_saver_that_dies_is_followed_by_another():
    desk = running(2)
    desk.do(e.StopRequested("enough"))
    desk.parks("n0.0#1", 6)
    desk.parks("n1.0#2", 6)
    desk.exits("n0.0#1", -9)
    assert desk.told("n1.0#2", m.Stop)[0].save_to == TIER


def test_a_saver_that_hangs_is_followed_by_another():
    desk = running(2)
    desk.do(e.StopRequested("enough"))
    desk.parks("n0.0#1", 6)
    desk.parks("n1.0#2", 6)
    desk.wait(desk.core.timing.start_s + 1)
    assert desk.killed() == {"n0.0#1"}
    assert desk.told("n1.0#2", m.Stop)[0].save_to == TIER
    desk.wait(desk.core.timing.start_s + 1)
    assert desk.did(e.End)


def test_a_step_that_does_not_end_is_dropped_when_the_job_stops():
    desk = running(2)
    desk.do(e.StopRequested("enough"))
    desk.wait(desk.core.timing.stop_s + 0.1)
    assert desk.told("n0.0#1", m.Break)
    desk.parks("n0.0#1", 5)
    desk.parks("n1.0#2", 5)
    assert desk.told("n0.0#1", m.Stop)[0].save_to == TIER


def test_nothing_is_saved_when_nothing_was_trained():
    desk = running(2, committed=0)
    desk.do(e.StopRequested("enough"))
    desk.parks("n0.0#1", 0)
    desk.parks("n1.0#2", 0)
    assert [desk.told(w, m.Stop)[0].save_to for w in desk.members()] == [None, None]


# ---------------------------------------------------------------- the last step


def test_all_done_is_finished():
    desk = running(2, spares=1)
    for worker in desk.members():
        desk.says(worker, m.Done(committed=9, params_xxh3="bits", loss=0.5))
    assert desk.killed() == {"n2.0#3"}
    for worker in desk.members():
        desk.exits(worker, 0)
    assert desk.did(e.End)[0].outcome == "finished"
    assert desk.state.membership.restarts_used == 0


@pytest.mark.parametrize(
    ("committed", "reason"),
    [
        (9, "the script failed after its last step"),
        # The loop was left by an error between two steps, or by `break`.
        (3, "the script failed after 3 of 9 steps"),
        (0, "the script failed after 0 of 9 steps"),
    ],
)
def test_a_script_that_fails_outside_of_a_step_is_said_to_have_failed_where_it_did(committed, reason):
    desk = running(2)
    desk.state.membership.until = 9
    for worker in desk.members():
        desk.says(worker, m.Done(committed=committed, params_xxh3="bits", loss=0.5))
    for worker in desk.members():
        desk.exits(worker, 1)
    membership = desk.state.membership
    assert (membership.outcome, membership.stop_reason) == ("failed", reason)
    assert desk.incidents() == []


def test_one_is_done_and_the_others_only_prepared():
    desk = running(3)
    desk.says("n0.0#1", m.Done(committed=6, params_xxh3="bits", loss=0.5))
    desk.exits("n1.0#2", -9)
    desk.parks("n2.0#3", 5, prepared=True)
    assert desk.told("n2.0#3", m.Stop)[0].apply
    desk.says("n2.0#3", m.Done(committed=6, params_xxh3="bits", loss=0.5, stopped=True))
    desk.exits("n2.0#3", 0)
    desk.exits("n0.0#1", 0)
    assert desk.state.membership.outcome == "finished"
    assert {w.digest for w in desk.state.membership.workers.values() if w.digest} == {"bits"}


def test_a_script_that_fails_after_its_last_step_is_told_apart_from_a_machine_that_does():
    for code, outcome in ((1, "failed"), (-9, "finished")):
        desk = running(1)
        desk.says("n0.0#1", m.Done(committed=6, params_xxh3="bits", loss=0.5))
        desk.exits("n0.0#1", code)
        assert desk.state.membership.outcome == outcome


# ---------------------------------------------------------------- a month


def test_a_long_run_stays_small():
    desk = running(3)
    largest = 0
    for fault in range(400):
        desk.wait(0.5)
        name = desk.members()[fault % 3].partition(".")[0]
        if fault % 2:
            lose_worker_and_park(desk, desk.worker_on(name), desk.state.membership.committed)
            desk.state.membership.restarts_used = 0
        else:
            desk.lose(name)
            for worker in desk.members():
                if desk.known(worker).phase is WorkerPhase.MEMBER:
                    desk.parks(worker, desk.state.membership.committed)
            desk.state.membership.replaced = 0
            desk.node(f"m{fault}")
        desk.commit(desk.state.membership.committed + 1)
        for worker in desk.workers(WorkerPhase.STARTING):
            desk.ready(worker)
        desk.commit(desk.state.membership.committed + 1)
        for worker in desk.members():
            desk.parks(worker, desk.state.membership.committed)
        desk.commit(desk.state.membership.committed + 1)
        for order_id in list(
            desk.state.orders.open
        ):  # as an engine does; see test_engine_orders for one that does not
            desk.do(OrderDone(order_id))
        largest = max(largest, len(msgspec.msgpack.encode(desk.state)))
    assert incidents.total(desk.state) == 400
    assert len(desk.incidents()) <= 2 * incidents.KEPT
    assert not any(i.open for i in desk.incidents())
    assert largest < 128 << 10, largest
    assert len(desk.state.membership.workers) < 100
    assert len(desk.state.membership.nodes) < 100


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_state_survives_a_round_trip(nodes):
    desk = running(nodes, spares=1)
    desk.do(e.StopRequested("enough"))
    encoded = msgspec.msgpack.encode(desk.state)
    assert msgspec.msgpack.encode(msgspec.msgpack.decode(encoded, type=type(desk.state))) == encoded
