"""Jobs in a Kueue queue: what is asked for, what is made of an admission, and how quota is given back."""

from typing import Any

import msgspec
import pytest
from kubejobs import accept
from kubejobs import job as asked
from liveapi import LiveApi
from operating import JOB, PODS, operated
from test_kube_reconcile import BEGUN, NOW_S, actions, condition, observed, pod, said, status_after

from holdfast.kubernetes.names import LABEL_QUEUE, LABEL_WORKLOAD
from holdfast.kubernetes.objects import kueue
from holdfast.kubernetes.objects.kueue import Where, WorkloadSeen
from holdfast.kubernetes.objects.machine import MachineSeen
from holdfast.kubernetes.objects.pod import PodSeen, TerminationMessage
from holdfast.kubernetes.objects.render import agent_pod, coordinator_pod, owner
from holdfast.kubernetes.objects.resource import HoldfastJob
from holdfast.kubernetes.objects.status import ConditionType, JobStatus
from holdfast.kubernetes.policy import queues
from holdfast.kubernetes.policy.plan import (
    AskStop,
    DeletePod,
    DeleteWorkload,
    FinishWorkload,
    MakeNode,
    MakeWorkload,
    NodeReport,
    Number,
    Observed,
    ReleaseQuota,
    Tell,
    TellReady,
)
from holdfast.kubernetes.policy.reconcile import reconcile
from holdfast.protocol.engine_orders import NodeGoing, ReleaseNode
from holdfast.protocol.notices import NoticeCause

WORKLOADS = "/apis/kueue.x-k8s.io/v1beta2/namespaces/research/workloads"


def queued(**changes: Any) -> HoldfastJob:
    """Two nodes of which one can be missed, and a spare: a base of two and one further node."""
    given = {"spec__nodes": 2, "spec__minNodes": 1, "spec__spares": 1} | changes
    return accept(asked(metadata__labels={LABEL_QUEUE: "team-a"}, **given))


def workload(number: int | None = None, **fields: Any) -> WorkloadSeen:
    name = "llm-base" if number is None else f"llm-plus-{number}"
    given = {"nodes": 2 if number is None else 1, "admitted": True, "reserved": True, "ready": True}
    return WorkloadSeen(name=name, uid=f"uid-{name}", number=number, queue="team-a", **(given | fields))


def trains(*workloads: WorkloadSeen, **fields: Any) -> Observed:
    """The job with all its pods, two of which use the base's quota."""
    job = queued()
    pods = [pod("c1"), *(pod(f"n{k}", workload="llm-base" if k < 2 else "llm-plus-1") for k in range(3))]
    given = {
        "job": job,
        "accepted": job,
        "pods": tuple(pods),
        "workloads": {one.name: one for one in workloads},
    }
    return observed(**(given | fields))


def waits(**fields: Any) -> Observed:
    """The job without pods."""
    given = {"job": queued(), "accepted": None, "status": JobStatus(), "pods": (), "said": None}
    return observed(**(given | {"objects": frozenset(), "workloads": {}} | fields))


def test_a_job_asks_for_quota_before_anything_is_made() -> None:
    assert actions(waits()) == (MakeWorkload(None, 2),)
    status = status_after(waits())
    assert (status.state, condition(status, ConditionType.QUOTA_RESERVED)) == (
        "Queued",
        ("False", "NotAsked"),
    )
    assert condition(status, ConditionType.SUSPENDED) == ("True", "Queued")
    pending = workload(admitted=False, reserved=False, waits="LocalQueue team-a doesn't exist")
    seen = waits(workloads={"llm-base": pending})
    assert actions(seen) == ()
    assert "LocalQueue team-a doesn't exist" in (status_after(seen).reason or "")
    seen = waits(workloads={"llm-base": workload()})
    assert actions(seen) == (Number(run=1, term=1, next_number=0, begins=True),)


def test_without_kueue_a_job_waits_and_says_so() -> None:
    seen = waits(workloads=None, no_workloads="Kueue v1beta2 is not installed")
    assert actions(seen) == ()
    found = status_after(seen).condition(ConditionType.QUOTA_RESERVED)
    assert found is not None
    assert (found.status, found.message) == ("Unknown", "Kueue v1beta2 is not installed")


