"""The operator's edge: over HTTP with an API server, and with a real coordinator."""

import asyncio
import importlib.util
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from fakeagents import serving as coordinating
from fakeapi import serving as api_of
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonpatch import Refused, patched
from kubejobs import job
from liveapi import LiveApi
from operating import JOB, PODS, operated
from rights import is_permitted, objects
from test_kube_reading import pod as raw_pod

from holdfast.kubernetes.objects.status import (
    ConditionType,
    CoordinatorSeen,
    JobStatus,
    SavedState,
    status_patch,
    written,
)
from holdfast.kubernetes.policy.plan import DeletePod, FindPod, LabelPod, Observed, Plan
from holdfast.kubernetes.policy.reconcile import reconcile
from holdfast.kubernetes.tasks import job_task
from holdfast.kubernetes.tasks.coordinator_link import CoordinatorConnection, RefusedByCoordinator, Silent
from holdfast.kubernetes.tasks.expectations import Expectations
from holdfast.kubernetes.tasks.job_objects import JobObjects, JobPods
from holdfast.protocol.engine_orders import OrderDone, ReleaseNode
from holdfast.protocol.network.lookup import FolderLookup


def test_what_the_operator_is_not_for_is_not_its_right() -> None:
    secrets = "/api/v1/namespaces/research/secrets"
    assert not is_permitted("GET", secrets, {})
    assert not is_permitted("GET", secrets, {"watch": "true"})
    assert not is_permitted("PATCH", f"{secrets}/llm-holdfast", {})
    assert not is_permitted("DELETE", "/api/v1/nodes/m1", {})
    assert not is_permitted("POST", "/api/v1/namespaces/research/pods/llm-n0/exec", {})
    assert is_permitted("DELETE", f"{secrets}/llm-holdfast", {})
    (container,) = next(x for x in objects() if x["kind"] == "Deployment")["spec"]["template"]["spec"][
        "containers"
    ]
    assert importlib.util.find_spec(container["command"][-1]) is not None


def test_a_part_of_the_status_of_which_nothing_is_known_is_not_written() -> None:
    """A real API server makes it null, and refuses the whole."""
    known = JobStatus(state="Running", saved=SavedState(snapshot="step 7"), coordinator=CoordinatorSeen())
    assert written(known) == {"state": "Running", "saved": {"snapshot": "step 7"}}
    assert written(msgspec.structs.replace(known, saved=SavedState())) == {"state": "Running"}


ALL = {"llm-c1", "llm-n0", "llm-n1", "llm-n2"}


def test_a_new_job_gets_its_objects_and_says_so() -> None:
    async def scene(fake: LiveApi, restart: Any) -> None:
        await fake.until(lambda: fake.named("pods") == ALL)
        await fake.until(lambda: fake.objects[JOB].get("status", {}).get("state") == "Starting")
        assert fake.named("secrets") == fake.named("configmaps") == {"llm-holdfast"}
        assert fake.named("services") == {"llm-coordinator"}
        status = fake.objects[JOB]["status"]
        assert (status["run"], status["term"], status["nextNumber"]) == (1, 1, 3)
        assert fake.objects[JOB]["metadata"]["finalizers"] == ["holdfast.dev/save"]
        assert all(body["metadata"].get("uid") for path, body in fake.objects.items() if path != JOB)

    operated(scene)


def test_a_pod_that_is_gone_is_replaced_under_a_new_number_by_any_operator() -> None:
    async def scene(fake: LiveApi, restart: Any) -> None:
        await fake.until(lambda: fake.named("pods") == ALL)
        await fake.remove(f"{PODS}/llm-n1")
        await fake.until(lambda: fake.named("pods") == {"llm-c1", "llm-n0", "llm-n2", "llm-n3"})
        await restart()
        await fake.remove(f"{PODS}/llm-n0")
        await fake.remove(f"{PODS}/llm-c1")
        await fake.until(lambda: fake.named("pods") == {"llm-c2", "llm-n2", "llm-n3", "llm-n4"})
        service = f"{PODS.removesuffix('pods')}services/llm-coordinator"
        await fake.until(lambda: fake.objects[service]["spec"]["selector"]["holdfast.dev/term"] == "2")
        assert len(set(fake.made)) == len(fake.made), "no name was made twice"

    operated(scene)


BESIDE = f"{PODS.removesuffix('pods')}"
"""Where the job's other objects are."""


