"""Single decisions about a job: a loss, a drain, a deadline, an end."""

from typing import Any

import msgspec
import pytest
from kubejobs import accept
from kubejobs import job as asked

from holdfast.kubernetes.objects.check import check
from holdfast.kubernetes.objects.machine import MachineSeen
from holdfast.kubernetes.objects.pod import PodSeen, TerminationMessage
from holdfast.kubernetes.objects.status import (
    ConditionType,
    JobStatus,
    SavedState,
    TrainingProgress,
    timestamp,
)
from holdfast.kubernetes.policy.conditions import begun
from holdfast.kubernetes.policy.losses import RESTART_S, RETURN_S
from holdfast.kubernetes.policy.plan import (
    AddFinalizer,
    AskResize,
    AskStop,
    CoordinatorReport,
    DeleteJob,
    DeletePod,
    FindPod,
    LabelPod,
    MakeCoordinator,
    MakeNode,
    MakeObject,
    NodeReport,
    Number,
    Observed,
    Released,
    RemoveFinalizer,
    Tell,
    Warn,
)
from holdfast.kubernetes.policy.reconcile import beside, reconcile
from holdfast.kubernetes.tasks.expectations import Expectations
from holdfast.protocol.engine_orders import (
    MarkNode,
    NodeGoing,
    NodeOutOfMemory,
    NodeTaken,
    OrderDone,
    ProvideNode,
    ReleaseNode,
)
from holdfast.protocol.notices import NoticeCause

NOW_S = 1_000_000.0
BEGUN = begun(JobStatus(), run=1, term=1, next_number=3, now_s=NOW_S - 60)


def pod(name: str, **fields: Any) -> PodSeen:
    coordinator = name.startswith("c")
    given: dict[str, Any] = {"phase": "Running", "ready": True, "machine": f"m-{name}"}
    return PodSeen(
        name=f"llm-{name}",
        uid=f"uid-{name}",
        coordinator=coordinator,
        number=int(name[1:]),
        run=1,
        **(given | fields),
    )


def said(*alive: str, **fields: Any) -> CoordinatorReport:
    nodes = {f"llm-{name}": NodeReport(alive=True, trains=name != alive[-1]) for name in alive}
    return CoordinatorReport(
        **({"term": 1, "phase": "running", "wanted": 3, "step": 7, "nodes": nodes} | fields)
    )


def observed(**fields: Any) -> Observed:
    """A job of two nodes and a spare that trains."""
    job = accept(asked(spec__nodes=2, spec__spares=1, **fields.pop("spec", {})))
    given: dict[str, Any] = {
        "job": job,
        "accepted": job,
        "finalizer": True,
        "status": BEGUN,
        "pods": (pod("c1"), pod("n0"), pod("n1"), pod("n2")),
        "objects": frozenset(beside(job)),
        "service_term": 1,
        "said": said("n0", "n1", "n2"),
        "now_s": NOW_S,
    }
    return Observed(**(given | fields))


def actions(seen: Observed) -> tuple[Any, ...]:
    return reconcile(seen).actions


def status_after(seen: Observed) -> JobStatus:
    return reconcile(seen).status


def condition(status: JobStatus, type_: ConditionType) -> tuple[str, str]:
    found = status.condition(type_)
    assert found is not None
    return found.status, found.reason


def test_a_job_that_is_well_is_left_alone() -> None:
    assert actions(observed()) == ()
    status = status_after(observed())
    assert status.state == "Running"
    assert status.nodes is not None
    assert status.nodes.summary == "2/2 +1"
    for type_ in (ConditionType.TRAINING, ConditionType.FULL_STRENGTH, ConditionType.SPARES_READY):
        assert condition(status, type_)[0] == "True"


def test_the_first_looks_of_a_new_job() -> None:
    seen = observed(
        accepted=None, finalizer=False, status=JobStatus(), pods=(), objects=frozenset(), said=None
    )
    assert actions(seen) == (AddFinalizer(),)
    seen = msgspec.structs.replace(seen, finalizer=True)
    assert actions(seen) == (Number(run=1, term=1, next_number=0, begins=True),)
    status = begun(status_after(seen), run=1, term=1, next_number=0, now_s=NOW_S)
    seen = msgspec.structs.replace(seen, status=status, granted=frozenset({"llm-c1"}))
    assert actions(seen) == (
        *(MakeObject(kind) for kind in beside(accept(asked()))),
        MakeCoordinator(1),
        Number(run=1, term=1, next_number=3),
    )
    status = msgspec.structs.replace(status, next_number=3)
    granted = frozenset({"llm-c1", "llm-n0", "llm-n1", "llm-n2"})
    made = [
        one
        for one in actions(msgspec.structs.replace(seen, status=status, granted=granted))
        if isinstance(one, MakeNode)
    ]
    assert made == [MakeNode(0), MakeNode(1), MakeNode(2)]


