"""Level 0, one situation after the other: scripts that do not know of Holdfast."""

import msgspec
from desk import Desk

from holdfast.coordinator.kernel import events as e
from holdfast.coordinator.kernel.state import JobPhase
from holdfast.coordinator.service.job_view import build_status
from holdfast.protocol import messages as m
from holdfast.protocol.causes import KilledForMemory
from holdfast.protocol.phases import GroupReading, PageReading, Phase


def launched(nodes: int = 2, nproc: int = 1, spares: int = 0, **spec: object) -> Desk:
    """A job whose first attempt runs."""
    desk = Desk(nodes, nproc=nproc, spares=spares, **spec)
    for i in range(nodes + spares):
        desk.node(f"n{i}", slots=nproc)
    assert desk.state.membership.phase is JobPhase.RUNNING
    return desk


def end(desk: Desk, code: int = -15) -> None:
    """Everyone who was told to end ends."""
    for worker in desk.workers():
        desk.exits(worker, code)


def raises(desk: Desk, worker: str, error: str = "KeyError: 'x'") -> None:
    kind, _, message = error.partition(": ")
    desk.says(
        worker,
        m.Failed(
            generation=0, step=None, phase=0, error=kind, message=message, traceback=f"Traceback\n{error}"
        ),
    )
    desk.exits(worker, 1)


def environments(desk: Desk) -> list[dict[str, str]]:
    """The environment of every worker that was started, in order."""
    return [order.env for _, order in desk.sent(m.StartWorker)]


def test_all_start_together_with_torchruns_variables():
    desk = launched(2, nproc=2)
    found = environments(desk)
    assert [env["RANK"] for env in found] == ["0", "1", "2", "3"]
    assert [env["LOCAL_RANK"] for env in found] == ["0", "1", "0", "1"]
    assert [env["GROUP_RANK"] for env in found] == ["0", "0", "1", "1"]
    assert {env["WORLD_SIZE"] for env in found} == {"4"}
    assert {env["MASTER_ADDR"] for env in found} == {"n0"}
    assert len({env["MASTER_PORT"] for env in found}) == 1


def test_a_death_ends_all_and_all_start_again_with_another_port():
    desk = launched(2)
    desk.exits("n0.0#1", -9)
    assert desk.sent(m.KillWorker, newest=True) == [("n1", m.KillWorker("n1.0#2", 1.0))]
    assert len(environments(desk)) == 2  # nobody starts before the last of the old attempt is gone
    end(desk)
    before, after = environments(desk)[:2], environments(desk)[2:]
    assert [env["RANK"] for env in after] == ["0", "1"]
    assert before[0]["MASTER_PORT"] != after[0]["MASTER_PORT"]
    assert after[0]["TORCHELASTIC_RESTART_COUNT"] == "1"
    assert desk.incidents()[0].rung == "restart of all workers"


def test_exit_code_0_of_all_is_finished():
    desk = launched(2)
    desk.exits("n0.0#1", 0)
    assert desk.state.membership.phase is JobPhase.RUNNING
    desk.exits("n1.0#2", 0)
    assert desk.did(e.End)[0].outcome == "finished"
    assert {n for n, _ in desk.sent(m.Shutdown)} == {"n0", "n1"}


def test_a_restart_and_then_the_end():
    desk = launched(2)
    desk.exits("n1.0#2", 3)
    end(desk)
    for worker in desk.workers():
        desk.exits(worker, 0)
    assert desk.state.membership.outcome == "finished"
    assert desk.state.membership.restarts_used == 1


def test_progress_closes_the_incident():
    desk = launched(2)
    desk.exits("n1.0#2", -9)
    end(desk)
    desk.says("n0.0#3", m.Progress(generation=2, committed=1, median_s=0.1))
    assert not desk.incidents()[0].open


def test_a_lost_node_is_replaced_by_a_spare():
    desk = launched(2, spares=1)
    desk.lose("n0")
    end(desk)
    assert [n for n, _ in desk.sent(m.StartWorker)][2:] == ["n1", "n2"]
    assert environments(desk)[2]["MASTER_ADDR"] == "n1"
    assert len(desk.did(e.ProvideNode)) == 1


def loses_its_peer(desk: Desk, worker: str) -> None:
    raises(desk, worker, "RuntimeError: Connection closed by peer")