def test_a_job_that_trains_goes_on_while_nothing_is_known_of_its_quota() -> None:
    assert actions(trains(workloads=None)) == ()
    # New nodes wait: nobody knows whether they may be there.
    lost = trains(workloads=None, pods=(pod("c1"), pod("n0"), pod("n1")), said=said("n0", "n1"))
    assert actions(lost) == ()


def test_each_further_node_is_asked_for_and_made_by_itself() -> None:
    few = (pod("c1"), pod("n0", workload="llm-base"), pod("n1", workload="llm-base"))
    seen = trains(workload(), pods=few, said=said("n0", "n1"))
    assert actions(seen) == (MakeWorkload(1, 1),)
    pending = workload(1, admitted=False, reserved=False, ready=False)
    seen = trains(workload(), pending, pods=few, said=said("n0", "n1"), granted=frozenset({"llm-n2"}))
    assert actions(seen) == ()
    seen = trains(
        workload(), workload(1, ready=False), pods=few, said=said("n0", "n1"), granted=frozenset({"llm-n2"})
    )
    assert actions(seen) == (MakeNode(2, frozenset(), "llm-plus-1"),)
    assert actions(trains(workload(), workload(1, ready=False))) == (TellReady("llm-plus-1"),)
    assert actions(trains(workload(), workload(1))) == ()


def test_a_lost_node_is_replaced_within_its_quota() -> None:
    pods = (pod("c1"), pod("n0", workload="llm-base"), pod("n2", workload="llm-plus-1"))
    seen = trains(workload(), workload(1), pods=pods, said=said("n0", "n2"), granted=frozenset({"llm-n3"}))
    assert actions(seen) == (MakeNode(3, frozenset(), "llm-base"),)


def test_a_further_node_leaves_alone_when_its_quota_is_taken_back() -> None:
    evicted = workload(1, evicted="Preempted: by job 7")
    (told,) = actions(trains(workload(), evicted))
    assert isinstance(told, Tell)
    assert told.news == NodeGoing(
        "llm-n2",
        "Kueue takes back the quota of llm-plus-1: Preempted: by job 7",
        90.0,
        NoticeCause.PREEMPTION,
    )
    assert actions(trains(workload(), evicted, told=frozenset({"llm-n2"}))) == ()
    # Its pod is gone: now others may have it, and it may come back.
    gone = (pod("c1"), pod("n0", workload="llm-base"), pod("n1", workload="llm-base"))
    assert actions(trains(workload(), evicted, pods=gone, said=said("n0", "n1"))) == (
        ReleaseQuota("llm-plus-1"),
    )
    # A pod that never joined has nothing to save.
    new = (*gone, pod("n2", workload="llm-plus-1", ready=False, phase="Pending"))
    (deleted,) = actions(trains(workload(), evicted, pods=new, said=said("n0", "n1")))
    assert isinstance(deleted, DeletePod)
    assert deleted.name == "llm-n2"


def test_a_node_whose_agent_ended_is_not_waited_for_when_its_quota_is_taken_back() -> None:
    order = ReleaseNode(node="llm-n2", reason="connection closed", may_return=True, order_id=5)
    nodes = {f"llm-n{k}": NodeReport(alive=k < 2) for k in range(3)}
    machines = {"m-n2": MachineSeen(name="m-n2")}
    for further, is_deleted in ((workload(1), False), (workload(1, evicted="Preempted: by job 7"), True)):
        seen = trains(workload(), further, machines=machines, said=said(orders=(order,), nodes=nodes))
        deleted = [one.name for one in actions(seen) if isinstance(one, DeletePod)]
        assert deleted == ["llm-n2"] * is_deleted


