"""The operator's connections: watches that end, servers that refuse, a Lease that changes hands."""

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from aiohttp import web
from fakeapi import FakeApi, event, serving

from holdfast.kubernetes.client.api import Api, ApiError, Backoff, NoApiAnswer, Object
from holdfast.kubernetes.client.informer import Informer
from holdfast.kubernetes.client.leader import Lease, LeaseTimes

PODS = "/api/v1/pods"
AT_ONCE = Backoff(first_s=0.0)


class Seen:
    """What an informer told, in order."""

    def __init__(self) -> None:
        self.told: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()

    def informer(self, api: Api) -> Informer:
        def tell(what: str) -> Callable[[Object], None]:
            return lambda one: self.told.put_nowait((what, one["metadata"]["name"]))

        return Informer(
            api=api,
            path=PODS,
            query={"labelSelector": "a=b"},
            on_list=lambda all_, _: self.told.put_nowait(("list", [one["metadata"]["name"] for one in all_])),
            on_change=tell("is"),
            on_gone=tell("gone"),
            backoff=AT_ONCE,
        )


def pod(name: str, version: int) -> dict[str, Any]:
    return {"metadata": {"name": name, "resourceVersion": str(version)}}


def informed(check: Callable[[FakeApi, Seen, Informer], Any]) -> None:
    async def run() -> None:
        fake, seen = FakeApi(), Seen()
        async with serving(fake) as api:
            informer = seen.informer(api)
            running = asyncio.create_task(informer.run())
            try:
                async with asyncio.timeout(20):
                    await check(fake, seen, informer)
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)

    asyncio.run(run())


def test_a_watch_goes_on_from_the_version_of_its_last_bookmark() -> None:
    async def check(fake: FakeApi, seen: Seen, informer: Informer) -> None:
        fake.objects[f"{PODS}/a"] = pod("a", 9)
        assert await seen.told.get() == ("list", ["a"])
        assert await fake.watched.get() == "10"
        fake.watches.put_nowait(
            [event("ADDED", "b", 11), event("DELETED", "a", 12), event("BOOKMARK", "", 40)]
        )
        assert [await seen.told.get() for _ in range(2)] == [("is", "b"), ("gone", "a")]
        assert await fake.watched.get() == "40"
        assert informer.restarts == 0
        assert all(query["labelSelector"] == "a=b" for _, _, query, _ in fake.asked)

    informed(check)


@pytest.mark.parametrize("within", [True, False])
def test_a_version_that_is_forgotten_makes_a_new_list(within: bool) -> None:
    async def check(fake: FakeApi, seen: Seen, informer: Informer) -> None:
        fake.objects[f"{PODS}/a"] = pod("a", 9)
        assert await seen.told.get() == ("list", ["a"])
        await fake.watched.get()
        fake.objects = {f"{PODS}/b": pod("b", 50)}
        if within:
            gone = {
                "type": "ERROR",
                "object": {"code": 410, "reason": "Expired", "message": "too old", "metadata": {}},
            }
            gone["object"]["metadata"] = {"resourceVersion": ""}  # type: ignore[index]
            fake.watches.put_nowait([gone])
        else:
            fake.spoil.append((410, "Expired", {}))
            fake.watches.put_nowait([])
        assert await seen.told.get() == ("list", ["b"])
        assert informer.restarts == 1

    informed(check)


def test_a_server_that_refuses_for_a_while_is_asked_again() -> None:
    async def check(fake: FakeApi, seen: Seen, informer: Informer) -> None:
        fake.spoil = [(500, "InternalError", {}), (429, "TooManyRequests", {"Retry-After": "0"}), (0, "", {})]
        fake.objects[f"{PODS}/a"] = pod("a", 9)
        assert await seen.told.get() == ("list", ["a"])
        assert informer.listed.is_set()

    informed(check)


def test_who_has_no_right_to_look_hears_it() -> None:
    async def run() -> None:
        fake = FakeApi()
        fake.spoil = [(403, "Forbidden", {})]
        async with serving(fake) as api:
            with pytest.raises(ApiError, match="in its own words"):
                await Seen().informer(api).run()

    asyncio.run(run())