def test_an_error_that_tells_of_a_lost_node_before_it_is_missed_is_not_the_worker_s():
    desk = launched(2, spares=1)
    loses_its_peer(desk, "n0.0#1")
    desk.lose("n1")
    incident = desk.incidents()[0]
    assert len(desk.incidents()) == 1
    assert (incident.node, incident.ranks) == ("n1", [1])
    assert "connection closed" in str(incident.cause)
    assert "Connection closed by peer" in incident.evidence[0].text
    assert desk.state.membership.failures == []
    assert desk.state.membership.nodes["n0"].failures == 0
    assert desk.state.membership.root_cause.node == "n1"
    assert [n for n, _ in desk.sent(m.StartWorker)][2:] == ["n0", "n2"]


def test_a_worker_that_the_kernel_killed_for_memory_names_the_limit():
    desk = launched(2)
    killed = m.Exited(worker="n0.0#1", code=-9, out_of_memory=True, memory_limit=1500 << 20)
    desk.do(e.NodeSays("n0", killed))
    (incident,) = desk.incidents()
    assert incident.cause == KilledForMemory(1500 << 20)


def test_an_error_that_tells_of_a_killed_worker_is_not_the_one_s_who_raised_it():
    desk = launched(2, nproc=2)
    loses_its_peer(desk, "n0.0#1")
    desk.exits("n0.1#2", -9)
    assert [(i.node, i.ranks) for i in desk.incidents()] == [("n0", [1])]
    assert str(desk.incidents()[0].cause) == "killed by signal 9 (SIGKILL)"
    assert (desk.state.membership.root_cause.rank, desk.state.membership.failures) == (1, [])


def test_a_worker_that_was_killed_by_us_explains_no_error():
    desk = launched(2)
    raises(desk, "n0.0#1")
    desk.exits("n1.0#2", -9, killed=True)
    assert [(i.node, i.ranks) for i in desk.incidents()] == [("n0", [0])]


def test_a_node_that_is_given_up_for_an_error_does_not_explain_it():
    desk = launched(2, nproc=2)
    for _ in range(3):
        raises(desk, next(w for w in desk.members() if w.startswith("n0.0")))
        end(desk)
    assert desk.records("node-lost")[0]["node"] == "n0"
    assert not desk.records("incident-explained")


def test_without_restarts_too_the_worker_that_was_killed_is_named():
    desk = launched(2, max_restarts=0)
    loses_its_peer(desk, "n0.0#1")
    desk.exits("n1.0#2", -9)
    assert desk.state.membership.outcome == "failed"
    assert (desk.state.membership.root_cause.node, desk.state.membership.root_cause.rank) == ("n1", 1)


def test_a_syntax_error_is_the_scripts_fault_and_the_first_one_is_shown():
    desk = launched(2)
    raises(desk, "n0.0#1", "SyntaxError: invalid syntax")
    end(desk)
    raises(desk, "n1.0#4", "SyntaxError: invalid syntax")
    end(desk)
    assert desk.state.membership.outcome == "failed"
    assert desk.state.membership.stop_reason == "the same error in 2 attempts in a row"
    assert (desk.state.membership.root_cause.node, desk.state.membership.root_cause.rank) == ("n0", 0)
    assert str(desk.state.membership.root_cause.cause) == "SyntaxError: invalid syntax"
    assert desk.did(e.End)[0].outcome == "failed"


def test_two_deaths_far_apart_are_no_fault_of_the_script():
    desk = launched(2)
    for attempt in range(6):
        desk.says(
            desk.members()[0],
            m.Progress(generation=desk.state.membership.number, committed=10 * (attempt + 1), median_s=0.1),
        )
        desk.exits(desk.members()[attempt % 2], -9)
        end(desk)
    assert desk.state.membership.outcome is None
    assert desk.state.membership.number == 7


def test_a_node_whose_workers_fail_again_and_again_is_given_up():
    desk = launched(2, spares=1)
    for _ in range(3):
        there = [w for w in desk.workers() if w.startswith("n0.")]
        if not there:
            break
        raises(desk, there[0], "CudaError: ECC")
        end(desk)
    # a node with failures comes last: the spare took its place already
    assert desk.state.membership.nodes["n0"].failures == 1
    desk = launched(2)
    for _ in range(3):
        raises(desk, desk.worker_on("n0"), "CudaError: ECC")
        end(desk)
    assert not desk.state.membership.nodes["n0"].alive
    assert desk.did(e.ReleaseNode)[0].reason == "its workers keep failing: CudaError: ECC"


