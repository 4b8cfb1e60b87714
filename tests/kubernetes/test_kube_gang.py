"""Gang scheduling: the PodGroup of each scheduler, what ties pods to it, and its size while a job lives."""

from typing import Any

import msgspec
import pytest
from fakeapi import refused
from kubejobs import accept
from kubejobs import job as asked
from liveapi import LiveApi
from operating import JOB, PODS, operated
from test_kube_reconcile import BEGUN, NOW_S, actions, observed, pod, said, status_after

from holdfast.kubernetes import names
from holdfast.kubernetes.objects import render
from holdfast.kubernetes.objects.resource import HoldfastJob
from holdfast.kubernetes.objects.status import ConditionType, WaitingForMachines, timestamp
from holdfast.kubernetes.policy.plan import DeleteObject, MakeObject, Observed, SizeGroup
from holdfast.kubernetes.policy.reconcile import BESIDE, reconcile

GANGS = ("KAI", "PodGroup", "Volcano")


def scheduling(gang: str) -> dict[str, Any]:
    return {"gang": gang} | ({} if gang == "PodGroup" else {"queue": "team-a"})


def grouped(gang: str = "PodGroup", **changes: Any) -> HoldfastJob:
    given = {"spec__nodes": 4, "spec__minNodes": 3, "spec__spares": 1, "spec__scheduling": scheduling(gang)}
    return accept(asked(**(given | changes)))


def trains(**fields: Any) -> Observed:
    """Two nodes and a spare, of which two are bound together."""
    given = {"spec": {"spec__scheduling": scheduling("PodGroup")}, "group_members": 2}
    return observed(**(given | fields))


# ------------------------------------------------------------ objects


@pytest.mark.parametrize(
    ("gang", "version", "spec"),
    [
        (
            "PodGroup",
            "scheduling.k8s.io/v1beta1",
            {"schedulingPolicy": {"gang": {"minCount": 3}}, "disruptionMode": {"single": {}}},
        ),
        (
            "KAI",
            "scheduling.run.ai/v2alpha2",
            {"minMember": 3, "queue": "team-a", "stalenessGracePeriod": "-1s"},
        ),
        ("Volcano", "scheduling.volcano.sh/v1beta1", {"minMember": 3, "queue": "team-a"}),
    ],
)
def test_the_group_as_its_scheduler_wants_it(gang: str, version: str, spec: dict[str, Any]) -> None:
    made = render.group(grouped(gang))
    assert (made["apiVersion"], made["kind"], made["spec"]) == (version, "PodGroup", spec)
    assert made["metadata"]["name"] == "llm"
    (owner,) = made["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"], owner["controller"]) == ("HoldfastJob", "u-1", True)
    assert render.group_members(made) == 3
    smaller = render.resized_group(version, 2)
    assert render.group_members(smaller) == 2


def test_nodes_are_in_the_group_and_the_coordinator_is_not() -> None:
    def node(gang: str) -> dict[str, Any]:
        return render.agent_pod(grouped(gang), 0)

    assert node("PodGroup")["spec"]["schedulingGroup"] == {"podGroupName": "llm"}
    assert "schedulerName" not in node("PodGroup")["spec"]
    volcano, kai = node("Volcano"), node("KAI")
    assert volcano["spec"]["schedulerName"] == "volcano"
    assert volcano["metadata"]["annotations"]["scheduling.k8s.io/group-name"] == "llm"
    assert kai["spec"]["schedulerName"] == "kai-scheduler"
    assert kai["metadata"]["annotations"]["pod-group-name"] == "llm"
    assert kai["metadata"]["annotations"]["kai.scheduler/skip-podgrouper"] == "true"
    assert kai["metadata"]["labels"]["kai.scheduler/queue"] == "team-a"
    for gang in GANGS:
        assert node(gang)["metadata"]["labels"][names.LABEL_RUN] == "1"
        coordinator = render.coordinator_pod(grouped(gang), 1)
        assert "schedulerName" not in coordinator["spec"]
        assert "schedulingGroup" not in coordinator["spec"]
        assert "group" not in str(coordinator["metadata"]["annotations"])


def test_a_group_has_the_priority_of_its_pods() -> None:
    job = grouped(spec__template__spec__priorityClassName="high")
    assert render.group(job)["spec"]["priorityClassName"] == "high"


# ------------------------------------------------------------ decisions


def test_the_group_is_made_before_the_pods_and_anew_for_each_run() -> None:
    new = trains(
        accepted=None,
        status=BEGUN,
        pods=(),
        objects=frozenset(),
        said=None,
        group_members=None,
        granted=frozenset({"llm-c1", "llm-n0"}),
    )
    kinds = [one.kind for one in actions(new) if isinstance(one, MakeObject)]
    assert kinds == list(BESIDE)
    order = [type(one).__name__ for one in actions(new)]
    assert order.index("MakeNode") > order.index("MakeObject") + kinds.index("PodGroup")
    assert "PodGroup" not in [
        one.kind for one in actions(observed(objects=frozenset())) if isinstance(one, MakeObject)
    ]
    suspended = {"spec__runPolicy": {"suspend": True}, "spec__scheduling": scheduling("PodGroup")}
    over = trains(spec=suspended, pods=(), said=None, absent=frozenset({"llm-c1"}))
    # The ConfigMap says whose the group is, so it goes last.
    assert actions(over) == (DeleteObject("PodGroup"), DeleteObject("ConfigMap"))


def test_a_group_asks_for_no_more_than_there_are_to_be() -> None:
    assert actions(trains()) == ()
    # `kubectl scale` to one node, or `holdfast resize`: the coordinator's word counts.
    smaller = trains(said=said("n0", wanted=1), pods=(pod("c1"), pod("n0")))
    assert actions(smaller) == (SizeGroup(1),)
    grown = trains(said=said("n0", "n1", "n2"), group_members=1)
    assert actions(grown) == (SizeGroup(2),)
    assert not [one for one in actions(observed()) if isinstance(one, SizeGroup)]