def test_a_lost_node_is_deleted_with_grace_1_and_replaced_at_once() -> None:
    order = ReleaseNode(node="llm-n1", reason="silent for 2 s", order_id=5)
    seen = observed(said=said("n0", "n2", orders=(order, ProvideNode("2 of 3", order_id=6))))
    assert actions(seen) == (
        DeletePod(name="llm-n1", uid="uid-n1", grace_s=1, reason="silent for 2 s"),
        Number(run=1, term=1, next_number=4),
    )
    # Its pod stays for as long as the machine is away. Nobody waits for that.
    pods = (pod("c1"), pod("n0"), pod("n1", deleting=True), pod("n2"))
    status = msgspec.structs.replace(BEGUN, next_number=4)
    seen = msgspec.structs.replace(seen, pods=pods, status=status, granted=frozenset({"llm-n3"}))
    assert actions(seen) == (Tell(OrderDone(5)), MakeNode(3, frozenset({"m-n1"})))
    seen = msgspec.structs.replace(
        seen, pods=(*pods, pod("n3", phase="Pending", ready=False)), granted=frozenset()
    )
    assert actions(seen) == (Tell(OrderDone(5)), Tell(OrderDone(6)))
    assert reconcile(seen).status.nodes.lost == 1  # type: ignore[union-attr]


def test_a_node_that_left_as_planned_has_its_whole_grace() -> None:
    order = ReleaseNode(node="llm-n1", reason="drained", planned=True, order_id=5)
    seen = observed(said=said("n0", "n2", orders=(order,)))
    (deleted, _) = actions(seen)
    assert deleted == DeletePod(name="llm-n1", uid="uid-n1", reason="drained")


MACHINES = {f"m-{name}": MachineSeen(name=f"m-{name}") for name in ("c1", "n0", "n1", "n2")}


def ended_agent(
    restarts: int = 0, for_s: float = 0.0, others: tuple[str, ...] = ("n0", "n2"), **fields: Any
) -> Observed:
    """The job after the agent of n1 has ended, as an operator sees it that has known for so long."""
    order = ReleaseNode(node="llm-n1", reason="connection closed", may_return=True, order_id=5)
    nodes = {f"llm-n{k}": NodeReport(alive=f"n{k}" in others) for k in range(3)}
    return observed(
        machines=MACHINES,
        said=said(orders=(order, ProvideNode("2 of 3", order_id=6)), nodes=nodes),
        released={"llm-n1": Released(for_s, restarts)},
        **fields,
    )


def test_a_node_whose_agent_ended_is_waited_for_in_its_pod() -> None:
    """It counts as there, so no other one is made, and the order for one is done."""
    seen = ended_agent()
    assert actions(seen) == (Tell(OrderDone(6)),)
    assert reconcile(seen).look_again_s == RESTART_S
    (deleted, number) = actions(ended_agent(for_s=RESTART_S))
    # Its agent may be back in this moment: then its pod has changed.
    reason = "connection closed"
    assert deleted == DeletePod(name="llm-n1", uid="uid-n1", grace_s=1, reason=reason, version=0)
    assert number == Number(run=1, term=1, next_number=4)


@pytest.mark.parametrize("end", [{"phase": "Failed"}, {"deleting": True}])
def test_a_pod_that_is_over_does_not_return(end: dict[str, Any]) -> None:
    pods = (pod("c1"), pod("n0"), pod("n1", ready=False, **end), pod("n2"))
    assert Number(run=1, term=1, next_number=4) in actions(ended_agent(pods=pods))


@pytest.mark.parametrize("fields", [{"ready": False}, {"going": "it is cordoned"}])
def test_nothing_returns_on_a_machine_that_is_away_or_is_to_be_emptied(fields: dict[str, Any]) -> None:
    machines = MACHINES | {"m-n1": MachineSeen(name="m-n1", **fields)}
    assert Number(run=1, term=1, next_number=4) in actions(
        msgspec.structs.replace(ended_agent(), machines=machines)
    )


def test_where_the_kubelet_takes_its_time_another_machine_is_asked_for() -> None:
    """It has ended before, not long ago."""
    pods = (pod("c1"), pod("n0"), pod("n1", ready=False, restarts=1, backs_off=True), pod("n2"))
    assert Number(run=1, term=1, next_number=4) in actions(ended_agent(1, pods=pods))
    # Also where it was started again since, and has ended before it joined.
    assert Number(run=1, term=1, next_number=4) in actions(ended_agent(0, pods=pods))


def test_one_whose_container_runs_again_has_time_to_join() -> None:
    back = (pod("c1"), pod("n0"), pod("n1", ready=False, restarts=1), pod("n2"))
    assert actions(ended_agent(0, RESTART_S, pods=back)) == (Tell(OrderDone(6)),)
    assert Number(run=1, term=1, next_number=4) in actions(ended_agent(0, RETURN_S, pods=back))


def test_where_no_node_is_left_all_are_waited_for() -> None:
    """Their pods have the only copies of the state."""
    backs_off = pod("n1", ready=False, restarts=7, backs_off=True)
    pods = (pod("c1"), pod("n0"), backs_off, pod("n2"))
    for for_s, is_deleted in ((RESTART_S, False), (RETURN_S, True)):
        done = actions(ended_agent(7, for_s, others=(), pods=pods))
        assert any(isinstance(one, DeletePod) and one.name == "llm-n1" for one in done) is is_deleted


