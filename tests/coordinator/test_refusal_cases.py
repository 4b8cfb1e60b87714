"""What a script asks for is refused: whether that ends the job at once, or is a worker's failure like others."""

import pytest
from desk import Desk, running
from test_memory_snapshot_cases import at_level_0

from holdfast.coordinator.kernel import events as e
from holdfast.coordinator.kernel.state import JobPhase, WorkerPhase
from holdfast.coordinator.membership.policy import refuses_the_job
from holdfast.protocol import messages as m

REASON = "refused before the first step; another attempt would be refused, too"


def refuses(desk: Desk, worker: str, refused: bool = True) -> None:
    """A worker says why, and its process is about to end."""
    told = m.Failed(
        generation=0,
        step=None,
        phase=0,
        error="UsageError",
        message="there is no train.stpes",
        traceback="UsageError: there is no train.stpes",
        refused=refused,
    )
    desk.says(worker, told)


def attached(nodes: int, **spec: object) -> Desk:
    """Workers whose scripts called `holdfast.start`, and have not come to `run.steps`."""
    desk = Desk(nodes, **spec)
    for i in range(nodes):
        desk.node(f"n{i}")
    for worker in desk.workers():
        desk.started(worker)
    return desk


def ended(desk: Desk) -> str | None:
    return desk.state.membership.outcome if desk.state.membership.phase is JobPhase.ENDED else None


def end_all(desk: Desk) -> None:
    for worker in desk.workers():
        desk.exits(worker, 1)


