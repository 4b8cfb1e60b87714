"""Pods and machines as the API server writes them."""

from typing import Any

import pytest

from holdfast.kubernetes.objects.machine import machine_seen
from holdfast.kubernetes.objects.pod import TerminationMessage, pod_seen
from holdfast.kubernetes.pods.coordinator import termination_message
from reports import report_of


def pod(name: str = "llm-n3", **status: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "name": name,
            "uid": "p-1",
            "labels": {"holdfast.dev/run": "2"},
            "ownerReferences": [{"uid": "u-1", "controller": True}],
        },
        "spec": {"nodeName": "m1"},
        "status": {"phase": "Running", "podIP": "10.1.2.3"} | status,
    }


def test_a_pod_of_the_job() -> None:
    seen = pod_seen(pod(conditions=[{"type": "Ready", "status": "True"}]), "llm", "u-1")
    assert seen is not None
    assert (seen.number, seen.run, seen.phase, seen.machine, seen.ready) == (3, 2, "Running", "m1", True)
    assert (seen.coordinator, seen.deleting, seen.waits, seen.address) == (False, False, None, "10.1.2.3")
    assert not pod_seen(pod("llm-c2"), "llm", "u-1").ready  # type: ignore[union-attr]
    assert pod_seen(pod("llm-c2"), "llm", "u-1").coordinator  # type: ignore[union-attr]


def test_a_pod_counts_by_its_owners_uid_and_never_by_its_labels() -> None:
    assert pod_seen(pod(), "llm", "u-2") is None
    foreign = pod()
    foreign["metadata"]["ownerReferences"] = []
    assert pod_seen(foreign, "llm", "u-1") is None
    assert pod_seen(pod("llm-x3"), "llm", "u-1") is None


def test_a_pod_without_a_status_is_pending() -> None:
    bare = pod()
    bare["status"], bare["spec"] = {}, {}
    seen = pod_seen(bare, "llm", "u-1")
    assert seen is not None
    assert (seen.phase, seen.machine, seen.ready, seen.address) == ("Pending", None, False, None)


def test_a_pod_that_was_evicted_says_why() -> None:
    words = {"reason": "Evicted", "message": "The node was low on resource: ephemeral-storage. "}
    seen = pod_seen(pod(phase="Failed", **words), "llm", "u-1")
    assert seen is not None
    assert seen.how_ended == "Failed, Evicted: The node was low on resource: ephemeral-storage."
    assert pod_seen(pod(phase="Failed"), "llm", "u-1").how_ended == "Failed"  # type: ignore[union-attr]
    assert pod_seen(pod(**words), "llm", "u-1").end == ""  # type: ignore[union-attr]


def test_a_pod_whose_labels_were_taken_away() -> None:
    labels = {
        "app.kubernetes.io/name": "holdfast",
        "app.kubernetes.io/managed-by": "holdfast-operator",
        "holdfast.dev/job": "llm",
        "holdfast.dev/role": "node",
        "holdfast.dev/run": "2",
    }

    def lacks(labels: dict[str, str], name: str = "llm-n3") -> bool:
        raw = pod(name)
        raw["metadata"]["labels"] = labels
        seen = pod_seen(raw, "llm", "u-1")
        assert seen is not None
        return seen.mislabelled

    assert not lacks(labels | {"of": "the user"})
    for name in labels:
        assert lacks({key: value for key, value in labels.items() if key != name})
    assert lacks(labels | {"holdfast.dev/job": "other"})
    leads = labels | {"holdfast.dev/role": "coordinator", "holdfast.dev/term": "3"}
    assert not lacks(leads, "llm-c3")
    assert lacks(leads | {"holdfast.dev/term": "2"}, "llm-c3")


@pytest.mark.parametrize("when", ["state", "lastState"])
def test_a_container_that_ended(when: str) -> None:
    """With its last words; not where it ended in order, or handed over."""

    def ended(**how: Any) -> tuple[int, str | None]:
        one = {"name": "worker", "restartCount": 3, when: {"terminated": {"reason": "Error"} | how}}
        seen = pod_seen(pod(containerStatuses=[{"name": "sidecar", "restartCount": 9}, one]), "llm", "u-1")
        assert seen is not None
        return seen.restarts, seen.crash

    traceback = (
        "Traceback (most recent call last):\n  File ...\nModuleNotFoundError: No module named 'holdfast'\n"
    )
    assert ended(exitCode=1, message=traceback) == (
        3,
        "exit code 1: ModuleNotFoundError: No module named 'holdfast'",
    )
    assert ended(exitCode=137, reason="OOMKilled") == (3, "exit code 137 (OOMKilled)")
    long = (
        "failed to create shim task: "
        + "x" * 400
        + 'exec: "python3": executable file not found in $PATH: unknown'
    )
    _, said = ended(exitCode=128, reason="StartError", message=long)
    assert said is not None
    assert len(said) < 240
    assert said.endswith("not found in $PATH: unknown")
    assert ended(exitCode=0, reason="Completed") == (3, None)
    assert ended(exitCode=75) == (3, None)