def test_without_restarts_the_first_failure_is_the_last():
    desk = launched(1, max_restarts=0)
    raises(desk, "n0.0#1")
    assert desk.state.membership.stop_reason == "no restarts are allowed"
    assert desk.did(e.End)[0].outcome == "failed"


def test_the_budget_is_respected():
    desk = launched(2, max_restarts=2)
    for code in (3, 4, 5):
        desk.exits(desk.members()[0], code)
        end(desk)
    assert desk.state.membership.stop_reason == "the restart budget is used up"
    assert desk.state.membership.number == 3


def test_no_nodes_and_none_to_be_had():
    desk = launched(2, min_nodes=2, max_restarts=1)
    desk.lose("n0")
    end(desk)
    desk.node("n2")
    assert desk.state.membership.number == 2
    desk.lose("n2")
    end(desk)
    assert desk.state.membership.outcome == "failed"


def test_a_stopped_worker_restarts_all():
    desk = launched(2)
    view = desk.view("n1.0#2", process="T")
    desk.do(e.NodeSays("n1", m.Stalled("n1.0#2", view)))
    desk.do(e.NodeSays("n0", m.InspectReply(1, (desk.view("n0.0#1"),))))
    desk.do(e.NodeSays("n1", m.InspectReply(1, (view,))))
    assert desk.killed() == {"n0.0#1", "n1.0#2"}
    assert desk.incidents()[0].ranks == [1]


def entered(number: int, waits: bool = False) -> tuple[GroupReading, ...]:
    reading = GroupReading(
        group="0/ab/gloo", label="default_pg", size=3, entered=number, operation="all_reduce", waits=waits
    )
    return (reading,)


def hang(desk: Desk, *behind: str, busy: bool = False, idle_s: float = 50.0) -> None:
    """Agents say that all stand still: those of these nodes have not entered the collective in which the others wait."""
    views = {}
    for worker in desk.members():
        node = desk.known(worker).node
        groups = entered(40) if node in behind else entered(41, waits=True)
        page = PageReading(committed=20, phase=int(Phase.FORWARD))
        views[node] = desk.view(
            worker, page=page, idle_s=idle_s, median_s=0.1, groups=groups, busy=busy and node in behind
        )
    any_view = next(iter(views.values()))
    desk.do(e.NodeSays("n0", m.Stalled(any_view.worker, any_view)))
    request = desk.sent(m.Inspect)[-1][1].request
    for node, view in views.items():
        desk.do(e.NodeSays(node, m.InspectReply(request, (view,))))


NOT_ENTERED = {"collective": "all_reduce 41 of default_pg", "stood_at_step": 20}


def test_a_hang_names_the_rank_that_has_not_entered_the_collective_of_the_others():
    desk = launched(3)
    hang(desk, "n1")
    (judged,) = desk.records("stall-judged")
    assert judged["workers"] == ["n1.0#2"]
    assert judged.items() >= NOT_ENTERED.items()
    (opened,) = desk.records("incident-opened")
    assert opened.items() >= ({"node": "n1", "ranks": [1]} | NOT_ENTERED).items()
    assert opened["cause"] == "hang: has not entered all_reduce 41 of default_pg, in which others wait"
    (incident,) = build_status(desk.state, desk.now).incidents
    shown = msgspec.structs.asdict(incident)
    assert shown.items() >= ({"node": "n1", "ranks": [1]} | NOT_ENTERED).items()
    assert {w for _, k in desk.sent(m.KillWorker) for w in [k.worker]} == {"n0.0#1", "n1.0#2", "n2.0#3"}


def test_a_hang_is_remembered_by_a_successor_with_all_that_is_known():
    desk = launched(3)
    hang(desk, "n1")
    desk.crash()
    shown = msgspec.structs.asdict(build_status(desk.state, desk.now).incidents[0])
    assert shown.items() >= NOT_ENTERED.items()


def test_each_node_that_holds_the_others_up_has_an_incident_of_its_own():
    desk = launched(3)
    hang(desk, "n0", "n2")
    assert [(i.node, i.ranks) for i in desk.incidents()] == [("n0", [0]), ("n2", [2])]
    assert desk.state.membership.restarts_used == 1