@pytest.mark.parametrize(
    "termination_message",
    [TerminationMessage(outcome="stopped", reason="in whatever words", cause="preemption")],
)
def test_the_whole_job_is_saved_when_its_base_is_taken_back(termination_message: TerminationMessage) -> None:
    evicted = workload(evicted="Preempted: by job 7")
    (asked_,) = actions(trains(evicted, workload(1)))
    assert isinstance(asked_, AskStop)
    assert asked_ == AskStop(f"{queues.TAKEN_BACK}: Preempted: by job 7", NoticeCause.PREEMPTION)
    # It was stopped for that, so it is not over, whatever Kueue says by now.
    ended = pod("c1", phase="Succeeded", termination_message=termination_message)
    for there in (workload(), evicted):
        plan = reconcile(trains(there, workload(1), pods=(ended,), said=None))
        assert [type(one) for one in plan.actions] == [DeletePod]
        assert not plan.status.holds(ConditionType.FAILED)
    # The quota is given back only after the end of the run was written down.
    gone = {
        "pods": (),
        "said": None,
        "accepted": None,
        "objects": frozenset(),
        "absent": frozenset({"llm-c1"}),
    }
    seen = trains(evicted, workload(1), **gone)
    plan = reconcile(seen)
    assert (plan.actions, plan.status.state) == ((), "Queued")
    again = msgspec.structs.replace(seen, status=plan.status)
    assert actions(again) == (
        DeleteWorkload(name="llm-plus-1", uid="uid-llm-plus-1"),
        ReleaseQuota("llm-base"),
    )
    readmitted = msgspec.structs.replace(again, workloads={"llm-base": workload()})
    assert actions(readmitted) == (Number(run=2, term=2, next_number=3, begins=True),)


@pytest.mark.parametrize("base", [None, workload(active=False)], ids=["deleted", "stopped"])
def test_a_person_takes_the_quota_back(base: WorkloadSeen | None) -> None:
    (asked_,) = actions(trains(*([base] if base is not None else [])))
    assert isinstance(asked_, AskStop)
    assert asked_.reason.startswith(queues.TAKEN_BACK)


def test_a_job_that_is_over_frees_its_quota() -> None:
    termination_message = pod(
        "c1", phase="Succeeded", termination_message=TerminationMessage(outcome="finished")
    )
    over = trains(workload(), workload(1), pods=(termination_message,), said=None)
    ended = msgspec.structs.replace(over, status=status_after(over))
    assert ended.status.holds(ConditionType.COMPLETE)
    assert actions(ended)[1:3] == (
        DeleteWorkload(name="llm-plus-1", uid="uid-llm-plus-1"),
        FinishWorkload("llm-base", succeeded=True),
    )


def test_time_in_a_queue_is_no_time_of_the_run() -> None:
    evicted = {"llm-base": workload(evicted="Preempted")}
    absent = frozenset({"llm-c1"})
    status = status_after(waits(workloads=evicted, status=BEGUN, absent=absent))
    assert status.holds(ConditionType.SUSPENDED)
    a_day_later = waits(workloads=evicted, status=status, now_s=NOW_S + 86400)
    assert (status_after(a_day_later).state, actions(a_day_later)) == ("Queued", (ReleaseQuota("llm-base"),))


def test_a_smaller_job_gives_the_quota_of_its_nodes_back() -> None:
    three = [workload(), workload(1), workload(2)]
    assert actions(trains(*three)) == (DeleteWorkload(name="llm-plus-2", uid="uid-llm-plus-2"),)
    # Not yet: the coordinator has not let the node go.
    pods = (*trains().pods, pod("n3", workload="llm-plus-2"))
    assert actions(trains(*three, pods=pods, said=said("n0", "n1", "n2", "n3"))) == ()


# ------------------------------------------------------------ the objects


