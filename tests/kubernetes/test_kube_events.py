"""What people hear of a job by Events, and that nobody waits for them."""

import asyncio
from typing import Any

import msgspec
from aiohttp import web
from fakeapi import refused, serving
from liveapi import LiveApi
from operating import JOB, operated
from rights import is_permitted
from test_kube_reconcile import BEGUN, observed, pod, said, status_after

from holdfast.kubernetes.objects.pod import TerminationMessage
from holdfast.kubernetes.objects.resource import ObjectName
from holdfast.kubernetes.objects.status import JobStatus
from holdfast.kubernetes.policy.conditions import JobNews, news
from holdfast.kubernetes.policy.plan import Observed
from holdfast.kubernetes.tasks.job_events import BURST, EVERY_S, MOST_KNOWN, JobEvents

ME = ObjectName(namespace="research", name="llm", uid="u-1")


def told(before: JobStatus, seen: Observed) -> tuple[list[tuple[str, str]], JobStatus]:
    """Types and reasons of what a look tells, and the status that it leaves."""
    after = status_after(msgspec.structs.replace(seen, status=before))
    return [(one.type, one.reason) for one in news(before, after)], after


def test_a_job_tells_of_its_life() -> None:
    assert [one.reason for one in news(JobStatus(), BEGUN)] == ["Started"]
    trains, status = told(BEGUN, observed())
    assert trains == []
    lost = said("n0", "n2", incidents=1, open_incidents=1, last_incident="incident 1 on llm-n1")
    assert told(status, observed(said=lost))[0] == [("Warning", "Incident")]
    status = told(status, observed(said=lost))[1]
    assert told(status, observed(said=lost))[0] == [], "once"
    healed = said("n0", "n2", "n3", incidents=1, open_incidents=0, last_incident="incident 1 on llm-n1")
    words, status = told(status, observed(said=healed))
    assert words == [("Normal", "Recovered")]
    words, status = told(status, observed(said=healed, spec={"spec__runPolicy": {"suspend": True}}))
    assert words == [("Normal", "Stopping")]


def test_an_incident_that_was_over_before_anybody_looked_is_told_with_its_end() -> None:
    status = told(BEGUN, observed())[1]
    over = said("n0", "n1", "n2", incidents=2, open_incidents=0, last_incident="incident 2 on llm-n1")
    words = list(news(status, status_after(observed(status=status, said=over))))
    assert [one.reason for one in words] == ["Incident", "Recovered"]
    assert words[0].text == "2 incidents, the last: incident 2 on llm-n1"
    assert words[1].text == "incident 2 on llm-n1 is over: full strength again, at step 7"


def test_what_keeps_a_job_from_its_start_is_told_in_the_words_of_the_kubelet_and_the_server() -> None:
    image = pod("n0", phase="Pending", ready=False, waits="ErrImagePull: no such host")
    words = told(BEGUN, observed(pods=(pod("c1"), image), said=None))[0]
    assert words == [("Warning", "CannotStart")]
    head = pod("c1", phase="Pending", ready=False, waits="ErrImagePull: no such host")
    assert ("Warning", "CannotStart") in told(BEGUN, observed(pods=(head,), said=None))[0]
    full = pod("n0", phase="Pending", ready=False, machine=None, unschedulable=True, waits="0/4 nodes")
    assert ("Warning", "Unschedulable") in told(BEGUN, observed(pods=(full,), said=None))[0]
    quota = observed(refused="llm-n1: exceeded quota: pods=2", said=None)
    (first, *_) = news(BEGUN, status_after(quota))
    assert (first.reason, first.text) == ("PodRejected", "llm-n1: exceeded quota: pods=2")


def test_the_end_of_a_job_is_told_once_whoever_asked_for_it() -> None:
    status = told(BEGUN, observed())[1]
    for termination_message, wanted in (
        (TerminationMessage(outcome="finished"), ("Normal", "Finished")),
        (TerminationMessage(outcome="stopped", reason="asked for"), ("Normal", "Stopped")),
        (TerminationMessage(outcome="failed", reason="ValueError"), ("Warning", "Failed")),
    ):
        ended = observed(
            pods=(pod("c1", phase="Succeeded", termination_message=termination_message),), said=None
        )
        words, after = told(status, ended)
        assert words == [wanted]
        assert told(after, ended)[0] == []


def test_a_size_that_was_taken_is_told_and_one_that_was_refused_too() -> None:
    status = told(BEGUN, observed())[1]
    job = observed().job
    assert job is not None
    asking = msgspec.structs.replace(status, asking_nodes=1, asked_nodes=2)
    one = msgspec.structs.replace(job, spec=msgspec.structs.replace(job.spec, nodes=1))
    assert ("Normal", "Resized") in told(asking, observed(job=one, asked_nodes=1))[0]
    nine = msgspec.structs.replace(job, spec=msgspec.structs.replace(job.spec, nodes=9))
    refused_ = observed(job=nine, asked_nodes=9, refused_resize="too many")
    assert told(msgspec.structs.replace(asking, asking_nodes=9), refused_)[0] == [
        ("Warning", "ResizeRefused")
    ]