def test_how_requests_end() -> None:
    async def run() -> None:
        fake = FakeApi()
        async with serving(fake) as api:
            await api.create(PODS, {"metadata": {"name": "a"}}, dry_run=True)
            assert fake.asked[-1][2] == {"dryRun": "All"}
            with pytest.raises(ApiError) as refused:
                await api.create(PODS, {"metadata": {"name": "a"}})
            assert (refused.value.status, refused.value.reason) == (409, "AlreadyExists")
            assert not refused.value.may_pass
            fake.spoil = [(0, "", {})] * 2  # aiohttp itself tries a request again that does no harm twice
            with pytest.raises(NoApiAnswer, match="/api/v1/pods/a"):
                await api.delete(f"{PODS}/a", "uid-1", 1)
            sent = fake.asked[-1][3]
            assert (sent["preconditions"], sent["gracePeriodSeconds"]) == ({"uid": "uid-1"}, 1)
            fake.spoil = [(503, "ServiceUnavailable", {"Retry-After": "7"})]
            with pytest.raises(ApiError) as later:
                await api.get(f"{PODS}/a")
            assert later.value.may_pass
            assert Backoff().next_s(later.value) == 7

    asyncio.run(run())


def test_a_list_of_many_pages_is_read_to_its_end() -> None:
    async def run() -> None:
        pages = iter(
            [
                {"items": [pod("a", 1)], "metadata": {"resourceVersion": "5", "continue": "next"}},
                {"items": [pod("b", 2)], "metadata": {"resourceVersion": "5"}},
            ]
        )

        class Paged(Api):
            async def request(self, method: str, path: str, query: Any = None, *_: Any, **__: Any) -> Object:
                asked.append(query)
                return next(pages)

        asked: list[Any] = []
        found, version = await Paged(None).list_all(PODS, {"a": "b"})  # type: ignore[arg-type]
        assert ([one["metadata"]["name"] for one in found], version) == (["a", "b"], "5")
        assert asked[1] == {"a": "b", "limit": "500", "continue": "next"}

    asyncio.run(run())


def test_waits_grow_and_differ() -> None:
    backoff = Backoff(first_s=1.0, most_s=8.0)
    waits = [backoff.next_s(NoApiAnswer("x")) for _ in range(6)]
    assert 1.0 <= waits[0] <= 2.0
    assert 4.0 <= waits[-1] <= 8.0
    backoff.reset()
    assert backoff.next_s(NoApiAnswer("x")) <= 2.0


QUICK = LeaseTimes(duration_s=0.5, deadline_s=0.3, every_s=0.02)


def test_one_operator_leads_and_the_next_takes_over() -> None:
    async def run() -> None:
        fake = FakeApi()
        leading: asyncio.Queue[str] = asyncio.Queue()

        async def lead(api: Api, who: str) -> None:
            async def work() -> None:
                leading.put_nowait(who)
                await asyncio.Event().wait()

            await Lease(api, "ops", "operator", who, QUICK).lead(work)

        async with asyncio.timeout(20), serving(fake) as api:
            first = asyncio.create_task(lead(api, "one"))
            assert await leading.get() == "one"
            second = asyncio.create_task(lead(api, "two"))
            # The first ends without a word; the second has it after the Lease's duration, and not before.
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            began = asyncio.get_running_loop().time()
            assert await leading.get() == "two"
            assert asyncio.get_running_loop().time() - began > QUICK.duration_s / 2
            (lease,) = fake.objects.values()
            assert (lease["spec"]["holderIdentity"], lease["spec"]["leaseTransitions"]) == ("two", 1)
            second.cancel()
            await asyncio.gather(second, return_exceptions=True)

    asyncio.run(run())


def test_a_lease_that_was_given_back_is_taken_at_once() -> None:
    async def run() -> None:
        fake = FakeApi()
        leading: asyncio.Queue[str] = asyncio.Queue()

        async def lead(lease: Lease, who: str) -> None:
            async def work() -> None:
                leading.put_nowait(who)
                await asyncio.Event().wait()

            await lease.lead(work)

        async with asyncio.timeout(20), serving(fake) as api:
            slow = LeaseTimes(duration_s=3600.0, deadline_s=1800.0, every_s=0.05)
            mine = Lease(api, "ops", "operator", "one", slow)
            first = asyncio.create_task(lead(mine, "one"))
            assert await leading.get() == "one"
            other = Lease(api, "ops", "operator", "two", slow)
            second = asyncio.create_task(lead(other, "two"))
            await other.release()  # it is not its own to give back
            (lease,) = fake.objects.values()
            assert lease["spec"]["holderIdentity"] == "one"
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            await mine.release()
            assert await leading.get() == "two"
            second.cancel()
            await asyncio.gather(second, return_exceptions=True)

    asyncio.run(run())


