"""What is believed of a pod: by a watch that is behind, and by answers that are late."""

from typing import Any

import msgspec

from holdfast.kubernetes.objects.pod import PodSeen
from holdfast.kubernetes.tasks.expectations import PodTable

NEW = PodSeen(name="llm-n0", uid="u", coordinator=False, number=0, run=1, version=5)


def later(**fields: Any) -> PodSeen:
    return msgspec.structs.replace(NEW, **({"version": 9} | fields))


def table(*pods: PodSeen) -> PodTable:
    made = PodTable()
    for pod in pods:
        made.put(pod)
    return made


def test_a_late_answer_does_not_undo_what_the_watch_has_told() -> None:
    """The scheduler was faster than the answer to the creation. The watch does not say it a second time."""
    nowhere = later(unschedulable=True, waits="0/4 nodes are available")
    assert table(nowhere, NEW).all == (nowhere,)
    assert table(NEW, nowhere).all == (nowhere,)
    # Another pod of that name, as after an update of the API server's storage, begins anew.
    other = msgspec.structs.replace(NEW, uid="v", version=1)
    assert table(nowhere, other).all == (other,)


def test_what_the_watch_lost_is_unsure_unless_somebody_deleted_it() -> None:
    pods = table(NEW)
    pods.lost_sight(NEW)
    assert [(pod.name, pod.unsure) for pod in pods.all] == [("llm-n0", True)]
    pods.put(later())  # it was found
    assert [pod.unsure for pod in pods.all] == [False]
    pods.lost_sight(later(deleting=True))
    assert pods.all == ()
    assert pods.absent == {"llm-n0"}


def test_a_list_without_a_pod_makes_it_unsure_and_an_answer_settles_it() -> None:
    pods = table(NEW)
    pods.replace([], version=9)
    assert [pod.unsure for pod in pods.all] == [True]
    pods.not_there("llm-n0")
    assert (pods.all, pods.absent) == ((), {"llm-n0"})
    pods.put(NEW)  # an answer that left the server before it went
    assert pods.all == ()


def test_a_pod_that_is_newer_than_a_list_is_not_missing_in_it() -> None:
    pods = table(later())
    pods.replace([], version=8)
    assert pods.all == (later(),)