def test_an_operator_that_takes_over_tells_nothing_again() -> None:
    lost = observed(
        said=said("n0", "n2", incidents=3, open_incidents=1, last_incident="incident 3 on llm-n1")
    )
    status = told(BEGUN, lost)[1]
    assert list(news(status, status)) == []
    silent = observed(said=None, status=status)
    assert [one.reason for one in news(status, status_after(silent))] == []


# ------------------------------------------------------------ how they are written


class Refusing(LiveApi):
    """No Event is taken, as where the right is missing."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if "/events" in request.path:
            self.asked.append((request.method, request.path, {}, None))
            return refused(403, "Forbidden", {})
        return await super().answer(request)


def events(fake: LiveApi) -> list[dict[str, Any]]:
    return [one for path, one in fake.objects.items() if "/events/" in path]


def writing(scene: Any) -> None:
    """With Events of one job, a server and a clock that the scene sets."""
    clock = [0.0]

    async def run() -> None:
        fake = LiveApi()
        async with serving(fake) as api, asyncio.timeout(20):
            await scene(fake, JobEvents(api, ME, lambda: clock[0]), clock)

    asyncio.run(run())


def test_what_is_told_again_is_counted_in_the_event_that_is_there() -> None:
    same = JobNews("Warning", "CannotStart", "llm-n0: ErrImagePull")

    async def scene(fake: LiveApi, mine: JobEvents, clock: list[float]) -> None:
        for _ in range(3):
            mine.tell(same)
        mine.tell(JobNews("Normal", "Started", "run 1 begins"))
        await mine.close()
        found = {one["reason"]: one for one in events(fake)}
        assert {reason: one["count"] for reason, one in found.items()} == {"CannotStart": 3, "Started": 1}
        assert found["CannotStart"]["involvedObject"]["uid"] == "u-1"
        assert is_permitted("POST", "/api/v1/namespaces/research/events", {})
        assert is_permitted("PATCH", "/api/v1/namespaces/research/events/llm.1", {})
        # The API server keeps an Event for an hour.
        for path in [path for path in fake.objects if "/events/" in path]:
            await fake.remove(path)
        mine.tell(same)
        await mine.close()
        assert [(one["reason"], one["count"]) for one in events(fake)] == [("CannotStart", 1)]

    writing(scene)


def test_one_job_does_not_fill_the_cluster_with_its_events() -> None:
    async def scene(fake: LiveApi, mine: JobEvents, clock: list[float]) -> None:
        for number in range(200):
            mine.tell(JobNews("Warning", "Incident", f"incident {number}"))
        await mine.close()
        assert len(events(fake)) == BURST
        clock[0] += EVERY_S
        for number in range(200, 210):
            mine.tell(JobNews("Warning", "Incident", f"incident {number}"))
        await mine.close()
        assert [one["message"] for one in events(fake)][BURST:] == ["incident 200"]
        # What is remembered of them is bounded, too.
        for number in range(2 * MOST_KNOWN):
            clock[0] += EVERY_S
            mine.tell(JobNews("Warning", "Incident", f"later {number}"))
            await mine.close()
        assert len(mine._known) == MOST_KNOWN

    writing(scene)


def test_a_job_goes_on_where_no_event_is_taken() -> None:
    fake = Refusing()

    async def scene(fake: LiveApi, restart: Any) -> None:
        await fake.until(lambda: fake.named("pods") == {"llm-c1", "llm-n0", "llm-n1", "llm-n2"})
        await fake.until(lambda: fake.objects[JOB].get("status", {}).get("state") == "Starting")
        fake.objects[JOB]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        await fake.put(JOB, fake.objects[JOB])
        await fake.until(lambda: JOB not in fake.objects)

    operated(scene, fake)
    assert [path for _, path, _, _ in fake.asked if "/events" in path], "it was tried"


def test_an_operator_tells_what_it_has_written_down() -> None:
    async def scene(fake: LiveApi, restart: Any) -> None:
        await fake.until(lambda: [one["reason"] for one in events(fake)] == ["Started"])
        await restart()
        await fake.put(
            f"{JOB.rpartition('/')[0]}/other",
            {"metadata": {"uid": "u-9", "name": "other", "namespace": "research"}, "spec": {}},
            "ADDED",
        )
        await fake.until(lambda: any(one["reason"] == "InvalidSpec" for one in events(fake)))
        assert [one["reason"] for one in events(fake)].count("Started") == 1

    operated(scene)