def test_a_container_in_a_crash_loop_says_how_it_ends_and_not_when_it_is_started_anew() -> None:
    waiting = {
        "waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s restarting failed container"}
    }
    last = {"terminated": {"exitCode": 1, "message": "cannot open /dev/nvidia0"}}
    one = {"name": "worker", "restartCount": 3, "state": waiting, "lastState": last}
    seen = pod_seen(pod(containerStatuses=[one]), "llm", "u-1")
    assert seen is not None
    assert seen.waits == (
        "its container ended 4 times, the last time with exit code 1: cannot open /dev/nvidia0"
    )
    assert seen.backs_off
    one["state"] = {"running": {}}
    runs = pod_seen(pod(containerStatuses=[one]), "llm", "u-1")
    assert runs is not None
    assert not runs.backs_off


@pytest.mark.parametrize(
    ("restarts", "started", "waits"),
    [
        (0, "09:00:00", False),  # the first time it is started again at once
        (1, "09:00:00", True),
        (1, "08:50:13", True),
        (1, "08:50:12", False),  # the kubelet has forgotten
        (1, None, False),
    ],
)
def test_a_container_that_ended_again_waits_before_the_kubelet_says_so(
    restarts: int, started: str | None, waits: bool
) -> None:
    """It may say so 10 s later, or start the container again instead (seen with 1.37.2)."""
    ended = {
        "exitCode": 137,
        "startedAt": f"2026-11-25T{started}Z" if started is not None else None,
        "finishedAt": "2026-11-25T09:00:12Z",
    }
    one = {"name": "worker", "restartCount": restarts, "state": {"terminated": ended}}
    running = {"name": "worker", "restartCount": restarts, "state": {"running": {}}}

    def seen(*containers: dict[str, object]) -> bool:
        return pod_seen(pod(containerStatuses=containers), "llm", "u-1").backs_off  # type: ignore[union-attr]

    assert seen(one) is waits
    # That of somebody else says nothing of the agent's.
    assert not seen(one | {"name": "sidecar"}, running)


@pytest.mark.parametrize(
    ("gate", "words"),
    [
        ("kueue.x-k8s.io/admission", "HoldfastJob.v1alpha1.holdfast.dev in integrations.externalFrameworks"),
        ("example.com/wait", "the scheduling gate example.com/wait holds it back"),
    ],
)
def test_a_pod_that_somebody_holds_back(gate: str, words: str) -> None:
    held = pod(conditions=[{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}])
    held["spec"] = {"schedulingGates": [{"name": gate}]}
    seen = pod_seen(held, "llm", "u-1")
    assert seen is not None
    assert words in (seen.waits or "")
    assert gate in (seen.waits or "")
    assert not seen.unschedulable


@pytest.mark.parametrize("when", ["state", "lastState"])
def test_a_container_that_was_killed_for_memory(when: str) -> None:
    """It is over, or the kubelet has started it again."""
    ended = {"reason": "OOMKilled", "exitCode": 137, "finishedAt": "2026-11-25T09:00:00Z"}
    others = {"name": "sidecar", when: {"terminated": ended | {"finishedAt": "2026-11-25T08:00:00Z"}}}

    def killed_s(**changed: str | None) -> float | None:
        agents = {"name": "worker", when: {"terminated": ended | changed}}
        return pod_seen(pod(containerStatuses=[others, agents]), "llm", "u-1").out_of_memory_s  # type: ignore[union-attr]

    assert killed_s() == 1795597200.0
    assert [killed_s(reason="Error"), killed_s(finishedAt=None), killed_s(finishedAt="now")] == [None] * 3