def test_a_workload_counts_what_its_pods_need() -> None:
    limits = {"resources": {"limits": {"nvidia.com/gpu": "8"}}}
    container = {"name": "worker", "image": "i", **limits}
    job = queued(
        spec__template__spec__containers=[container],
        spec__scheduling={"workloadPriorityClass": "high", "elasticWorkloadPriorityClass": "low"},
    )
    base = kueue.workload(job, None, 2, ("high", 1000))
    assert base["spec"]["queueName"] == "team-a"
    assert base["spec"]["priorityClassRef"]["name"] == "high"
    assert base["spec"]["priority"] == 1000
    assert [(one["name"], one["count"]) for one in base["spec"]["podSets"]] == [
        ("coordinator", 1),
        ("node", 2),
    ]
    node = base["spec"]["podSets"][1]["template"]["spec"]
    assert node["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert "volumes" not in node
    assert [kueue.priority_class(job, number) for number in (None, 3)] == ["high", "low"]
    (further,) = kueue.workload(job, 3, 1)["spec"]["podSets"]
    assert (further["name"], further["count"]) == ("node", 1)


def test_pods_go_where_their_quota_is() -> None:
    made = {
        "status": {
            "admission": {
                "podSetAssignments": [
                    {"name": "node", "flavors": {"cpu": "spot", "memory": "spot"}},
                    {"name": "coordinator", "flavors": {"cpu": "cheap"}},
                ]
            },
            "admissionChecks": [
                {
                    "podSetUpdates": [
                        {"name": "node", "annotations": {"provisioned": "7"}, "labels": {"a": "b"}}
                    ]
                }
            ],
        }
    }
    assert kueue.flavors_of(made, "node") == ["spot"]
    spot = {"spec": {"nodeLabels": {"tier": "spot"}, "tolerations": [{"key": "spot", "operator": "Exists"}]}}
    at = kueue.where(made, [spot], "node")
    placed = kueue.placed(agent_pod(queued(), 2), at, "llm-plus-1")
    assert placed["spec"]["nodeSelector"] == {"tier": "spot"}
    assert {"key": "spot", "operator": "Exists"} in placed["spec"]["tolerations"]
    assert placed["metadata"]["labels"][LABEL_WORKLOAD] == "llm-plus-1"
    assert placed["metadata"]["labels"]["holdfast.dev/job"] == "llm"
    assert placed["metadata"]["annotations"]["provisioned"] == "7"
    assert "nodeSelector" not in kueue.placed(agent_pod(queued(), 2), Where(), "llm-base")["spec"]


RACK, HOST = "topology.holdfast.dev/rack", "kubernetes.io/hostname"


def in_rack(**changes: Any) -> HoldfastJob:
    return queued(spec__scheduling={"queueTopology": {"required": RACK}}, **changes)


def assigned(levels: list[str], *slices: dict[str, Any]) -> dict[str, Any]:
    """A Workload whose machines Kueue has chosen."""
    topology = {"levels": levels, "slices": list(slices)}
    sets = [
        {"name": "node", "flavors": {"cpu": "racked"}, "topologyAssignment": topology},
        {"name": "coordinator", "flavors": {"cpu": "racked"}, "topologyAssignment": topology},
    ]
    made = kueue.workload(in_rack(), None, 2)
    return made | {"status": {"admission": {"podSetAssignments": sets}}}


TWO_HOSTS = {
    "domainCount": 2,
    "podCounts": {"universal": 1},
    "valuesPerLevel": [{"individual": {"prefix": "gpu-", "roots": ["1", "2"], "suffix": ".local"}}],
}


def test_how_near_the_nodes_are_to_be_is_asked_of_kueue() -> None:
    coordinator, node = kueue.workload(in_rack(), None, 2)["spec"]["podSets"]
    assert node["topologyRequest"] == {"required": RACK}
    assert "topologyRequest" not in coordinator, "it goes anywhere"
    (further,) = kueue.workload(in_rack(), 3, 1, near={RACK: "r1"})["spec"]["podSets"]
    assert further["topologyRequest"] == {"required": RACK}
    assert further["template"]["spec"]["nodeSelector"] == {RACK: "r1"}
    for one in kueue.workload(queued(), None, 2)["spec"]["podSets"]:
        assert "topologyRequest" not in one


def test_a_job_that_waits_and_wants_to_be_nearer_asks_anew() -> None:
    made = kueue.workload(in_rack(), None, 2)
    made["metadata"]["uid"] = "uid-llm-base"
    there = kueue.workload_seen(made, "llm", in_rack().id.uid)
    assert there is not None
    assert actions(waits(job=in_rack(), workloads={"llm-base": there})) == ()
    assert actions(waits(workloads={"llm-base": there})) == (
        DeleteWorkload(name="llm-base", uid="uid-llm-base"),
    )


def test_machines_that_kueue_has_chosen() -> None:
    assert kueue.domains_of(assigned([HOST], TWO_HOSTS), "node") == [
        {HOST: "gpu-1.local"},
        {HOST: "gpu-2.local"},
    ]
    blocks = {
        "domainCount": 2,
        "podCounts": {"universal": 1},
        "valuesPerLevel": [{"universal": "b1"}, {"individual": {"roots": ["r1", "r2"]}}],
    }
    one = {"domainCount": 1, "podCounts": {"universal": 1}, "valuesPerLevel": [{"universal": "b2"}] * 2}
    assert kueue.domains_of(assigned(["block", RACK], blocks, one), "node") == [
        {"block": "b1", RACK: "r1"},
        {"block": "b1", RACK: "r2"},
        {"block": "b2", RACK: "b2"},
    ]
    made = assigned([HOST], TWO_HOSTS)
    made["metadata"]["uid"] = "uid-llm-base"
    there = kueue.workload_seen(made, "llm", in_rack().id.uid)
    assert there is not None
    assert there.machines == {"gpu-1.local", "gpu-2.local"}
    for status in ({}, {"admission": None}, ASSIGNED):
        assert kueue.domains_of({"status": status}, "node") == []


def test_nodes_wait_until_kueue_has_chosen_and_a_coordinator_does_not() -> None:
    made = assigned([HOST], TWO_HOSTS)
    at = kueue.where(made, [{}], "node")
    placed = kueue.placed(agent_pod(in_rack(), 2), at, "llm-base")
    assert placed["spec"]["schedulingGates"] == [{"name": "kueue.x-k8s.io/topology"}]
    assert placed["metadata"]["labels"]["kueue.x-k8s.io/podset"] == "node"
    assert placed["metadata"]["annotations"]["kueue.x-k8s.io/workload"] == "llm-base"
    assert placed["metadata"]["annotations"]["kueue.x-k8s.io/podset-required-topology"] == RACK
    successor = kueue.placed(
        coordinator_pod(in_rack(), 2), kueue.where(made, [{}], "coordinator"), "llm-base"
    )
    assert "schedulingGates" not in successor["spec"]
    assert "kueue.x-k8s.io/podset" not in successor["metadata"]["labels"]
    # A queue that chooses by itself: nothing was asked for.
    del made["spec"]["podSets"][1]["topologyRequest"]
    at = kueue.where(made, [{}], "node")
    assert at.gates
    assert at.annotations["kueue.x-k8s.io/podset-unconstrained-topology"] == "true"
    assert kueue.where({"status": ASSIGNED}, [{}], "node").gates == ()


def test_a_node_that_waits_for_kueues_choice_is_left_alone() -> None:
    gated = pod("n2", workload="llm-base", machine=None, phase="Pending", ready=False)
    gated = msgspec.structs.replace(
        gated, waits="it waits until Kueue chooses its machine", avoids=frozenset({"m-n0"})
    )
    others = (pod("c1"), pod("n1", workload="llm-plus-1"), pod("n3", workload="llm-base"))
    seen = trains(workload(), workload(1), pods=(*others, gated), said=said("n1", "n3"))
    assert actions(seen) == ()
    assert "it waits until Kueue chooses its machine" in told(seen)


def test_a_node_that_waits_at_a_workload_without_room_is_made_for_another() -> None:
    """It was to replace one that was cordoned, and is not any more. Seeds 79 and 233 of the schedules."""
    waits_ = {"machine": None, "phase": "Pending", "ready": False, "gated": True}
    base = (pod("c1"), pod("n0", workload="llm-base"), pod("n1", workload="llm-base"))
    late = pod("n3", workload="llm-base", **waits_)
    seen = trains(workload(), workload(1), pods=(*base, late), said=said("n0", "n1"))
    (deleted,) = actions(seen)
    assert isinstance(deleted, DeletePod)
    # Kueue may take the gate away in this moment.
    assert (deleted.name, deleted.version) == ("llm-n3", late.version)
    assert actions(msgspec.structs.replace(seen, pods=base, granted=frozenset({"llm-n4"}))) == (
        MakeNode(4, frozenset(), "llm-plus-1"),
    )
    # As long as the other one is to leave, it waits for its place.
    going = {"m-n1": MachineSeen(name="m-n1", going="it is cordoned")}
    cordoned = msgspec.structs.replace(seen, machines=going, workloads={"llm-base": workload()})
    assert not any(isinstance(one, DeletePod) for one in actions(cordoned))


def test_a_node_makes_room_for_one_that_kueue_has_sent_to_its_machine() -> None:
    """Its own Workload has another machine by now: a person has deleted it, and it was asked for anew. Seeds 4890 and 14298 of the
    schedules: the other one waited for ever."""
    base = (pod("c1"), pod("n0", workload="llm-base", chosen="m-n0"))
    stays = pod("n1", workload="llm-plus-1", chosen="m-n1")
    late = pod(
        "n2",
        workload="llm-plus-2",
        chosen="m-n1",
        machine=None,
        phase="Pending",
        ready=False,
        unschedulable=True,
    )
    books = (workload(nodes=1, machines=frozenset({"m-n0"})), workload(2, machines=frozenset({"m-n1"})))
    moved = workload(1, machines=frozenset({"m-n7"}))
    seen = trains(*books, moved, pods=(*base, stays, late), said=said("n0", "n1"))
    (told,) = (one.news for one in actions(seen) if isinstance(one, Tell))
    assert told == NodeGoing("llm-n1", "Kueue has given m-n1 to llm-plus-2", 90.0, NoticeCause.PREEMPTION)

    def is_left_alone(*workloads: WorkloadSeen, waiting: PodSeen = late) -> bool:
        now = trains(*workloads, pods=(*base, stays, waiting), said=said("n0", "n1"))
        return not any(isinstance(one, Tell) for one in actions(now))

    # Kueue has both there: each would make room for the other again and again.
    assert is_left_alone(*books, workload(1, machines=frozenset({"m-n1"})))
    # It does not choose machines, or what it has chosen is not known.
    assert is_left_alone(*books, workload(1))
    # The other one has a machine, or nothing has been tried yet.
    assert is_left_alone(*books, moved, waiting=msgspec.structs.replace(late, machine="m-n7"))
    assert is_left_alone(*books, moved, waiting=msgspec.structs.replace(late, unschedulable=False))
    # Both use the same Workload: Kueue chose one machine for two.
    assert is_left_alone(*books, moved, waiting=msgspec.structs.replace(late, workload="llm-plus-1"))


def told(seen: Observed) -> str:
    found = status_after(seen).condition(ConditionType.SCHEDULED)
    assert found is not None
    return found.message


def test_a_choice_of_kueues_that_cannot_be_is_explained() -> None:
    """It knows neither which machines a job avoids, nor that its nodes are to be apart."""
    stuck = msgspec.structs.replace(
        pod("n2", workload="llm-base", machine=None, phase="Pending", ready=False),
        unschedulable=True,
        waits="0/4 nodes are available",
        chosen="m7",
    )
    first = pod("n1", workload="llm-base", chosen="m1")
    seen = trains(workload(), workload(1), pods=(pod("c1"), first, stuck), said=said("n1"))
    assert told(seen).endswith("0/4 nodes are available; Kueue has chosen m7")
    bad = msgspec.structs.replace(stuck, avoids=frozenset({"m7"}))
    known = msgspec.structs.replace(said("n1"), bad_machines=frozenset({"m7"}))
    seen = trains(workload(), workload(1), pods=(pod("c1"), first, bad), said=known)
    assert told(seen).endswith("Kueue has chosen m7, which the job avoids")
    both = msgspec.structs.replace(first, chosen="m7")
    seen = trains(workload(), workload(1), pods=(pod("c1"), both, stuck), said=said("n1"))
    assert "m7, and for llm-n1 as well: ask for more than half of a machine" in told(seen)


def test_giving_back_keeps_what_is_not_ours() -> None:
    old = "2026-01-01T00:00:00Z"
    conditions = [
        {
            "type": "Evicted",
            "status": "True",
            "reason": "Preempted",
            "message": "m",
            "lastTransitionTime": old,
        },
        {"type": "QuotaReserved", "status": "True", "reason": "R", "message": "", "lastTransitionTime": old},
    ]
    made = {
        "metadata": {"resourceVersion": "7", "generation": 3},
        "spec": {"active": False},
        "status": {"conditions": conditions},
    }
    patch = kueue.released(made, NOW_S)
    assert patch["metadata"] == {"resourceVersion": "7"}
    assert patch["status"]["admission"] is None
    told = {one["type"]: one for one in patch["status"]["conditions"]}
    assert told["Evicted"] == conditions[0]
    assert (told["QuotaReserved"]["status"], told["Admitted"]["status"]) == ("False", "False")
    assert told["Requeued"]["status"] == "False", "a person has stopped it"


# ------------------------------------------------------------ over HTTP


async def kueue_says(fake: LiveApi, name: str, *conditions: tuple[str, str, str], **status: Any) -> None:
    path = f"{WORKLOADS}/{name}"
    made = fake.objects[path]
    told = [
        {"type": type_, "status": value, "reason": reason, "message": "", "lastTransitionTime": "t"}
        for type_, value, reason in conditions
    ]
    made["status"] = {**made.get("status", {}), **status, "conditions": told}
    await fake.put(path, made)


ADMITTED = (("QuotaReserved", "True", "QuotaReserved"), ("Admitted", "True", "Admitted"))
ASSIGNED = {"admission": {"podSetAssignments": [{"name": "node", "flavors": {"cpu": "spot"}}]}}
FLAVOR = "/apis/kueue.x-k8s.io/v1beta2/resourceflavors/spot"


def test_the_operator_asks_kueue_and_makes_pods_where_it_says() -> None:
    async def scene(fake: LiveApi, restart: Any) -> None:
        flavor = {"metadata": {"name": "spot"}, "spec": {"nodeLabels": {"tier": "spot"}}}
        fake.objects[FLAVOR] = flavor
        await fake.until(lambda: f"{WORKLOADS}/llm-base" in fake.objects)
        await fake.until(lambda: fake.objects[JOB].get("status", {}).get("state") == "Queued")
        assert not fake.named("pods")
        assert fake.objects[f"{WORKLOADS}/llm-base"]["metadata"]["ownerReferences"][0] == owner(queued())
        await restart()
        await kueue_says(fake, "llm-base", *ADMITTED, **ASSIGNED)
        await fake.until(lambda: fake.named("pods") == {"llm-c1", "llm-n0", "llm-n1"})
        assert fake.objects[f"{PODS}/llm-n0"]["spec"]["nodeSelector"] == {"tier": "spot"}
        await fake.until(lambda: f"{WORKLOADS}/llm-plus-1" in fake.objects)
        await kueue_says(fake, "llm-plus-1", *ADMITTED)
        await fake.until(lambda: "llm-n2" in fake.named("pods"))
        assert fake.objects[f"{PODS}/llm-n2"]["metadata"]["labels"][LABEL_WORKLOAD] == "llm-plus-1"
        # Nothing was trained, so nothing is to be saved.
        await kueue_says(fake, "llm-base", *ADMITTED, ("Evicted", "True", "Preempted"), **ASSIGNED)
        await fake.until(lambda: not fake.named("pods"))

        def given_back() -> bool:
            status = fake.objects[f"{WORKLOADS}/llm-base"]["status"]
            holds = {one["type"]: one["status"] for one in status["conditions"]}
            return status["admission"] is None and holds["QuotaReserved"] == "False"

        await fake.until(given_back)
        await fake.until(lambda: fake.named("workloads") == {"llm-base"})
        await kueue_says(fake, "llm-base", *ADMITTED, **ASSIGNED)
        await fake.until(lambda: "llm-c2" in fake.named("pods"))
        assert fake.objects[JOB]["status"]["run"] == 2

    operated(scene, spec__minNodes=1, metadata__labels={LABEL_QUEUE: "team-a"})


def test_what_is_required_of_all_nodes_holds_for_further_ones() -> None:
    """Kueue places each Workload by itself, so a further node's is asked for in the rack of the others."""

    async def scene(fake: LiveApi, restart: Any) -> None:
        fake.objects["/apis/kueue.x-k8s.io/v1beta2/resourceflavors/racked"] = {"metadata": {"name": "racked"}}
        machine = {"metadata": {"name": "gpu-1.local", "labels": {RACK: "r1"}}}
        await fake.put("/api/v1/nodes/gpu-1.local", machine, "ADDED")
        await fake.until(lambda: f"{WORKLOADS}/llm-base" in fake.objects)
        admission = assigned([HOST], TWO_HOSTS)["status"]
        await kueue_says(fake, "llm-base", *ADMITTED, **admission)
        await fake.until(lambda: fake.named("pods") == {"llm-c1", "llm-n0", "llm-n1"})
        gates = {
            name: fake.objects[f"{PODS}/{name}"]["spec"].get("schedulingGates") for name in fake.named("pods")
        }
        gate = [{"name": "kueue.x-k8s.io/topology"}]
        assert gates == {"llm-c1": None, "llm-n0": gate, "llm-n1": gate}
        await fake.until(lambda: f"{WORKLOADS}/llm-plus-1" in fake.objects)
        (further,) = fake.objects[f"{WORKLOADS}/llm-plus-1"]["spec"]["podSets"]
        assert further["template"]["spec"]["nodeSelector"] == {RACK: "r1"}
        by_name = {"fieldSelector": "metadata.name=gpu-1.local"}
        assert any(
            path == "/api/v1/nodes" and by_name.items() <= query.items() for _, path, query, _ in fake.asked
        )

    asked = {"queueTopology": {"required": RACK}}
    operated(scene, spec__minNodes=1, spec__scheduling=asked, metadata__labels={LABEL_QUEUE: "team-a"})