def test_how_long_a_node_was_given_up_is_counted_from_what_was_heard_first() -> None:
    expected, order = (
        Expectations("llm"),
        ReleaseNode(node="llm-n1", reason="closed", may_return=True, order_id=5),
    )
    expected.saw(pod("n1", restarts=1))
    assert expected.released(said("n0", orders=(order,)), 10.0) == {"llm-n1": Released(0.0, 1)}
    expected.saw(pod("n1", restarts=2, version=1))
    assert expected.released(None, 12.0) == {"llm-n1": Released(2.0, 1)}, "a coordinator that is silent"
    assert expected.released(said("n0", orders=(order,)), 14.0) == {"llm-n1": Released(4.0, 1)}
    assert expected.released(said("n0", "n1"), 16.0) == {}
    assert expected.released(said("n0", orders=(order,)), 18.0) == {"llm-n1": Released(0.0, 2)}
    expected.saw(pod("n1", restarts=3, version=2))
    again = msgspec.structs.replace(order, order_id=6)
    heard = expected.released(said("n0", orders=(again,)), 20.0)
    assert heard == {"llm-n1": Released(0.0, 3)}, "it came back and was given up again between two looks"


def test_a_machine_that_kubernetes_does_not_reach_changes_nothing() -> None:
    machines = {f"m-n{k}": MachineSeen(name=f"m-n{k}", ready=False) for k in range(3)}
    assert actions(observed(machines=machines)) == ()


def test_a_cordoned_machine_is_told_and_replaced_first() -> None:
    machines = {"m-n1": MachineSeen(name="m-n1", going="it is cordoned")}
    seen = observed(machines=machines)
    assert actions(seen) == (
        Tell(NodeGoing("llm-n1", "m-n1: it is cordoned"), "llm-n1"),
        Number(run=1, term=1, next_number=4),
    )
    assert Tell not in {
        type(one) for one in actions(msgspec.structs.replace(seen, told=frozenset({"llm-n1"})))
    }


def test_an_eviction_is_told_with_the_time_that_is_left() -> None:
    seen = observed(pods=(pod("c1"), pod("n0", deleting=True), pod("n1"), pod("n2")))
    assert actions(seen)[0] == Tell(NodeGoing("llm-n0", "its pod is being deleted", 90.0), "llm-n0")


def test_a_container_that_was_killed_for_memory_is_told_once() -> None:
    """When its coordinator knows that the node was lost, and while it asks itself why."""

    def told(age_s: float, expected: Expectations, alive: bool = False) -> list[Any]:
        killed = pod("n1", ready=False, out_of_memory_s=NOW_S - age_s)
        pods = (pod("c1"), pod("n0"), killed, pod("n2"))
        expected.saw(killed)
        expected.meet(1, ["llm-n0", "llm-n2"], [])
        lost = said("n0", "n2", nodes={"llm-n1": NodeReport(alive=alive)})
        limit = {"spec__template__spec__containers__0__resources": {"limits": {"memory": "2Gi"}}}
        found = [one for one in actions(observed(pods=pods, said=lost, spec=limit)) if isinstance(one, Tell)]
        news = [one for one in found if expected.is_news(one)]
        for one in news:
            expected.did(one)
        return news

    expected = Expectations("llm")
    assert told(1.0, expected, alive=True) == []
    assert told(3.0, expected, alive=True) == [
        Tell(NodeOutOfMemory("llm-n1", 2 << 30, 3.0), "llm-n1 at 999997")
    ]
    assert told(3.0, expected) == []
    assert len(told(2.0, expected)) == 1, "it happened again"
    assert told(61.0, expected) == []
    expected.meet(2, [], [])
    assert len(told(2.0, expected)) == 1, "the next coordinator was told nothing"
    # Its pod may be about to go.
    assert len(told(0.0, Expectations("llm"))) == 1


def test_a_pod_that_is_gone_is_told() -> None:
    """Not before the API server has said so: the watch also loses a pod whose label somebody took away."""
    seen = observed(pods=(pod("c1"), pod("n0"), pod("n1")))
    assert actions(seen) == (FindPod("llm-n2"),)
    gone = msgspec.structs.replace(seen, absent=frozenset({"llm-n2"}))
    assert actions(gone)[0] == Tell(NodeTaken("llm-n2", "its pod is gone"), "llm-n2")


def test_pods_whose_labels_were_taken_away_are_found_and_labelled_again() -> None:
    pods = observed().pods
    lost = tuple(msgspec.structs.replace(one, unsure=True) for one in pods)
    assert actions(observed(pods=lost)) == tuple(FindPod(one.name) for one in pods)
    found = tuple(msgspec.structs.replace(one, mislabelled=True) for one in pods)
    assert actions(observed(pods=found)) == tuple(LabelPod(name=one.name, uid=one.uid) for one in pods)


def test_an_operator_that_starts_and_does_not_see_the_coordinator_asks_for_it() -> None:
    nodes = (pod("n0"), pod("n1"), pod("n2"))
    seen = observed(pods=nodes, said=None)
    assert actions(seen) == (FindPod("llm-c1"),)
    gone = msgspec.structs.replace(seen, absent=frozenset({"llm-c1"}))
    assert actions(gone) == (Number(run=1, term=2, next_number=3),)


