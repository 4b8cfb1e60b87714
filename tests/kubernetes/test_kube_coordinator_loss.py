"""When a coordinator counts as lost: what the operator knows, and what it asks the nodes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
import pytest
from operating import Nobody
from test_kube_reconcile import BEGUN, condition, observed, pod, status_after

from holdfast.agent.coordinator_link import show_ready
from holdfast.kubernetes.objects import render
from holdfast.kubernetes.objects.machine import MachineSeen
from holdfast.kubernetes.objects.pod import PodSeen
from holdfast.kubernetes.objects.status import ConditionType, CoordinatorSeen, JobStatus
from holdfast.kubernetes.policy.losses import (
    LAST_WORD_S,
    START_S,
    UNHEARD_S,
    VOTERS,
    loss_look_again_s,
    voters,
    why_lost,
)
from holdfast.kubernetes.policy.plan import AskStop, DeletePod, MakeCoordinator, Number, Observed
from holdfast.kubernetes.policy.reconcile import reconcile
from holdfast.kubernetes.tasks import coordinator_link
from holdfast.kubernetes.tasks.coordinator_link import Silent, ask_nodes
from holdfast.kubernetes.tasks.expectations import Expectations
from holdfast.protocol.network.endpoint import Hearing, Whereabouts

VOTED = "most nodes have lost it"
PATIENCE_S = 4.0
"""Twice the default time to detect a lost node."""


def heard(restarts: int | None = 0, pod: str = "llm-c1") -> JobStatus:
    """What was written when the coordinator last answered."""
    return msgspec.structs.replace(BEGUN, coordinator=CoordinatorSeen(pod=pod, restarts=restarts))


def silent(*votes: Hearing | None, **fields: Any) -> Observed:
    """A coordinator that does not answer, and what its nodes say."""
    hearings = {f"llm-n{number}": vote for number, vote in enumerate(votes)}
    given = {"said": None, "hearings": hearings, "status": heard(), "silent_s": 1000.0}
    return observed(**(given | fields))


def missing(seconds: float, term: int = 1) -> Hearing:
    return Hearing(term=term, missing_s=seconds)


HEARS = Hearing(term=1, missing_s=None)
LOST = missing(PATIENCE_S)


# ------------------------------------------------------------ the vote


@pytest.mark.parametrize(
    ("votes", "is_lost"),
    [
        ((LOST, LOST, LOST), True),
        ((LOST, LOST, HEARS), True),
        ((LOST, LOST, None), True),
        ((LOST, HEARS, HEARS), False),
        ((LOST, None, None), False),
        ((LOST, HEARS), False),  # half
        ((missing(PATIENCE_S - 0.1),) * 3, False),
        ((), False),
    ],
)
def test_more_than_half_of_those_that_were_asked_have_lost_it(
    votes: tuple[Hearing | None, ...], is_lost: bool
) -> None:
    assert why_lost(silent(*votes)) == (VOTED if is_lost else None)


@pytest.mark.parametrize(("detection_s", "patience_s"), [(0.25, 4.0), (2, 4.0), (10, 20.0)])
def test_a_process_that_dies_has_time_to_start_again(detection_s: float, patience_s: float) -> None:
    spec = {"spec__timing__detectionSeconds": detection_s}
    assert why_lost(silent(missing(patience_s), spec=spec)) == VOTED
    assert why_lost(silent(missing(patience_s - 0.1), spec=spec)) is None


@pytest.mark.parametrize(
    ("votes", "left_s"),
    [
        ((missing(1.0), missing(2.0), missing(3.0)), 2.0),  # of three two have to
        ((missing(1.0), missing(2.0), HEARS), 3.0),
        ((missing(1.0), HEARS, HEARS), None),
        ((missing(1.0), missing(3.5)), 3.0),
        ((missing(1.0), None), None),
        ((LOST, LOST), None),  # now
        ((missing(10.0, term=0),) * 3, START_S - 10.0),
        ((), None),
    ],
)
def test_it_is_looked_at_again_when_most_may_have_lost_it(
    votes: tuple[Hearing | None, ...], left_s: float | None
) -> None:
    seen = silent(*votes)
    assert loss_look_again_s(seen) == left_s
    again_s = reconcile(seen).look_again_s
    assert left_s is None or (again_s is not None and again_s <= left_s + 1e-6)
    said = msgspec.structs.replace(observed(), hearings=seen.hearings)
    assert loss_look_again_s(said) is None


def test_one_that_answers_the_operator_is_not_lost() -> None:
    assert why_lost(msgspec.structs.replace(observed(), hearings={"llm-n0": LOST})) is None


def test_nodes_beside_it_do_not_count_where_they_are_silent() -> None:
    beside = pod("n2", machine="m-c1")
    pods = (pod("c1"), pod("n0"), pod("n1"), beside)
    assert why_lost(silent(LOST, HEARS, None, pods=pods)) is None
    assert why_lost(silent(LOST, LOST, None, pods=pods)) == VOTED
    # Of two others one says nothing. With the third, which stands beside the coordinator and answers, two of three miss it.
    assert why_lost(silent(LOST, None, None, pods=pods)) is None
    assert why_lost(silent(LOST, None, LOST, pods=pods)) == VOTED
    # A whole job on the coordinator's machine.
    assert why_lost(silent(LOST, pods=(pod("c1"), pod("n0", machine="m-c1")))) == VOTED


def test_a_container_that_starts_again_in_its_place_has_time_for_it() -> None:
    again = pod("c1", restarts=1)
    nodes = (pod("n0"), pod("n1"), pod("n2"))
    assert why_lost(silent(LOST, LOST, LOST, pods=(again, *nodes))) is None
    assert why_lost(silent(*[missing(START_S)] * 3, pods=(again, *nodes))) == VOTED
    # It answered since it was started again.
    assert why_lost(silent(LOST, LOST, LOST, pods=(again, *nodes), status=heard(1))) == VOTED
    # It never answered, or that was another pod.
    for status in (heard(None), heard(0, "llm-c0"), BEGUN):
        assert why_lost(silent(LOST, LOST, LOST, status=status)) is None
        assert why_lost(silent(*[missing(START_S)] * 3, status=status)) == VOTED


def test_what_was_heard_is_in_the_status_for_the_next_operator() -> None:
    """The one that heard it may be lost with it, on the same machine."""
    nodes = (pod("n0"), pod("n1"), pod("n2"))
    pods = (pod("c1", restarts=1), *nodes)
    written = status_after(observed(pods=pods))
    assert written.coordinator == CoordinatorSeen(pod="llm-c1", restarts=1)
    assert why_lost(silent(LOST, LOST, LOST, pods=pods, status=written)) == VOTED
    # It stays while nobody answers, also when the container is started anew.
    later = (pod("c1", restarts=2), *nodes)
    assert (
        status_after(silent(LOST, HEARS, HEARS, pods=later, status=written)).coordinator
        == written.coordinator
    )
    # Of a pod that has not answered yet nothing is known.
    successor = (pod("c2"), *nodes)
    after = status_after(silent(HEARS, HEARS, HEARS, pods=successor, status=written))
    assert after.coordinator == CoordinatorSeen(pod="llm-c2")


def test_nodes_that_miss_an_earlier_term_give_the_new_one_time() -> None:
    earlier = missing(1000.0, term=0)
    assert why_lost(silent(earlier, earlier, earlier, silent_s=START_S - 1)) is None
    assert why_lost(silent(earlier, earlier, earlier, silent_s=START_S)) == VOTED
    assert why_lost(silent(*[missing(START_S - 1, term=0)] * 3)) is None


@pytest.mark.parametrize(
    "fields", [{"waits": "CrashLoopBackOff: back-off 5m0s"}, {"phase": "Pending"}, {"deleting": True}]
)
def test_what_does_not_run_is_the_kubelets(fields: dict[str, Any]) -> None:
    pods = (pod("c1", **fields), pod("n0"), pod("n1"), pod("n2"))
    assert why_lost(silent(LOST, LOST, LOST, pods=pods)) is None


def test_a_machine_that_kubernetes_does_not_reach_either() -> None:
    machines = {"m-c1": MachineSeen(name="m-c1", ready=False)}
    assert why_lost(silent(machines=machines)) == "its machine does not answer"
    # It was bound there when the machine had no power already.
    never = (pod("c1", phase="Pending", ready=False), pod("n0"), pod("n1"), pod("n2"))
    assert why_lost(silent(machines=machines, pods=never)) == "its machine does not answer"
    assert why_lost(silent(pods=never)) is None
    assert why_lost(observed(machines=machines)) is None


def test_one_that_nobody_has_ever_reached() -> None:
    starting = tuple(pod(name, ready=False) for name in ("n0", "n1", "n2"))
    alone = (pod("c1"), *starting)
    assert why_lost(silent(pods=alone, silent_s=UNHEARD_S - 1)) is None
    assert why_lost(silent(pods=alone, silent_s=UNHEARD_S)) == "nobody has reached it"
    # One node has joined, so somebody reaches it.
    assert why_lost(silent(pods=(pod("c1"), pod("n0"), *starting[1:]))) is None


@pytest.mark.parametrize(
    "fields", [{"phase": "Pending"}, {"waits": "CrashLoopBackOff"}, {"phase": "Succeeded"}, None]
)
def test_one_that_no_node_has_tried_to_reach(fields: dict[str, Any] | None) -> None:
    """The job may be over, and its last word on its way."""
    nodes = () if fields is None else tuple(pod(name, ready=False, **fields) for name in ("n0", "n1"))
    assert why_lost(silent(pods=(pod("c1"), *nodes), silent_s=LAST_WORD_S - 1)) is None
    assert why_lost(silent(pods=(pod("c1"), *nodes), silent_s=LAST_WORD_S)) == "nobody has reached it"


def test_who_is_asked() -> None:
    asked = pod("n0", address="10.0.0.2")
    others = (
        pod("n1"),  # without an address
        pod("n2", address="10.0.0.3", ready=False),
        pod("n3", address="10.0.0.4", deleting=True),
        msgspec.structs.replace(pod("n4", address="10.0.0.5"), run=2),
    )
    assert voters((pod("c1", address="10.0.0.1"), asked, *others), 1) == [asked]


# ------------------------------------------------------------ what follows


def test_its_successor_is_made_and_rather_elsewhere() -> None:
    seen = silent(LOST, LOST, HEARS)
    plan = reconcile(seen)
    deletion = DeletePod(name="llm-c1", uid="uid-c1", reason=f"it is lost: {VOTED}", grace_s=1)
    assert plan.actions == (deletion, Number(run=1, term=2, next_number=3))
    assert condition(plan.status, ConditionType.COORDINATOR_READY) == ("False", "Lost")
    after = msgspec.structs.replace(
        seen,
        status=msgspec.structs.replace(BEGUN, term=2),
        granted=frozenset({"llm-c2"}),
        pods=(pod("c1", deleting=True), *seen.pods[1:]),
        hearings={},
    )
    assert MakeCoordinator(2, frozenset({"m-c1"})) in reconcile(after).actions
    assert seen.job is not None
    spec = render.coordinator_pod(seen.job, 2, avoid={"m-c1"})["spec"]
    (term,) = spec["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert term["preference"]["matchExpressions"] == [
        {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["m-c1"]}
    ]
    assert "affinity" not in render.coordinator_pod(seen.job, 2)["spec"]


def test_a_job_that_is_deleted_has_its_state_saved_by_a_successor() -> None:
    """Also where this operator has heard of no step: its nodes had a coordinator."""
    plan = reconcile(silent(LOST, LOST, LOST, deleted_s=1_000_000.0))
    assert [type(action) for action in plan.actions] == [DeletePod, Number]
    assert plan.actions[0].name == "llm-c1"
    answers = reconcile(observed(deleted_s=1_000_000.0))
    assert any(isinstance(action, AskStop) for action in answers.actions)


def test_a_job_that_is_deleted_while_its_coordinator_may_have_started_is_waited_for() -> None:
    """A watch that is behind shows no start, and nodes that run may train already."""
    word = BEGUN.condition(ConditionType.COORDINATOR_READY)
    assert word is None, "nobody has said yet that it does not answer"
    starts = pod("c1", phase="Pending", ready=False)
    runs, waits = (pod("n0", ready=False), pod("n0", ready=False, phase="Pending", machine=None))
    deleted = {"deleted_s": 1_000_000.0, "hearings": {}}
    assert reconcile(silent(pods=(starts, runs), **deleted)).actions == ()
    gone = reconcile(silent(pods=(starts, waits), **deleted)).actions
    assert {action.name for action in gone if isinstance(action, DeletePod)} == {"llm-c1", "llm-n0"}
    # Only as they were seen.
    assert {action.version for action in gone if isinstance(action, DeletePod)} == {0}


# ------------------------------------------------------------ the question


class Agents:
    """Ports of agents, each at an address of its own."""

    def __init__(self) -> None:
        self.pods: list[PodSeen] = []
        self.port = 0
        self.told: list[Whereabouts] = []


@asynccontextmanager
async def agents(*hearings: Hearing, token: str = "secret") -> AsyncIterator[Agents]:
    made = Agents()
    joined = asyncio.Event()
    joined.set()
    tasks = []
    for number, hearing in enumerate(hearings):
        node = pod(f"n{number}", address=f"127.0.0.{number + 2}")
        made.pods.append(node)
        if made.port == 0:
            probe = await asyncio.start_server(lambda *_: None, node.address, 0)
            made.port = probe.sockets[0].getsockname()[1]
            probe.close()
            await probe.wait_closed()
        host = node.address or ""
        serving = show_ready(
            node.name, host, made.port, token, joined, lambda one=hearing: one, made.told.append
        )
        tasks.append(asyncio.create_task(serving))
    await asyncio.sleep(0)  # each has its first turn, in which it listens
    try:
        yield made
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not [one for one in threading.enumerate() if one.name == "holdfast-ready"]


def test_nodes_say_whether_they_hear_it() -> None:
    async def scene() -> None:
        async with agents(HEARS, missing(7.5)) as made:
            assert await ask_nodes(made.pods, "secret", port=made.port) == {
                "llm-n0": HEARS,
                "llm-n1": missing(7.5),
            }

    asyncio.run(scene())


def test_nodes_are_told_where_it_is_by_who_knows_the_token() -> None:
    async def scene() -> None:
        async with agents(HEARS, LOST) as made:
            next_ = pod("c2", address="10.0.0.7")
            assert await ask_nodes(made.pods, "another", next_, port=made.port) == {
                "llm-n0": None,
                "llm-n1": None,
            }
            assert made.told == []
            assert await ask_nodes(made.pods, "secret", next_, port=made.port) == {
                "llm-n0": HEARS,
                "llm-n1": LOST,
            }
            assert made.told == [Whereabouts(2, "10.0.0.7")] * 2
            # One that is to go, or has no address yet.
            for no_news in (pod("c3", address="10.0.0.8", deleting=True), pod("c3", address=None), None):
                assert await ask_nodes(made.pods, "secret", no_news, port=made.port) == {
                    "llm-n0": HEARS,
                    "llm-n1": LOST,
                }
            assert len(made.told) == 2

    asyncio.run(scene())


def test_nobody_else_is_told_and_nobody_else_is_believed() -> None:
    async def scene() -> None:
        async with agents(HEARS) as made:
            assert await ask_nodes(made.pods, "another", port=made.port) == {"llm-n0": None}
            # A stranger who passes the question on to another node of the job.
            passed_on = msgspec.structs.replace(made.pods[0], name="llm-n9")
            assert await ask_nodes([passed_on], "secret", port=made.port) == {"llm-n9": None}

    asyncio.run(scene())


def test_an_agent_that_closes_the_connection_and_one_that_is_not_there() -> None:
    async def scene() -> None:
        async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.close()

        async with await asyncio.start_server(close, "127.0.0.2", 0) as server:
            port = server.sockets[0].getsockname()[1]
            asked = [pod("n0", address="127.0.0.2"), pod("n1", address="127.0.0.3")]
            assert await ask_nodes(asked, "secret", port=port) == {"llm-n0": None, "llm-n1": None}

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("answers", "coordinator"),
    [
        pytest.param([HEARS, LOST, LOST], "m1", id="most have answered"),
        pytest.param([HEARS], "m9", id="they are on a coordinator's machine"),
    ],
)
def test_nodes_that_are_gone_do_not_hold_up_a_new_coordinator(
    monkeypatch: pytest.MonkeyPatch, answers: list[Hearing], coordinator: str
) -> None:
    monkeypatch.setattr(coordinator_link, "ANSWER_S", 3600.0)
    monkeypatch.setattr(coordinator_link, "MORE_S", 0.2)
    over = asyncio.Event()

    async def keep(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await over.wait()
        writer.close()

    async def scene() -> None:
        async with agents(*answers) as made, await asyncio.start_server(keep, "127.0.0.99", made.port):
            gone = [pod(name, address="127.0.0.99", machine="m9") for name in ("n7", "n8")]
            async with asyncio.timeout(60):
                heard = await ask_nodes([*gone, *made.pods], "secret", pod("c2"), {coordinator}, made.port)
            assert [heard[one.name] for one in made.pods] == answers
            assert [heard[one.name] for one in gone] == [None, None]
            over.set()

    asyncio.run(scene())


def test_of_many_nodes_a_few_are_asked() -> None:
    async def scene() -> None:
        async with agents(*[HEARS] * (VOTERS + 9)) as made:
            answers = await ask_nodes(made.pods, "secret", port=made.port)
            assert list(answers.values()) == [HEARS] * VOTERS

    asyncio.run(scene())


def test_the_port_takes_connections_when_the_node_has_joined() -> None:
    async def scene() -> None:
        async with agents(HEARS) as made:
            port, host = made.port, made.pods[0].address
        joined = asyncio.Event()
        ready = show_ready("llm-n0", host or "", port, "secret", joined, lambda: HEARS, lambda _: None)
        serving = asyncio.create_task(ready)
        await asyncio.sleep(0)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(host, port)
        joined.set()
        await asyncio.sleep(0)
        # As a kubelet does, which says nothing.
        _, writer = await asyncio.open_connection(host, port)
        writer.close()
        serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving

    asyncio.run(scene())


class Link:
    """A connection to a coordinator that is asked in vain."""

    host, term = "10.0.0.1", 1

    def __init__(self, **_: Any) -> None:
        self.asked, self.lost = 0, False

    async def listen(self) -> None:
        await asyncio.Event().wait()

    async def ask(self) -> None:
        self.asked += 1
        raise Silent("no answer")


def test_a_coordinator_that_is_lost_is_not_waited_for_at_each_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_link, "CoordinatorConnection", Link)

    async def scene() -> None:
        followed = coordinator_link.JobLink("llm", Expectations("llm"), lambda _: Nobody(), lambda: None)
        await followed.follow(pod("c1", address="10.0.0.1"), "secret", 2.0)
        asked = followed._link
        assert isinstance(asked, Link)
        for lost, times in ((False, 1), (False, 2), (True, 2), (True, 2), (False, 3)):
            asked.lost = lost
            assert await followed.ask() is None
            assert asked.asked == times
        # No connection can be kept to it, and yet it may answer.
        asked.lost = True
        monkeypatch.setattr(coordinator_link, "ASK_ANYWAY_S", 0.0)
        await followed.ask()
        assert asked.asked == 4
        await followed.close()

    asyncio.run(scene())