@pytest.mark.parametrize("make", [attached, at_level_0], ids=["level 2", "level 0"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_before_the_first_step_one_refusal_ends_the_job(make, nodes):
    desk = make(nodes)
    started = len(desk.sent(m.StartWorker))
    first = desk.workers()[0]
    refuses(desk, first)
    end_all(desk)
    assert ended(desk) == "failed"
    membership = desk.state.membership
    assert membership.stop_reason == REASON
    assert str(membership.root_cause.cause) == "UsageError: there is no train.stpes"
    assert (membership.root_cause.node, membership.root_cause.traceback) == (
        "n0",
        "UsageError: there is no train.stpes",
    )
    # Nothing was tried again, and no machine is suspected.
    assert len(desk.sent(m.StartWorker)) == started
    assert (membership.restarts_used, desk.incidents()) == (0, [])
    assert all(node.failures == 0 for node in membership.nodes.values())


@pytest.mark.parametrize("make", [attached, at_level_0], ids=["level 2", "level 0"])
def test_an_error_of_the_scripts_own_is_tried_again(make):
    desk = make(2)
    refuses(desk, desk.workers()[0], refused=False)
    end_all(desk)
    assert desk.state.membership.stop_reason != REASON


def test_a_newcomer_that_refuses_does_not_end_a_job_that_trains():
    desk = running(2)
    desk.node("n2")
    worker = desk.worker_on("n2")
    desk.started(worker)
    refuses(desk, worker)
    desk.exits(worker, 1)
    assert desk.state.membership.stop_reason is None
    assert desk.state.membership.phase is JobPhase.RUNNING


def replaced(desk: Desk, lost: str) -> str:
    """A member was lost, and the newcomer in its place fetches the state."""
    desk.exits(lost, -9)
    for worker in desk.members():
        if desk.known(worker).phase is WorkerPhase.MEMBER:
            desk.parks(worker, desk.state.membership.committed)
    (newcomer,) = [w for w, assignment in desk.state.membership.assignments.items() if assignment.fetches]
    return newcomer


@pytest.mark.parametrize("committed", [0, 1])
def test_a_member_that_refuses_the_checkpoint_ends_the_job_without_an_incident(committed):
    """It is of another model. Once a step was made there is an incident, as for any failure."""
    desk = attached(2)
    for worker in desk.workers():
        desk.gets_ready(worker, (1, 1))
    if committed:
        desk.commit(1)
    first, other = desk.members()
    refuses(desk, first)
    desk.exits(first, 1)
    desk.parks(other, committed)
    desk.exits(other, 1 if not committed else -9)
    assert (desk.state.membership.stop_reason == REASON) is not committed
    assert bool(desk.incidents()) is bool(committed)
    assert (ended(desk) == "failed") is not committed


def test_a_newcomer_with_other_data_is_its_nodes_affair_and_the_next_node_is_tried():
    desk = running(2, spares=2)
    first = replaced(desk, desk.members()[1])
    refuses(desk, first)
    node = first.partition(".")[0]
    assert "cannot train with the others" in desk.state.membership.nodes[node].refused
    assert not desk.state.membership.nodes[node].alive
    (parked,) = [w for w in desk.members() if desk.known(w).phase is WorkerPhase.MEMBER and w != first]
    desk.parks(parked, 5)
    (second,) = [w for w, assignment in desk.state.membership.assignments.items() if assignment.fetches]
    refuses(desk, second)
    # Two that say the same prove nothing about those that train.
    assert desk.state.membership.stop_reason is None
    assert desk.known(parked).phase is not WorkerPhase.GONE


def test_a_job_that_finds_nobody_else_says_what_the_last_one_refused():
    desk = running(2, spares=1, max_restarts=0, wait_for_spare=True)
    first = replaced(desk, desk.members()[1])
    refuses(desk, first)
    for worker in desk.members():
        if desk.known(worker).phase is WorkerPhase.MEMBER:
            desk.parks(worker, 5)
    membership = desk.state.membership
    assert membership.outcome == "failed"
    assert "stpes" in str(membership.root_cause.cause)


def test_a_newcomer_that_refuses_beside_workers_that_train_gives_no_node_up():
    desk = Desk(2, nproc=2)
    for i in range(2):
        desk.node(f"n{i}", slots=2)
    for worker in desk.workers():
        desk.started(worker)
    for worker in desk.workers():
        desk.gets_ready(worker, (1, 1))
    for worker in desk.members():
        desk.says(worker, m.Joined(1, 0.01))
    desk.commit(5)
    desk.exits("n1.1#4", -9)
    (newcomer,) = desk.workers(WorkerPhase.STARTING)
    desk.started(newcomer)
    desk.gets_ready(newcomer, (1, 1))
    for worker in desk.members():
        if worker != newcomer and desk.known(worker).phase is WorkerPhase.MEMBER:
            desk.parks(worker, 5)
    assert desk.state.membership.assignments[newcomer].fetches
    refuses(desk, newcomer)
    desk.exits(newcomer, 1)
    assert desk.state.membership.nodes["n1"].refused is None
    assert desk.state.membership.stop_reason is None


def test_at_level_0_a_refusal_after_steps_is_a_failure_like_others():
    desk = at_level_0(2)
    for worker in desk.workers():
        desk.says(worker, m.Progress(generation=1, committed=3))
    refuses(desk, desk.workers()[0])
    end_all(desk)
    assert desk.state.membership.stop_reason is None
    # And of a later start as well, in which nobody has come to a step yet: the script has trained before.
    refuses(desk, desk.workers()[0])
    assert (desk.state.membership.committed, desk.state.membership.stop_reason) == (0, None)


def test_where_another_worker_got_ready_it_is_the_nodes_failure():
    desk = attached(2)
    first, second = desk.workers()
    desk.gets_ready(second, (1, 1))
    refuses(desk, first)
    desk.exits(first, 1)
    assert desk.state.membership.stop_reason is None


def test_who_was_to_end_anyway_decides_nothing():
    assert refuses_the_job(True, False, False, False)
    assert not refuses_the_job(True, True, False, False)


def test_a_spare_that_refuses_beside_the_first_step_ends_nothing():
    """It may compile for minutes, and the members are well."""
    desk = attached(2, spares=1)
    for worker in desk.workers():
        desk.gets_ready(worker, (1, 1))
    members = desk.members()
    assert desk.state.membership.committed == 0
    desk.node("n2")
    (spare,) = set(desk.workers()) - set(members)
    desk.started(spare)
    refuses(desk, spare)
    desk.exits(spare, 1)
    assert desk.state.membership.stop_reason is None
    assert desk.members() == members


def test_at_level_0_what_two_nodes_raise_is_the_scripts_whoever_ends_first():
    desk = at_level_0(2, max_restarts=1)
    for _attempt in range(2):
        both = desk.workers()
        for worker in both:
            refuses(desk, worker, refused=False)
        desk.exits(both[0], 1)  # always on the same node
        desk.exits(both[1], 1)
        for worker in desk.workers():
            desk.do(e.NodeSays(worker.partition(".")[0], m.Started(worker, 1, "log")))
    assert ended(desk) == "failed"
    assert desk.state.membership.stop_reason == "the same error in 2 attempts in a row"


def test_at_level_0_what_one_node_raises_alone_may_be_the_nodes():
    desk = at_level_0(2, max_restarts=1)
    for _attempt in range(2):
        both = desk.workers()
        refuses(desk, both[0], refused=False)
        desk.exits(both[0], 1)
        desk.exits(both[1], -15)
        for worker in desk.workers():
            desk.do(e.NodeSays(worker.partition(".")[0], m.Started(worker, 1, "log")))
    assert ended(desk) == "failed"
    assert desk.state.membership.stop_reason == "the restart budget is used up"