def test_a_pod_that_a_kubelet_evicted_is_told_with_its_words() -> None:
    ended = pod(
        "n2", phase="Failed", ready=False, end="Evicted: The node was low on resource: ephemeral-storage."
    )
    first, warning, deletion, _ = actions(observed(pods=(*observed().pods[:3], ended)))
    how = "Failed, Evicted: The node was low on resource: ephemeral-storage."
    assert first == Tell(NodeTaken("llm-n2", f"its pod has ended ({how})"), "llm-n2")
    # Its coordinator may have let it go before, and knows of no reason but a signal.
    assert warning == Warn(reason="PodEnded", text=f"llm-n2 on m-n2: {how}", about="uid-n2")
    assert isinstance(deletion, DeletePod)
    going = msgspec.structs.replace(ended, deleting=True)
    assert warning in actions(observed(pods=(*observed().pods[:3], going)))
    expected = Expectations("llm")
    expected.saw(going)
    assert expected.is_news(warning)
    expected.did(warning)
    expected.meet(1, [], [])
    assert not expected.is_news(warning)


def crashing(name: str, restarts: int = 3, **fields: Any) -> PodSeen:
    words = "exit code 1: no device"
    return pod(name, ready=False, restarts=restarts, crash=words, **fields)


def test_a_node_that_crashes_on_one_machine_is_replaced_first_and_elsewhere() -> None:
    pods = (pod("c1"), pod("n0"), pod("n1"), crashing("n2", restarts=2))
    seen = observed(pods=pods, said=said("n0", "n1"))
    assert actions(seen) == ()  # it may come to work yet
    seen = observed(pods=(*pods[:3], crashing("n2", version=17)), said=said("n0", "n1"))
    assert actions(seen) == (Number(run=1, term=1, next_number=4),)
    numbered = msgspec.structs.replace(BEGUN, next_number=4)
    granted = frozenset({"llm-n3"})
    seen = msgspec.structs.replace(seen, status=numbered, granted=granted)
    assert actions(seen) == (MakeNode(3, frozenset({"m-n2"})),)
    # Where no other machine is free it goes on trying where it is.
    new = pod("n3", phase="Pending", ready=False, machine=None)
    seen = msgspec.structs.replace(seen, pods=(*seen.pods, new), granted=frozenset())
    assert actions(seen) == ()
    # Now there is one.
    bound = msgspec.structs.replace(new, machine="m-n3")
    (gone,) = actions(msgspec.structs.replace(seen, pods=(*seen.pods[:4], bound)))
    # It may have come to work since.
    assert (gone.name, gone.uid, gone.grace_s, gone.version) == ("llm-n2", "uid-n2", 1, 17)
    assert "m-n2: exit code 1: no device" in gone.reason


def test_a_pod_that_waits_is_made_anew_when_what_it_avoids_may_be_used_again() -> None:
    lost = pod("n1", deleting=True)
    waits: dict[str, Any] = {"phase": "Pending", "ready": False, "machine": None, "unschedulable": True}
    new = pod("n3", **waits, avoids=frozenset({"m-n1"}), version=17)
    two = said("n0", "n2")
    numbered = msgspec.structs.replace(BEGUN, next_number=4)

    def seen(*pods: PodSeen, **fields: Any) -> tuple[Any, ...]:
        given = {"said": two, "status": numbered} | fields
        return actions(observed(pods=(pod("c1"), pod("n0"), pod("n2"), *pods), **given))

    # Its kubelet has not said that the old pod's processes are over.
    assert seen(lost, new) == ()
    away = {"m-n1": MachineSeen(name="m-n1", ready=False)}
    assert seen(new, machines=away) == ()
    (gone,) = seen(new, machines={"m-n1": MachineSeen(name="m-n1")})
    assert (gone.name, gone.reason) == ("llm-n3", "it avoids m-n1, which may be used again")
    assert gone.version == new.version
    quarantined = said("n0", "n2", bad_machines=frozenset({"m-n1"}))
    assert seen(new, said=quarantined) == ()
    # With a machine of its own it goes on.
    assert seen(msgspec.structs.replace(new, machine="m-n4", unschedulable=False)) == ()


def test_a_node_that_the_coordinator_has_is_not_replaced_for_its_restarts() -> None:
    """Its container was killed three times in weeks, and has joined again each time."""
    pods = (pod("c1"), pod("n0"), pod("n1"), crashing("n2", restarts=9))
    assert actions(observed(pods=pods)) == ()