def test_what_a_pod_waits_for_is_in_the_words_of_who_knows() -> None:
    scheduler = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/3 nodes are available",
    }
    seen = pod_seen(pod(phase="Pending", conditions=[scheduler]), "llm", "u-1")
    assert seen is not None
    assert (seen.unschedulable, seen.waits) == (True, "0/3 nodes are available")
    kubelet = {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}
    seen = pod_seen(pod(phase="Pending", containerStatuses=[kubelet]), "llm", "u-1")
    assert seen is not None
    assert (seen.unschedulable, seen.waits) == (False, "ImagePullBackOff: no such image")
    creating = {"state": {"waiting": {"reason": "ContainerCreating"}}}
    assert pod_seen(pod(containerStatuses=[creating]), "llm", "u-1").waits is None  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("message", "termination_message"),
    [
        ('{"outcome": "finished", "reason": ""}', TerminationMessage(outcome="finished")),
        ("Traceback ...", None),
        ("", None),
        ('{"outcome": 7}', None),
    ],
)
def test_a_coordinators_termination_message(
    message: str, termination_message: TerminationMessage | None
) -> None:
    ended = [{"state": {"terminated": {"exitCode": 0, "message": message}}}]
    seen = pod_seen(pod("llm-c1", phase="Succeeded", containerStatuses=ended), "llm", "u-1")
    assert seen is not None
    assert seen.termination_message == termination_message
    # Not of one whose container is started again, and not of a node.
    assert pod_seen(pod("llm-c1", containerStatuses=ended), "llm", "u-1").termination_message is None  # type: ignore[union-attr]
    node = pod_seen(pod(phase="Succeeded", containerStatuses=ended), "llm", "u-1")
    assert node is not None
    assert node.termination_message is None


@pytest.mark.parametrize(
    ("spec", "going"),
    [
        ({}, None),
        ({"unschedulable": True}, "it is cordoned"),
        ({"taints": [{"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}]}, None),
        (
            {"taints": [{"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}]},
            "Karpenter takes the machine back",
        ),
        ({"taints": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]}, None),
        (
            {"taints": [{"key": "maintenance", "value": "now", "effect": "NoExecute"}]},
            "the taint maintenance=now",
        ),
    ],
)
def test_a_machine_that_is_to_be_emptied(spec: dict[str, Any], going: str | None) -> None:
    ready = [{"type": "Ready", "status": "True"}]
    node = {
        "metadata": {"name": "m1"},
        "spec": spec,
        "status": {"conditions": ready},
    }
    seen = machine_seen(node)
    assert (seen.name, seen.ready, seen.going) == ("m1", True, going)


def test_a_machine_of_which_nothing_is_known_is_not_ready() -> None:
    seen = machine_seen({"metadata": {"name": "m1"}})
    assert (seen.ready, seen.going) == (False, None)


def test_a_pod_whose_machine_kueue_chooses() -> None:
    waits = pod(phase="Pending")
    waits["metadata"]["labels"]["kueue.x-k8s.io/podset"] = "node"
    waits["spec"] = {"schedulingGates": [{"name": "kueue.x-k8s.io/topology"}]}
    seen = pod_seen(waits, "llm", "u-1")
    assert seen is not None
    assert (seen.waits, seen.gated, seen.chosen) == ("it waits until Kueue chooses its machine", True, "")
    waits["spec"] = {"nodeSelector": {"kubernetes.io/hostname": "m7"}}
    seen = pod_seen(waits, "llm", "u-1")
    assert seen is not None
    assert (seen.waits, seen.gated, seen.chosen) == (None, False, "m7")
    # A selector of the template's own is nobody's choice.
    del waits["metadata"]["labels"]["kueue.x-k8s.io/podset"]
    assert pod_seen(waits, "llm", "u-1").chosen == ""  # type: ignore[union-attr]


def test_a_job_that_failed_says_which_rank_did_and_of_what() -> None:
    blame = {"cause": "ModuleNotFoundError: No module named 'x'", "rank": 1, "node": "llm-n3"}
    report = {"outcome": "failed", "reason": "the same error in 3 attempts in a row", "blame": blame}
    told = "the same error in 3 attempts in a row: rank 1 on llm-n3: ModuleNotFoundError: No module named 'x'"
    assert termination_message(report_of(report)) == TerminationMessage(outcome="failed", reason=told)
    nobody = blame | {"rank": None, "node": None}
    assert (
        termination_message(report_of(report | {"blame": nobody})).reason
        == f"{report['reason']}: {blame['cause']}"
    )
    assert termination_message(report_of(report | {"blame": None})).reason == report["reason"]
    # What ended for another reason keeps it alone, and a cause that is the reason is not said twice.
    assert termination_message(report_of(report | {"outcome": "stopped"})).reason == report["reason"]
    assert (
        termination_message(report_of(report | {"reason": f"twice {blame['cause']}"})).reason
        == f"twice {blame['cause']}"
    )
    assert len(termination_message(report_of(report | {"reason": "x" * 2000})).reason) == 1000
