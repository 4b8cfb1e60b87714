"""A start that has too few machines: it gives them back, so that two jobs do not block each other."""

from typing import Any

import msgspec
from simkube.rivals import Rivals
from test_kube_reconcile import BEGUN, NOW_S, actions, observed, pod, said, status_after

from holdfast.kubernetes.objects.status import ConditionType, TrainingProgress, WaitingForMachines, timestamp
from holdfast.kubernetes.policy.plan import DeletePod, Number, Observed
from holdfast.kubernetes.policy.reconcile import reconcile

SEEDS = 12
PATIENCE_S = 120


def half(**fields: Any) -> Observed:
    """One of two nodes has a machine, and the scheduler has none for the other; since a while."""
    bound, unbound = pod("n0", phase="Pending", ready=False), pod("n1", machine=None, unschedulable=True)
    waiting = WaitingForMachines(bound=1, since=timestamp(NOW_S - 2 * PATIENCE_S), first=BEGUN.start_time)
    status = msgspec.structs.replace(BEGUN, waiting=waiting)
    given = {
        "pods": (pod("c1"), bound, unbound),
        "status": status,
        "said": said("n0", step=None, phase="gathering"),
    }
    return observed(**(given | fields))


def test_two_jobs_do_not_block_each_other() -> None:
    blocked = []
    for seed in range(SEEDS):
        rivals = Rivals(seed)
        rivals.run(1500)
        assert not rivals.problems, f"seed {seed}: {rivals.problems}"
        blocked.append(rivals.blocked)
    assert max(blocked) > PATIENCE_S, "the seeds have a case in which each holds half"


def test_they_would() -> None:
    rivals = Rivals(1, spec__scheduling={"giveBackSeconds": 0})
    rivals.run(1000)
    assert rivals.problems == ["they block each other"]


def test_machines_are_given_back_after_it_was_written_down() -> None:
    plan = reconcile(half())
    assert plan.actions == ()
    assert plan.status.waiting is not None
    assert plan.status.waiting.tries == 1
    gives = half(status=plan.status)
    assert [type(one) for one in actions(gives)] == [DeletePod] * 3
    gone = half(
        status=plan.status,
        pods=(),
        said=None,
        objects=frozenset(),
        accepted=None,
        absent=frozenset({"llm-c1"}),
    )
    rests = reconcile(gone)
    assert (rests.actions, rests.status.state) == ((), "Queued")
    assert "1 of 2 nodes had a machine" in (rests.status.reason or "")
    assert rests.look_again_s is not None
    later = msgspec.structs.replace(gone, status=rests.status, now_s=NOW_S + rests.look_again_s + 1)
    assert actions(later) == (Number(run=2, term=2, next_number=3, begins=True),)


def test_what_is_no_reason_to_give_anything_back() -> None:
    def keeps(seen: Observed) -> bool:
        waiting = status_after(seen).waiting
        return waiting is None or waiting.until is None

    assert not keeps(half())
    trained = msgspec.structs.replace(half().status, progress=TrainingProgress(step=7))
    assert keeps(half(status=trained, said=None))
    assert keeps(half(spec={"spec__scheduling": {"giveBackSeconds": 0}}))
    assert keeps(half(spec={"spec__minNodes": 1})), "enough to begin with"
    # One more has come, as when an autoscaler adds machines one by one.
    before = WaitingForMachines(bound=0, since=timestamp(NOW_S - 2 * PATIENCE_S))
    assert keeps(half(status=msgspec.structs.replace(BEGUN, waiting=before)))
    more = (pod("c1"), pod("n0"), pod("n2"), pod("n1", machine=None, unschedulable=True))
    assert keeps(half(pods=more, spec={"spec__minNodes": 2}))
    slow = (pod("c1"), pod("n0"), pod("n1", machine=None))
    assert keeps(half(pods=slow)), "the scheduler has not said that there is no room"
    none = (pod("c1"), pod("n1", machine=None, unschedulable=True))
    assert keeps(half(pods=none)), "it holds nothing that another job could use"


def test_the_deadline_of_the_start_counts_all_tries() -> None:
    waiting = WaitingForMachines(bound=1, since=timestamp(NOW_S), first=timestamp(NOW_S - 1801), tries=5)
    late = half(status=msgspec.structs.replace(BEGUN, waiting=waiting))
    failed = status_after(late).condition(ConditionType.FAILED)
    assert failed is not None
    assert (failed.status, failed.reason) == ("True", "StartupDeadline")