def test_a_job_whose_agents_crash_everywhere_ends_and_blames_no_machine() -> None:
    starts = CoordinatorReport(term=1, phase="gathering", wanted=3)

    def seen(*restarts: int) -> Observed:
        nodes = [crashing(f"n{k}", restarts=count) for k, count in enumerate(restarts)]
        return observed(pods=(pod("c1"), *nodes), said=starts)

    plan = reconcile(seen(5, 6, 7))
    assert plan.actions == ()
    assert condition(plan.status, ConditionType.FAILED) == ("True", "AgentsCrash")
    assert "llm-n0 ended 6 times, the last time with exit code 1: no device" in (plan.status.reason or "")
    # One of them may come to work yet. Until then none has another machine.
    early = reconcile(seen(5, 6, 4))
    assert early.actions == ()
    assert condition(early.status, ConditionType.FAILED)[0] == "False"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("exit code 1: No module named 'holdfast'", "ImageWithoutHoldfast"),
        (
            'exit code 128 (StartError): exec: "python3": executable file not found in $PATH',
            "ImageWithoutHoldfast",
        ),
        (
            'exit code 128 (StartError): exec: "/bin/py": stat /bin/py: no such file or directory',
            "ImageWithoutHoldfast",
        ),
        ('exit code 128 (StartError): error mounting "/data": no such file or directory', "AgentsCrash"),
        ("exit code 1: No module named 'torch'", "AgentsCrash"),
    ],
)
def test_only_what_lacks_holdfast_is_called_so(words: str, reason: str) -> None:
    nodes = (crashing(name, restarts=5) for name in ("n0", "n1", "n2"))
    pods = (pod("c1"), *(msgspec.structs.replace(one, crash=words) for one in nodes))
    plan = reconcile(observed(pods=pods, said=CoordinatorReport(term=1, phase="gathering", wanted=3)))
    assert condition(plan.status, ConditionType.FAILED) == ("True", reason)


@pytest.mark.parametrize("which", ["nodes", "coordinator"])
def test_an_image_without_holdfast_is_named(which: str) -> None:
    words = "exit code 1: ModuleNotFoundError: No module named 'holdfast'"
    nodes = which == "nodes"
    pods = (
        pod("c1") if nodes else crashing("c1", restarts=5),
        *(crashing(name, restarts=5) if nodes else pod(name) for name in ("n0", "n1", "n2")),
    )
    pods = tuple(msgspec.structs.replace(one, crash=words) if one.crash else one for one in pods)
    waits = CoordinatorReport(term=1, phase="gathering", wanted=3) if nodes else None
    plan = reconcile(observed(pods=pods, said=waits))
    assert condition(plan.status, ConditionType.FAILED) == ("True", "ImageWithoutHoldfast")
    assert "put Holdfast and its Python into the image registry.example.com/me/train:1" in (
        plan.status.reason or ""
    )


def test_a_job_that_has_trained_is_not_ended_by_crashes() -> None:
    pods = (pod("c1"), *(crashing(name, restarts=50) for name in ("n0", "n1", "n2")))
    assert actions(observed(pods=pods, said=said("n0", "n1", "n2", nodes={}))) == ()
    trained = msgspec.structs.replace(BEGUN, progress=TrainingProgress(step=7))
    silent = observed(pods=(crashing("c1", restarts=50), *pods[1:]), said=None, status=trained)
    assert condition(status_after(silent), ConditionType.FAILED)[0] == "False"


def test_a_pod_that_is_held_back_is_said() -> None:
    held = pod("n2", phase="Pending", ready=False, machine=None, waits="the scheduling gate x holds it back")
    status = status_after(observed(pods=(pod("c1"), pod("n0"), pod("n1"), held), said=said("n0", "n1")))
    assert condition(status, ConditionType.SCHEDULED) == ("False", "SchedulingGated")


def test_orders_that_cannot_be_carried_out_are_answered() -> None:
    seen = observed(said=said("n0", "n1", "n2", orders=(MarkNode("llm-n1", "Xid 79", order_id=3),)))
    (told,) = actions(seen)
    assert told.news.order_id == 3
    assert "marks no machines" in told.news.error


@pytest.mark.parametrize("lost", [{"deleting": True}, {"phase": "Failed"}])
def test_a_lost_coordinator_has_a_successor_of_the_next_term(lost: dict[str, Any]) -> None:
    seen = observed(pods=(pod("c1", **lost), pod("n0"), pod("n1"), pod("n2")), said=None)
    assert actions(seen) == (Number(run=1, term=2, next_number=3),)
    status = msgspec.structs.replace(BEGUN, term=2)
    made = actions(msgspec.structs.replace(seen, status=status, granted=frozenset({"llm-c2"})))
    assert MakeCoordinator(2, frozenset({"m-c1"})) in made


def test_a_coordinator_that_only_the_operator_cannot_reach_is_left_alone() -> None:
    seen = observed(said=None)
    assert actions(seen) == ()
    assert condition(status_after(seen), ConditionType.COORDINATOR_READY) == ("Unknown", "Unreachable")


def test_a_pod_that_was_made_for_a_run_that_is_over_goes_unless_it_has_joined() -> None:
    late = msgspec.structs.replace(pod("n3"), run=0)
    second = msgspec.structs.replace(BEGUN, run=2, next_number=4)
    others = tuple(msgspec.structs.replace(one, run=2) for one in observed().pods)

    def seen(pod: PodSeen, **fields: Any) -> tuple[Any, ...]:
        return actions(observed(status=second, pods=(*others, pod), **fields))

    (gone,) = seen(msgspec.structs.replace(late, run=1))
    assert (gone.name, gone.reason, gone.grace_s) == ("llm-n3", "run 1 is over", 1)
    assert seen(late) == ()  # somebody took its label away
    joined = said("n0", "n1", "n2", "n3", wanted=4)
    assert seen(msgspec.structs.replace(late, run=1), said=joined) == ()
    assert seen(msgspec.structs.replace(late, run=1), said=None) == ()