def test_a_rank_that_computes_while_the_others_wait_for_it_is_left_alone_for_the_time_of_a_start():
    desk = launched(3)
    hang(desk, "n1", busy=True)
    assert desk.records("stall-judged")[-1]["workers"] == ["n1.0#2"]
    assert not desk.incidents()
    assert not desk.killed()
    # An endless loop computes too.
    desk.wait(desk.core.timing.start_s)
    hang(desk, "n1", busy=True, idle_s=desk.core.timing.start_s + 50.0)
    assert [(i.node, i.ranks) for i in desk.incidents()] == [("n1", [1])]


def test_in_a_hang_in_which_nobody_differs_what_is_not_known_is_null():
    desk = launched(3)
    hang(desk)
    (judged,) = desk.records("stall-judged")
    assert (judged["workers"], judged["collective"], judged["stood_at_step"]) == ([], None, None)
    (opened,) = desk.records("incident-opened")
    assert (opened["node"], opened["ranks"]) == (None, [])
    assert (opened["collective"], opened["stood_at_step"]) == (None, None)
    assert desk.state.membership.phase is JobPhase.BREAKING


def test_a_hang_after_the_last_restart_is_blamed_on_its_rank():
    desk = launched(3, max_restarts=0)
    hang(desk, "n1")
    end(desk)
    root_cause = desk.state.membership.root_cause
    assert (root_cause.rank, root_cause.node, root_cause.step) == (1, "n1", 20)
    assert str(root_cause.cause).startswith("hang: has not entered all_reduce 41")
    assert desk.state.membership.outcome == "failed"


def test_ranks_have_time_to_say_where_they_are_in_their_collectives():
    desk = launched(3)
    view = desk.view("n0.0#1", idle_s=50.0)
    desk.do(e.NodeSays("n0", m.Stalled("n0.0#1", view)))
    desk.wait(desk.core.timing.inspect_s + 0.9 * desk.core.timing.where_s)
    assert not desk.records("stall-judged")
    desk.wait(0.2 * desk.core.timing.where_s)
    assert desk.records("stall-judged")[-1]["reason"] == "not every worker reported its position"


def test_stop_ends_all_with_a_grace():
    desk = launched(2)
    desk.do(e.StopRequested("enough"))
    assert {k.grace_s for _, k in desk.sent(m.KillWorker)} == {desk.core.timing.stop_s / 2}
    end(desk)
    assert desk.did(e.End)[0].outcome == "stopped"


def test_stop_does_not_wait_for_ever():
    desk = launched(2)
    desk.do(e.StopRequested("enough"))
    desk.wait(desk.core.timing.stop_s + 0.1)
    assert desk.did(e.End)[0].outcome == "stopped"


def test_orders_to_end_that_were_lost_are_given_again_by_a_successor():
    desk = launched(2)
    desk.exits("n0.0#1", -9)
    desk.crash()
    desk.back("n1")
    assert desk.sent(m.KillWorker, newest=True) == [("n1", m.KillWorker("n1.0#2"))]


def test_who_was_told_to_end_is_no_member_at_level_2():
    desk = launched(2)
    desk.exits("n0.0#1", -9)
    desk.says("n1.0#2", m.Attached())  # its last words were on the way already
    desk.says("n1.0#2", m.Ready(digest="d", host="n1", vote_port=1, data_port=2))
    assert desk.state.membership.level == 2
    assert not desk.told("n1.0#2", m.JoinGeneration)
    for worker in desk.workers():
        assert worker not in ("n0.0#1", "n1.0#2")
        desk.ready(worker)
    desk.exits("n1.0#2", -15)
    assert desk.state.membership.phase is JobPhase.RUNNING
    desk.commit(1)
    assert not any(i.open for i in desk.incidents())


def test_how_far_a_load_is_can_be_seen_while_it_goes_on():
    desk = launched(2)
    reader, other = desk.workers()

    def seen() -> list[tuple[str, tuple[int, int] | None]]:
        workers = build_status(desk.state, desk.now).workers
        return [(w.state, w.restored) for w in workers]

    desk.says(reader, m.Restoring(1, 300, 1000))
    assert seen() == [("restoring", (300, 1000)), ("member", None)]
    desk.says(reader, m.Restoring(1, 1000, 1000))
    desk.says(other, m.Restoring(0, 5, 1000))  # of an attempt before
    assert seen() == [("member", None), ("member", None)]