def test_a_leader_stops_before_another_may_lead() -> None:
    async def run() -> None:
        fake = FakeApi()
        stopped = asyncio.Event()

        async def work() -> None:
            fake.spoil = [(500, "InternalError", {})] * 1000
            try:
                await asyncio.Event().wait()
            finally:
                stopped.set()

        async with asyncio.timeout(20), serving(fake) as api:
            await Lease(api, "ops", "operator", "one", QUICK).lead(work)
        assert stopped.is_set()

    asyncio.run(run())


@pytest.mark.parametrize(
    "refusal", [(500, "InternalError", {}), (409, "Conflict", {}), (401, "Unauthorized", {})]
)
def test_a_leader_goes_on_when_one_renewal_fails(refusal: tuple[int, str, dict[str, str]]) -> None:
    """Nobody else may take the Lease before its duration is over: there is time to ask again."""

    async def run() -> None:
        renewed = asyncio.Event()
        went_on = False

        class Fake(FakeApi):
            def _put(self, path: str, body: dict[str, Any], new: bool) -> web.Response:
                renewed.set()
                return super()._put(path, body, new)

        fake = Fake()

        async def work() -> None:
            nonlocal went_on
            fake.spoil = [refusal] * 3
            renewed.clear()
            await renewed.wait()
            went_on = True

        async with asyncio.timeout(20), serving(fake) as api:
            slow = LeaseTimes(duration_s=3600.0, deadline_s=1800.0, every_s=0.01)
            await Lease(api, "ops", "operator", "one", slow).lead(work)
        assert went_on

    asyncio.run(run())


def test_a_leader_that_has_no_right_to_its_lease_says_so() -> None:
    async def run() -> None:
        fake = FakeApi()

        async def work() -> None:
            fake.spoil = [(403, "Forbidden", {})] * 1000
            await asyncio.Event().wait()

        async with asyncio.timeout(20), serving(fake) as api:
            with pytest.raises(ApiError, match="Forbidden"):
                await Lease(api, "ops", "operator", "one", QUICK).lead(work)

    asyncio.run(run())


def test_a_leader_whose_lease_was_taken_stops() -> None:
    async def run() -> None:
        fake = FakeApi()

        async def work() -> None:
            (lease,) = fake.objects.values()
            lease["spec"]["holderIdentity"] = "two"
            lease["metadata"]["resourceVersion"] = "999"
            await asyncio.Event().wait()

        async with asyncio.timeout(20), serving(fake) as api:
            await Lease(api, "ops", "operator", "one", QUICK).lead(work)

    asyncio.run(run())


def test_what_the_work_raises_is_raised() -> None:
    async def run() -> None:
        async def work() -> None:
            raise ValueError("broken")

        async with serving(FakeApi()) as api:
            with pytest.raises(ValueError, match="broken"):
                await Lease(api, "ops", "operator", "one", QUICK).lead(work)

    asyncio.run(run())


def test_moments_are_compared_by_the_clock_of_the_api_server() -> None:
    """An operator whose clock is ten minutes off would take a deletion of now for one whose time to save is over."""

    async def run() -> None:
        fake = FakeApi()
        fake.objects["/api/v1/pods/one"] = {"metadata": {"name": "one"}}
        async with serving(fake) as api:
            assert abs(api.now_s() - time.time()) < 1
            for off_s in (600, -600):
                fake.dates = [format_datetime(datetime.now(UTC) + timedelta(seconds=off_s), usegmt=True)]
                await api.get("/api/v1/pods/one")
                assert abs(api.now_s() - time.time() - off_s) < 5
            fake.dates = ["soon"]
            await api.get("/api/v1/pods/one")
            assert abs(api.now_s() - time.time() + 600) < 5, "what it says of no date changes nothing"
            await api.get("/api/v1/pods/one")
            assert abs(api.now_s() - time.time()) < 1

    asyncio.run(run())