def test_pods_that_are_too_many_go_only_if_they_never_joined() -> None:
    waiting = pod("n3", phase="Pending", ready=False, machine=None)
    seen = observed(pods=(*observed().pods, waiting))
    assert actions(seen) == (DeletePod(name="llm-n3", uid="uid-n3", reason="the job wants fewer nodes"),)
    assert actions(observed(said=said("n0", "n1", "n2", wanted=2))) == ()


def test_a_new_size_is_asked_for_once() -> None:
    job = accept(asked(spec__nodes=1, spec__spares=1))
    seen = observed(job=job)
    # What is asked is written down first.
    assert actions(seen) == ()
    written = reconcile(seen).status
    assert written.asking_nodes == 1
    seen = msgspec.structs.replace(seen, status=written)
    assert actions(seen) == (AskResize(1),)
    heard = msgspec.structs.replace(seen, asked_nodes=1)
    assert actions(heard) == ()
    assert (reconcile(heard).status.asked_nodes, reconcile(heard).status.asking_nodes) == (1, None)


def test_a_size_that_is_refused_is_not_accepted_and_says_what_can_be_had() -> None:
    began = accept(asked(spec__nodes=2, spec__spares=1))
    more = accept(asked(spec__nodes=5, spec__spares=1))
    seen = observed(job=more, accepted=began, refused_resize="words about --nnodes")
    status = reconcile(seen).status
    said_ = status.condition(ConditionType.ACCEPTED)
    assert said_ is not None
    assert (said_.status, said_.reason) == ("False", "ResizeRefused")
    assert "spec.nodes 5 is refused, and the run goes on" in said_.message
    assert "no spec.minNodes, so its size is fixed" in said_.message
    assert "--nnodes" not in said_.message
    full = status.condition(ConditionType.FULL_STRENGTH)
    assert full is not None
    assert (full.status, full.message) == ("True", "2 of 2 nodes train")
    assert (status.reason or "").startswith("ResizeRefused: ")


def test_an_operator_that_died_while_it_asked_for_a_size_leaves_no_doubt() -> None:
    """The object was changed back meanwhile: the coordinator may have the size that nobody wants any more."""
    begun = reconcile(observed(job=accept(asked(spec__nodes=1, spec__spares=1)))).status
    assert begun.asking_nodes == 1
    seen = observed(status=begun)
    assert actions(seen) == ()
    written = reconcile(seen).status
    assert written.asking_nodes == 2
    assert actions(msgspec.structs.replace(seen, status=written)) == (AskResize(2),)
    # What was asked and written down is not asked again.
    done = msgspec.structs.replace(written, asked_nodes=2, asking_nodes=None)
    assert actions(msgspec.structs.replace(seen, status=done)) == ()


def test_what_changes_in_a_run_is_said_and_not_done() -> None:
    job = accept(asked(spec__nodes=2, spec__spares=2))
    seen = observed(job=job)
    assert actions(seen) == ()
    accepted = status_after(seen).condition(ConditionType.ACCEPTED)
    assert accepted is not None
    assert (accepted.status, accepted.reason) == ("True", "SpecChanged")
    assert "spec.spares" in accepted.message


def test_what_cannot_work_is_said_and_nothing_is_made() -> None:
    wrong = asked(spec__nodes=0)
    seen = observed(job=None, accepted=None, problems=check(wrong), status=JobStatus(), pods=(), said=None)
    assert actions(seen) == ()
    accepted = status_after(seen).condition(ConditionType.ACCEPTED)
    assert accepted is not None
    assert accepted.message == (
        "spec.nodes: 0; accepted: a whole number from 1 to 10000 "
        "(Nodes that train at full strength; kubectl scale changes it)"
    )


@pytest.mark.parametrize(
    ("termination_message", "type_", "reason"),
    [
        (TerminationMessage(outcome="finished"), ConditionType.COMPLETE, "Finished"),
        (TerminationMessage(outcome="failed", reason="ValueError"), ConditionType.FAILED, "ScriptFailed"),
        (TerminationMessage(outcome="stopped", reason="asked for"), ConditionType.FAILED, "Stopped"),
        (
            TerminationMessage(outcome="stopped", reason="in whatever words", cause="time-limit"),
            ConditionType.FAILED,
            "ActiveDeadline",
        ),
    ],
)
def test_an_end_is_for_ever(
    termination_message: TerminationMessage, type_: ConditionType, reason: str
) -> None:
    ended = pod("c1", phase="Succeeded", termination_message=termination_message)
    seen = observed(pods=(ended, pod("n0")), said=None)
    plan = reconcile(seen)
    assert plan.actions == ()  # the status first
    assert condition(plan.status, type_) == ("True", reason)
    after = msgspec.structs.replace(seen, status=plan.status)
    assert {type(one) for one in actions(after)} <= {DeletePod, RemoveFinalizer}
    # Nor is it another one while the object is deleted, which may take more than one try.
    deleted = reconcile(msgspec.structs.replace(after, deleted_s=NOW_S))
    assert RemoveFinalizer() in deleted.actions
    assert condition(deleted.status, type_) == ("True", reason)
    # Whatever is deleted below it, it does not start again.
    bare = msgspec.structs.replace(after, pods=(), objects=frozenset(), finalizer=False)
    assert actions(bare) == ()