def test_time_in_the_schedulers_queue_does_not_count() -> None:
    """As with Kueue's. It ends when the group has its machines."""

    def looked(bound: int, since_s: float) -> Observed:
        waiting = WaitingForMachines(bound=bound, since=timestamp(since_s), first=timestamp(NOW_S - 9000))
        began = msgspec.structs.replace(BEGUN, waiting=waiting, start_time=timestamp(NOW_S - 9000))
        waits = {"phase": "Pending", "ready": False, "machine": "m" if bound else None}
        pods = tuple(pod(f"n{k}", **waits) for k in range(2))
        return trains(status=began, pods=(pod("c1"), *pods), said=said("n0", step=None, phase="gathering"))

    def failed(seen: Observed) -> bool:
        return status_after(seen).holds(ConditionType.FAILED)

    assert not failed(looked(0, NOW_S - 9000))
    assert not failed(looked(2, NOW_S - 60))
    assert failed(looked(2, NOW_S - 2000))
    assert reconcile(looked(2, NOW_S - 60)).look_again_s == 1800 - 60
    # Nothing is given back where nothing is held.
    assert status_after(looked(0, NOW_S - 9000)).waiting is not None


# ------------------------------------------------------------ the edge


def group_path(gang: str) -> str:
    return f"/apis/{render.GROUP_VERSIONS[gang]}/namespaces/research/podgroups/llm"


async def suspend(fake: LiveApi, whether: bool) -> None:
    there = fake.objects[JOB]
    await fake.put(JOB, {**there, "spec": {**there["spec"], "runPolicy": {"suspend": whether}}})


@pytest.mark.parametrize("gang", GANGS)
def test_a_job_gets_its_group_before_its_pods(gang: str) -> None:
    async def scene(fake: LiveApi, restart: Any) -> None:
        await fake.until(lambda: len(fake.named("pods")) == 4)
        group = fake.objects[group_path(gang)]
        assert render.group_members(group) == 2
        made = [path for kind, path, _ in fake.log if kind == "ADDED"]
        assert made.index(group_path(gang)) < made.index(f"{PODS}/llm-c1")
        # Another operator finds it.
        await restart()
        await fake.remove(f"{PODS}/llm-n0")
        await fake.until(lambda: "llm-n3" in fake.named("pods"))
        assert fake.objects[group_path(gang)]["metadata"]["uid"] == group["metadata"]["uid"]
        # A run that goes on later has another one.
        await suspend(fake, True)
        await fake.until(lambda: group_path(gang) not in fake.objects)
        await suspend(fake, False)
        await fake.until(lambda: len(fake.named("pods")) == 4)
        assert fake.objects[group_path(gang)]["metadata"]["uid"] != group["metadata"]["uid"]

    operated(scene, spec__scheduling=scheduling(gang))


def test_the_group_has_the_size_of_the_job() -> None:
    async def scene(fake: LiveApi, restart: Any) -> None:
        await fake.until(lambda: len(fake.named("pods")) == 4)
        there = fake.objects[group_path("Volcano")]
        there["spec"]["minMember"] = 9
        await fake.put(group_path("Volcano"), there)
        await restart()
        await fake.until(lambda: fake.objects[group_path("Volcano")]["spec"]["minMember"] == 2)

    operated(scene, spec__scheduling=scheduling("Volcano"))


class Without(LiveApi):
    """A cluster that has no such groups."""

    async def answer(self, request: Any) -> Any:
        if "/podgroups" in request.path:
            self.asked.append((request.method, request.path, {}, None))
            return refused(404, "NotFound", {})
        return await super().answer(request)


def test_a_cluster_without_such_groups_is_told_in_words() -> None:
    async def scene(fake: LiveApi, restart: Any) -> None:
        def accepted() -> dict[str, Any]:
            return dict(fake.objects[JOB].get("status", {}).get("conditions", [{}])[0])

        await fake.until(lambda: accepted().get("status") == "False")
        assert "does not serve scheduling.k8s.io/v1beta1" in accepted()["message"]
        assert "GenericWorkload" in accepted()["message"]
        assert not fake.named("pods"), "pods of a group that is not there would wait for ever"

    operated(scene, Without(), spec__scheduling=scheduling("PodGroup"))


class Held(LiveApi):
    """The group of a run before is going, and a finalizer holds it until somebody has tried to make another one."""

    def __init__(self) -> None:
        super().__init__()
        metadata = {"name": "llm", "uid": "old", "deletionTimestamp": "2026-11-22T09:00:00Z"}
        owner = {"uid": "u-1", "controller": True}
        self.path = group_path("PodGroup")
        self.objects[self.path] = {
            "metadata": {**metadata, "ownerReferences": [owner], "resourceVersion": "1"}
        }
        self.pods_then: set[str] | None = None

    async def answer(self, request: Any) -> Any:
        answered = await super().answer(request)
        if (
            request.method == "GET"
            and request.path == self.path
            and "llm-holdfast" in self.named("configmaps")
            and self.objects.get(self.path, {}).get("metadata", {}).get("uid") == "old"
        ):
            self.pods_then = self.named("pods")
            await self.remove(self.path)
        return answered


def test_the_group_of_a_run_before_is_waited_for() -> None:
    fake = Held()

    async def scene(_: LiveApi, restart: Any) -> None:
        await fake.until(lambda: len(fake.named("pods")) == 4)
        assert fake.pods_then == set()
        assert fake.objects[fake.path]["metadata"]["uid"] != "old"

    operated(scene, fake, spec__scheduling=scheduling("PodGroup"))