@pytest.mark.parametrize("lost", ["n1", "c1"])
def test_what_somebody_deletes_beside_the_pods_is_there_for_the_next_ones(
    lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same token as before: the pods that run have no other."""
    monkeypatch.setattr(JobObjects, "SURE_S", 0.0)

    async def scene(fake: LiveApi, restart: Any) -> None:
        await fake.until(lambda: fake.named("pods") == ALL)
        others = (JOB, f"{PODS}/", f"{BESIDE}events/")
        beside = [path for path in fake.objects if not path.startswith(others)]
        assert len(beside) == 5
        secret = f"{BESIDE}secrets/llm-holdfast"
        token = fake.objects[secret]["data"]
        for path in beside:
            await fake.remove(path)
        await fake.remove(f"{PODS}/llm-{lost}")
        service = f"{BESIDE}services/llm-coordinator"
        term = "2" if lost == "c1" else "1"
        await fake.until(lambda: len(fake.named("pods")) == len(ALL) and set(beside) <= set(fake.objects))
        await fake.until(lambda: fake.objects[service]["spec"]["selector"]["holdfast.dev/term"] == term)
        assert fake.objects[secret]["data"] == token

    operated(scene)


def test_a_pod_whose_creation_was_not_answered_is_not_made_again() -> None:
    async def scene(fake: LiveApi, restart: Any) -> None:
        fake.unanswered = {f"{PODS}/llm-n0", f"{PODS}/llm-n2"}
        await fake.until(lambda: fake.named("pods") == ALL)
        await fake.until(lambda: fake.objects[JOB].get("status", {}).get("state") == "Starting")
        assert sorted(fake.made) == sorted(ALL)

    operated(scene)


def test_a_pod_that_has_a_machine_by_now_is_not_deleted_as_one_that_waits() -> None:
    async def run() -> None:
        fake, expected = LiveApi(), Expectations("llm")
        path = f"{PODS}/llm-n3"
        await fake.put(path, raw_pod(phase="Pending") | {"spec": {}}, "ADDED")
        async with api_of(fake) as api:
            pods = JobPods(api, "llm", "research", "u-1", expected, lambda: None)
            await pods.find(FindPod("llm-n3"))
            (waits,) = expected.pods.all
            await fake.put(path, raw_pod())
            delete = DeletePod(name="llm-n3", uid="p-1", reason="it avoids m1", version=waits.version)
            await pods.delete(delete)
            assert path in fake.objects
            (seen,) = expected.pods.all
            assert (seen.machine, seen.stays) == ("m1", True)
            await pods.delete(msgspec.structs.replace(delete, version=seen.version))
            assert path not in fake.objects

    asyncio.run(run())


def test_a_pod_of_another_uid_is_not_changed_and_the_one_that_was_meant_is_gone() -> None:
    """A patch with another object's uid is refused with 422: asked again, it would be refused for ever."""

    async def run() -> None:
        fake, expected = LiveApi(), Expectations("llm")
        path = f"{PODS}/llm-n3"
        await fake.put(path, raw_pod(), "ADDED")
        async with api_of(fake) as api:
            pods = JobPods(api, "llm", "research", "u-1", expected, lambda: None)
            await pods.find(FindPod("llm-n3"))
            other = raw_pod()
            other["metadata"] = {**other["metadata"], "uid": "p-2"}
            await fake.put(path, other)
            await pods.label(LabelPod(name="llm-n3", uid="p-1"), {"a": "b"})
            assert "a" not in fake.objects[path]["metadata"].get("labels", {})
            assert expected.pods.all == ()

    asyncio.run(run())


def test_a_job_that_cannot_work_gets_nothing_but_words() -> None:
    async def scene(fake: LiveApi, restart: Any) -> None:
        await fake.until(lambda: "status" in fake.objects[JOB])
        (accepted,) = fake.objects[JOB]["status"]["conditions"]
        assert (accepted["status"], accepted["reason"]) == ("False", "InvalidSpec")
        assert accepted["message"].startswith("spec.minNodes: 9; accepted: at most nodes")
        assert set(fake.objects) == {JOB}

    operated(scene, spec__minNodes=9)


def test_what_the_server_refuses_is_told_in_its_words_and_tried_again() -> None:
    async def scene(fake: LiveApi, restart: Any) -> None:
        def accepted() -> dict[str, Any]:
            conditions = fake.objects[JOB].get("status", {}).get("conditions", [{}])
            return dict(conditions[0])

        fake.quota = 2
        await fake.until(lambda: accepted().get("reason") == "PodRejected")
        assert "Forbidden: in its own words" in accepted()["message"]
        assert len(fake.named("pods")) == 2
        fake.quota = None
        await fake.until(lambda: fake.named("pods") == ALL)
        await fake.until(lambda: accepted().get("reason") == "Valid")

    operated(scene)


def test_a_job_is_suspended_resumed_and_deleted() -> None:
    async def change(fake: LiveApi, **spec: Any) -> None:
        there = fake.objects[JOB]
        await fake.put(JOB, {**there, "spec": {**there["spec"], **spec}})

    async def scene(fake: LiveApi, restart: Any) -> None:
        await fake.until(lambda: fake.named("pods") == ALL)
        await change(fake, runPolicy={"suspend": True})
        await fake.until(lambda: not fake.named("pods"))
        await fake.until(lambda: fake.objects[JOB]["status"]["state"] == "Suspended")
        await change(fake, runPolicy={"suspend": False}, spares=0)
        # Another run: higher numbers, a higher term, and the size that the object says now.
        await fake.until(lambda: fake.named("pods") == {"llm-c2", "llm-n3", "llm-n4"})
        there = fake.objects[JOB]
        there["metadata"]["deletionTimestamp"] = "2026-11-22T09:00:00Z"
        await fake.put(JOB, there)
        await fake.until(lambda: JOB not in fake.objects)
        assert not fake.named("pods")

    operated(scene)


def test_a_job_of_the_same_name_takes_nothing_of_the_one_before() -> None:
    """Its pods and its Secret are still there: the garbage collector and the kubelets need their time."""
    secret = f"{PODS.removesuffix('pods')}secrets/llm-holdfast"

    async def scene(fake: LiveApi, restart: Any) -> None:
        await fake.until(lambda: fake.named("pods") == ALL)
        tokens = [fake.objects[secret]["data"]]
        await fake.remove(JOB)
        await fake.put(JOB, job(spec__nodes=1, metadata__uid="u-2"), "ADDED")
        # It waits for the Secret, which is not its own.
        await fake.until(lambda: fake.objects[JOB].get("status", {}).get("run") == 1)
        assert fake.named("pods") == ALL
        for path in list(fake.objects):
            if path != JOB and "/namespaces/research/" in path and "/pods/" not in path:
                await fake.remove(path)
        # llm-c1 and llm-n0 have names of the one before: other numbers are free.
        await fake.until(lambda: fake.named("pods") == ALL | {"llm-c2", "llm-n3"})
        tokens.append(fake.objects[secret]["data"])
        assert tokens[0] != tokens[1]
        owners = {
            name: fake.objects[f"{PODS}/{name}"]["metadata"]["ownerReferences"][0]["uid"]
            for name in fake.named("pods")
        }
        assert {name for name, uid in owners.items() if uid == "u-2"} == {"llm-c2", "llm-n3"}

    operated(scene)


class Labelled(LiveApi):
    """Somebody labels the job's object, so many times, whenever a status is on its way. has_status: once it has one."""

    def __init__(self, times: int, has_status: bool) -> None:
        super().__init__()
        self.times, self.has_status = times, has_status
        self.refused: list[int] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        writes = request.path == f"{JOB}/status"
        if writes and ("status" in self.objects[JOB]) is self.has_status and self.times:
            self.times -= 1
            there = self.objects[JOB]
            there["metadata"].setdefault("labels", {})["storm"] = str(self.times)
            await self.put(JOB, there)
        answer = await super().answer(request)
        if writes and answer.status >= 400:
            self.refused.append(answer.status)
        return answer


def test_a_status_is_written_while_others_label_the_object() -> None:
    fake = Labelled(20, has_status=True)

    async def scene(_: LiveApi, restart: Any) -> None:
        await fake.until(lambda: fake.objects[JOB].get("status", {}).get("state") == "Starting")
        assert fake.times < 20
        assert fake.refused == []

    operated(scene, fake)


def test_a_first_status_is_written_again_while_others_label_the_object(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At once, with what was decided: a whole look would take longer than until the next label."""
    fake, decided = Labelled(2, has_status=False), list[int]()

    def noted(seen: Observed) -> Plan:
        decided.append(len(fake.asked))
        return reconcile(seen)

    monkeypatch.setattr(job_task, "reconcile", noted)

    async def scene(_: LiveApi, restart: Any) -> None:
        await fake.until(lambda: fake.objects[JOB].get("status", {}).get("state") == "Starting")
        write = "PATCH /status"
        asked = [f"{method} {path.removeprefix(JOB)}" for method, path, _, _ in fake.asked]
        first, second, third, *_ = (at for at, one in enumerate(asked) if one == write)
        assert not [at for at in decided if first < at <= third]
        assert "GET " in asked[first:second]
        assert "GET " in asked[second:third]
        assert fake.refused == [422, 422]

    operated(scene, fake)


def test_a_condition_of_somebody_else_stays_and_causes_no_writes() -> None:
    raw = job(metadata__resourceVersion="7")
    moment = "2026-11-25T09:00:00Z"
    theirs = {"type": "Theirs", "status": "True", "reason": "So", "message": "", "lastTransitionTime": moment}
    raw["status"] = {"state": "Running", "conditions": [theirs]}
    known = msgspec.convert(raw["status"], JobStatus)
    assert written(known) == written(JobStatus(state="Running"))
    patch = status_patch(raw, JobStatus(state="Stopping"))
    after = patched(raw, json.dumps(patch))["status"]
    assert after == {"state": "Stopping", "revision": 1, "conditions": [theirs]}


TEXTS = st.text(st.sampled_from('ab<>&\u2028é\\"\n'), max_size=8)
CONDITIONS = st.lists(
    st.tuples(st.sampled_from([*ConditionType, "Theirs", "Other"]), TEXTS), unique_by=lambda one: one[0]
)


@settings(max_examples=200, deadline=None)
@given(CONDITIONS, CONDITIONS, TEXTS, TEXTS, st.sampled_from([None, 0, 7]))
def test_whatever_a_status_says_the_next_one_can_be_written(before, after, reason, next_reason, revision):
    """Bytes are compared as the API server does; what is somebody else's stays, in its place."""
    moment = "2026-11-25T09:00:00Z"

    def conditions(of):
        return [
            {"type": str(t), "status": "True", "reason": "So", "message": m, "lastTransitionTime": moment}
            for t, m in of
        ]

    raw = job(metadata__resourceVersion="7")
    raw["status"] = {"state": "Running", "reason": reason, "conditions": conditions(before)}
    if revision is not None:
        raw["status"]["revision"] = revision
    ours = msgspec.convert({"reason": next_reason, "conditions": conditions(after)}, JobStatus)
    said = patched(raw, json.dumps(status_patch(raw, ours)))["status"]
    names = {str(one) for one in ConditionType}
    by_type = lambda found: sorted((c["type"], c["message"]) for c in found)  # noqa: E731
    assert by_type(c for c in said["conditions"] if c["type"] in names) == by_type(
        c for c in conditions(after) if c["type"] in names
    )
    assert [c for c in said["conditions"] if c["type"] not in names] == [
        c for c in raw["status"]["conditions"] if c["type"] not in names
    ]
    assert said.get("reason") == next_reason
    assert "state" not in said
    assert said["revision"] == (revision or 0) + 1
    # Whoever decided from the same status comes too late.
    late = raw | {"status": said, "metadata": raw["metadata"] | {"resourceVersion": "8"}}
    with pytest.raises(Refused):
        patched(late, json.dumps(status_patch(raw, ours)))


class LateWatch(LiveApi):
    """`asked_for`: each time that somebody reads the job's object."""

    def __init__(self) -> None:
        super().__init__()
        self.asked_for: asyncio.Queue[str] = asyncio.Queue()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.method == "GET" and request.path == JOB:
            self.asked_for.put_nowait(self.objects[JOB]["metadata"]["uid"])
        return await super().answer(request)


def test_a_job_that_is_made_again_before_the_watch_says_so_is_not_taken_for_the_one_before() -> None:
    """A write of the first one's task is refused, and the object that it reads then is the second one."""
    fake = LateWatch()

    async def scene(_: LiveApi, restart: Any) -> None:
        await fake.until(lambda: fake.objects[JOB].get("status", {}).get("state") == "Starting")
        fake.version += 1
        second = job(spec__nodes=1, metadata__uid="u-2", metadata__resourceVersion=str(fake.version))
        fake.objects[JOB] = second
        # A loss, so that the first one's task has something to write.
        await fake.remove(f"{PODS}/llm-n0")
        while await fake.asked_for.get() != "u-2":
            pass
        # All that another job needs: more requests than the first one's task would send for the second one.
        other = job(spec__nodes=1, metadata__uid="u-3", metadata__name="other")
        await fake.put(JOB.replace("llm", "other"), other, "ADDED")
        await fake.until(lambda: fake.named("pods") >= {"other-c1", "other-n0"})
        assert fake.objects[JOB] is second

    operated(scene, fake)


def job_folder(folder: Path) -> Path:
    """Of the one job that a coordinator was started for in there."""
    (endpoint,) = folder.rglob("coordinator.json")
    return endpoint.parent


def token_of(folder: Path) -> str:
    return (folder / "token").read_text().strip()


def linked(
    folder: Path,
    scene: Callable[[Any, CoordinatorConnection], Awaitable[None]],
    changed: Callable[[], None] = lambda: None,
) -> None:
    async def run() -> None:
        async with coordinating(folder) as plane:
            here = job_folder(folder)
            link = CoordinatorConnection(
                host="127.0.0.1",
                term=0,
                token=token_of(here),
                lookup=FolderLookup(here),
                changed=changed,
                detection_s=2.0,
            )
            async with asyncio.timeout(30):
                await scene(plane, link)

    asyncio.run(run())


def test_what_a_real_coordinator_says(tmp_path: Path) -> None:
    async def scene(plane: Any, link: CoordinatorConnection) -> None:
        _, second = await plane.pair()
        said = await link.ask()
        assert (said.phase, said.wanted, said.outcome) == ("running", 2, None)
        assert {name: (one.alive, one.trains) for name, one in said.nodes.items()} == {
            "n0": (True, True),
            "n1": (True, True),
        }
        await second.leave()
        await plane.event("node-lost")
        said = await link.ask()
        (release,) = [order for order in said.orders if isinstance(order, ReleaseNode)]
        assert release.node == "n1"
        assert not said.nodes["n1"].alive
        assert said.incidents == said.open_incidents == 1
        assert said.last_incident is not None
        await link.tell(OrderDone(release.order_id))
        assert release not in (await link.ask()).orders

    linked(tmp_path, scene)


def test_an_order_is_heard_at_once(tmp_path: Path) -> None:
    """And not at the operator's next look, seconds later: a lost node's pod runs on until then."""
    changed = asyncio.Event()

    async def scene(plane: Any, link: CoordinatorConnection) -> None:
        _, second = await plane.pair()
        listening = asyncio.create_task(link.listen())
        await changed.wait()  # it is reached
        changed.clear()
        await second.leave()
        await changed.wait()
        assert any(isinstance(order, ReleaseNode) for order in (await link.ask()).orders)
        listening.cancel()

    linked(tmp_path, scene, changed.set)


def test_a_size_that_a_coordinator_does_not_take_is_told_in_its_words(tmp_path: Path) -> None:
    async def scene(plane: Any, link: CoordinatorConnection) -> None:
        with pytest.raises(RefusedByCoordinator, match="cannot resize to 99 nodes"):
            await link.resize(99)

    linked(tmp_path, scene)


def test_a_coordinator_of_another_term_or_token_is_not_believed(tmp_path: Path) -> None:
    async def scene(plane: Any, link: CoordinatorConnection) -> None:
        given: dict[str, Any] = {
            "host": "127.0.0.1",
            "term": 0,
            "token": "another",
            "lookup": FolderLookup(job_folder(tmp_path)),
            "changed": lambda: None,
            "detection_s": 2.0,
        }
        with pytest.raises(Silent):
            await CoordinatorConnection(**given).ask()
        with pytest.raises(Silent, match="no coordinator of term 3"):
            await CoordinatorConnection(**(given | {"term": 3})).ask()

    linked(tmp_path, scene)


def test_nothing_is_asked_for_again_in_a_namespace_that_is_being_deleted() -> None:
    """Its controller takes the pods first. Another one for each of them is refused, and so is everything new."""

    async def scene(fake: LiveApi, restart: Any) -> None:
        await fake.until(lambda: fake.named("pods") == ALL)
        fake.ending.add("research")
        before = len(fake.asked)
        for name, next_number in (("llm-n0", 4), ("llm-n1", 5), ("llm-n2", 6)):
            await fake.remove(f"{PODS}/{name}")
            # Each loss is looked at, and what is to be made in its place is numbered.
            await fake.until(lambda wanted=next_number: fake.objects[JOB]["status"]["nextNumber"] == wanted)
        (said,) = (c for c in fake.objects[JOB]["status"]["conditions"] if c["type"] == "Accepted")
        assert "because it is being terminated" in said["message"]
        fake.objects[JOB]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        await fake.put(JOB, fake.objects[JOB])
        await fake.remove(f"{PODS}/llm-c1")
        await fake.until(lambda: JOB not in fake.objects)
        posted = [path for method, path, _, _ in fake.asked[before:] if method == "POST"]
        assert sorted(posted) == [f"{BESIDE}events", PODS]

    operated(scene)