def test_the_object_goes_when_its_time_after_the_end_is_over() -> None:
    ended = pod("c1", phase="Succeeded", termination_message=TerminationMessage(outcome="finished"))
    seen = observed(pods=(ended,), said=None, spec={"spec__runPolicy": {"ttlSecondsAfterFinished": 60}})
    after = msgspec.structs.replace(seen, status=reconcile(seen).status, finalizer=False, pods=())
    assert reconcile(after).look_again_s == 60
    late = msgspec.structs.replace(after, now_s=NOW_S + 60)
    assert actions(late) == (DeleteJob(),)


def test_its_time_after_the_end_may_be_given_at_the_end() -> None:
    """What the run was started with has none, and runPolicy may change at any time."""
    ended = pod("c1", phase="Succeeded", termination_message=TerminationMessage(outcome="finished"))
    seen = observed(pods=(ended,), said=None)
    after = msgspec.structs.replace(seen, status=reconcile(seen).status, finalizer=False, pods=())
    assert reconcile(after).look_again_s is None
    changed = observed(spec={"spec__runPolicy": {"ttlSecondsAfterFinished": 60}}).job
    assert after.accepted is not None
    assert reconcile(msgspec.structs.replace(after, job=changed)).look_again_s == 60


def test_a_job_that_never_starts_fails_with_what_is_in_the_way() -> None:
    stuck = pod("n0", phase="Pending", ready=False, waits="ImagePullBackOff: no such image")
    began = msgspec.structs.replace(BEGUN, start_time=timestamp(NOW_S - 1800))
    seen = observed(status=began, pods=(pod("c1"), stuck), said=None)
    failed = reconcile(seen).status.condition(ConditionType.FAILED)
    assert failed is not None
    assert (failed.status, failed.reason) == ("True", "StartupDeadline")
    assert "no such image" in failed.message


def test_a_deadline_asks_for_the_end() -> None:
    seen = observed(spec={"spec__runPolicy": {"activeDeadlineSeconds": 30}})
    assert actions(seen) == (AskStop("spec.runPolicy.activeDeadlineSeconds is over", NoticeCause.TIME_LIMIT),)


def test_a_job_is_saved_before_it_is_suspended() -> None:
    seen = observed(spec={"spec__runPolicy": {"suspend": True}})
    assert actions(seen) == (AskStop("the job is suspended"),)
    ended = pod("c1", phase="Succeeded", termination_message=TerminationMessage(outcome="stopped"))
    assert {type(one) for one in actions(msgspec.structs.replace(seen, pods=(ended,), said=None))} == {
        DeletePod
    }


def test_nobody_waits_for_the_state_of_nodes_that_all_leave() -> None:
    """An operator was killed when it had deleted the pods of a job that was saved, and the coordinator's was gone first."""
    seen = observed(spec={"spec__runPolicy": {"suspend": True}})
    left = tuple(msgspec.structs.replace(one, deleting=True) for one in seen.pods if not one.coordinator)
    assert left
    seen = msgspec.structs.replace(seen, absent=frozenset({"llm-c1"}), said=None)
    assert actions(msgspec.structs.replace(seen, pods=left)) == ()
    # One that stays has the state.
    one = msgspec.structs.replace(left[0], deleting=False)
    assert actions(msgspec.structs.replace(seen, pods=(one, *left[1:]))) != ()


def test_a_job_without_a_state_is_suspended_at_once() -> None:
    stuck = pod("n0", phase="Pending", ready=False)
    suspend = {"spec__runPolicy": {"suspend": True}}
    seen = observed(pods=(stuck,), said=None, spec=suspend, absent=frozenset({"llm-c1"}))
    assert {type(one) for one in actions(seen)} == {DeletePod}


def test_an_operator_that_has_heard_nobody_yet_asks_before_it_deletes() -> None:
    """Its job may have trained since a moment ago. A coordinator that answers nobody is not waited for any longer than that."""
    seen = observed(spec={"spec__runPolicy": {"suspend": True}}, said=None)
    assert actions(seen) == ()
    silent = msgspec.structs.replace(seen, status=status_after(seen))
    assert actions(msgspec.structs.replace(silent, now_s=NOW_S + 19)) == ()
    late = msgspec.structs.replace(silent, now_s=NOW_S + 21)
    assert {type(one) for one in actions(late)} == {DeletePod}


def test_a_deleted_job_is_saved_within_its_time() -> None:
    trained = msgspec.structs.replace(BEGUN, progress=TrainingProgress(step=7))
    seen = observed(status=trained, deleted_s=NOW_S)
    plan = reconcile(seen)
    assert (plan.actions, plan.look_again_s) == ((AskStop("the job is deleted"),), 150.0)
    assert plan.status.state == "Stopping"
    late = msgspec.structs.replace(seen, now_s=NOW_S + 150)
    assert RemoveFinalizer() in actions(late)
    assert {one.grace_s for one in actions(late) if isinstance(one, DeletePod)} == {None}
    assert [one.reason for one in actions(late) if isinstance(one, Warn)] == ["NotSaved"]


def test_who_wants_nothing_saved_does_not_wait_for_agents_to_leave() -> None:
    trained = msgspec.structs.replace(BEGUN, progress=TrainingProgress(step=7))
    *deleted, last = actions(observed(status=trained, deleted_s=NOW_S, skip_save=True))
    assert all(isinstance(one, DeletePod) for one in deleted)
    assert last == RemoveFinalizer()
    assert {one.grace_s for one in deleted} == {1}
    assert len(deleted) == 4


def test_a_pod_of_another_uid_is_not_meant() -> None:
    order = ReleaseNode(node="llm-n1", reason="silent", order_id=1)
    (deleted, *_) = actions(observed(said=said("n0", "n2", orders=(order,))))
    assert deleted.uid == "uid-n1"


def test_nodes_that_end_with_their_job_are_not_replaced() -> None:
    """Seen on a cluster: agents are gone before their coordinator is."""
    ended = (pod("c1"), *(pod(f"n{number}", phase="Succeeded", ready=False) for number in range(3)))
    assert actions(observed(pods=ended, said=None)) == ()
    over = said("n0", "n1", "n2", outcome="finished")
    assert actions(observed(pods=ended, said=over)) == ()
    # One that was dismissed while the others train is replaced by the coordinator's word.
    one = (pod("c1"), pod("n0"), pod("n1"), pod("n2", phase="Succeeded", ready=False))
    assert actions(observed(pods=one, said=None)) == ()
    made = actions(observed(pods=one, said=said("n0", "n1")))
    assert DeletePod(name="llm-n2", uid="uid-n2", reason="its processes are over (Succeeded)") in made
    assert any(isinstance(action, Number) for action in made)
    # One that failed is no sign of the job's end.
    failed = (pod("c1"), pod("n0"), pod("n1"), pod("n2", phase="Failed", ready=False))
    assert any(isinstance(action, Number) for action in actions(observed(pods=failed, said=None)))


def test_an_ended_job_shows_no_nodes_its_last_step_and_what_is_left_of_its_state() -> None:
    """The operator has heard of steps some seconds before the end, and nobody answers it afterwards."""
    heard = status_after(observed(said=said("n0", "n1", "n2", snapshot="step 7 on 2 nodes each")))
    last = TerminationMessage(outcome="finished", step=12, checkpoint="s3://b/step-12")
    ended = pod("c1", phase="Succeeded", termination_message=last)
    status = status_after(observed(status=heard, pods=(ended, pod("n0")), said=None))
    assert status.nodes is not None
    assert status.progress is not None
    assert (status.nodes.summary, status.nodes.present, status.progress.step) == ("0/2", 0, 12)
    assert condition(status, ConditionType.STATE_SAVED) == ("True", "Saved")
    assert status.saved == SavedState(checkpoint="s3://b/step-12")


@pytest.mark.parametrize("outcome", ["failed", "stopped"])
def test_nothing_is_left_of_an_ended_job_that_had_snapshots_in_memory_alone(outcome: str) -> None:
    heard = status_after(observed(said=said("n0", "n1", "n2", snapshot="step 7 on 2 nodes each")))
    assert condition(heard, ConditionType.STATE_SAVED) == ("True", "Saved")
    ended = pod("c1", phase="Succeeded", termination_message=TerminationMessage(outcome=outcome))
    status = status_after(observed(status=heard, pods=(ended,), said=None))
    assert condition(status, ConditionType.STATE_SAVED) == ("False", "NothingLeft")
    assert status.progress is not None
    assert status.progress.step == 7
    # Of a coordinator of an earlier version, which says no more than how it ended, what was heard before is kept.
    saved = msgspec.structs.replace(heard, saved=SavedState(checkpoint="s3://b/step-5"))
    status = status_after(observed(status=saved, pods=(ended,), said=None))
    assert condition(status, ConditionType.STATE_SAVED) == ("True", "Saved")


def test_the_sizes_that_a_run_may_have_are_said_while_there_is_one() -> None:
    """The API server refuses others then. The next run is started with what the object says."""
    spec = {"spec__minNodes": 1}
    status = status_after(observed(spec=spec))
    assert (status.fewest, status.most) == (1, 2)
    assert begun(status, run=2, term=2, next_number=9, now_s=NOW_S).most is None
    rests = spec | {"spec__runPolicy": {"suspend": True}}
    gone = frozenset({"llm-c1"})
    suspended = observed(spec=rests, status=status, pods=(), objects=frozenset(), said=None, absent=gone)
    assert status_after(suspended).most is None
    ended = pod("c1", phase="Succeeded", termination_message=TerminationMessage(outcome="finished"))
    assert status_after(observed(spec=spec, status=status, pods=(ended,), said=None)).most is None
