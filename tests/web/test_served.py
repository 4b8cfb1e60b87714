"""The page as it is served, over real connections to this machine."""

from __future__ import annotations

import asyncio
import base64
import errno
import hashlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from holdfast.coordinator.kernel.index import PhaseIndex
from holdfast.coordinator.kernel.state import CoreState, JobPhase
from holdfast.coordinator.service.authentication import Entrance, authorized
from holdfast.coordinator.service.page import BATCH, FRAMES, PageSource, Wakeup
from holdfast.coordinator.service.store import LedgerBatch, LedgerEntry, ReportedSteps, Store
from holdfast.engines import jobs
from holdfast.protocol.job import JobSpec
from holdfast.protocol.messages import ReportedStep
from holdfast.protocol.network.endpoint import Endpoint
from holdfast.protocol.verified import SamplesChecked, Verified, note_verified, write_checked
from holdfast.ui import host as host_module
from holdfast.ui.host import UiHost
from holdfast.ui.server import UiServer, loopback
from holdfast.ui.single_file import single_file
from holdfast.web import application
from holdfast.web import timeline as timeline_module
from holdfast.web.application import GZIP_BYTES
from holdfast.web.sessions import Role, Sessions

UTC = "2026-01-02T03:04:05.000+00:00"
EVENTS = 40


def write(store: Store, first: int, last: int) -> None:
    fields = {"node": "node1", "host": "h", "slots": 1}
    entries = [
        LedgerEntry(seq=n, t_s=float(n), utc=UTC, kind="node-joined", fields=fields)
        for n in range(first, last + 1)
    ]
    store.write(LedgerBatch(entries=entries))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With one job that has ended."""
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    folder = tmp_path / "jobs/old"
    folder.mkdir(parents=True)
    spec = JobSpec(name="old", script="train.py")
    (folder / "spec.json").write_bytes(msgspec.json.encode(spec))
    state = CoreState(spec=spec)
    state.membership.phase, state.membership.outcome = JobPhase.ENDED, "finished"
    state.membership.wall.since_s = 0.0
    with closing(Store(folder / "job.sqlite")) as store:
        write(store, 1, EVENTS)
        store.add_figures([("accuracy", n, n / 100) for n in range(100)], 1)
        told = tuple(ReportedStep(n, 2.0 - n / 100, 0.1, made_in=1, weight=8.0) for n in range(100))
        store.write(LedgerBatch(steps=[ReportedSteps(t_s=50.0, losses=told, generation=1, world=2)]))
        store.save(state)
    return tmp_path


async def nobody(folders: list[Path]) -> list[dict[str, Any]]:
    return [
        {"job": f.name, "state": "finished", "step": None, "goodput": None, "age_s": 1.0} for f in folders
    ]


@asynccontextmanager
async def served(may_act: bool = True) -> AsyncIterator[tuple[str, Sessions, UiHost]]:
    listener = loopback(0)
    port = listener.getsockname()[1]
    sessions, host = Sessions("a key", port, lambda: 1000.0), UiHost(None, may_act, nobody)
    ready, ends = asyncio.Event(), asyncio.Event()
    serving = asyncio.create_task(UiServer(host, sessions, listener).serve(ready.set, ends))
    try:
        await ready.wait()
        yield f"http://127.0.0.1:{port}", sessions, host
    finally:
        ends.set()
        await serving


def asks(
    what: Callable[[aiohttp.ClientSession, str, Sessions], Awaitable[None]], role: Role | None = Role.VIEW
) -> None:
    """role: None: who asks has no session."""

    asyncio.run(looked(what, role))


async def looked(
    what: Callable[[aiohttp.ClientSession, str, Sessions], Awaitable[None]], role: Role | None = Role.VIEW
) -> None:
    jar = aiohttp.CookieJar(unsafe=True)
    async with served() as (url, sessions, _), aiohttp.ClientSession(cookie_jar=jar) as client:
        if role is not None:
            async with client.get(f"{url}/enter?code={sessions.new_code(role)}") as page:
                assert page.status == 200
        await what(client, url, sessions)


def test_every_panel_of_a_job_that_has_ended(home: Path) -> None:
    async def look(client: aiohttp.ClientSession, url: str, sessions: Sessions) -> None:
        found = {}
        for name in (
            "now",
            "incidents",
            "timeline",
            "decisions",
            "strip",
            "ranks",
            "series",
            "checkpoints",
            "samples",
            "lines",
        ):
            async with client.get(f"{url}/api/v1/{name}") as page:
                assert page.status == 200, name
                assert page.headers["Cache-Control"] == "no-store"
                found[name] = await page.json()
        now = found["now"]
        assert (now["headline"]["word"], now["step"], now["live"], now["ledger_seq"]) == (
            "finished",
            100,
            False,
            EVENTS,
        )
        assert found["series"]["columns"]["step"] == list(range(100))
        assert found["series"]["columns"]["weight_per_s"][0] == pytest.approx(80.0)
        assert (found["samples"]["once"], found["samples"]["step"]) == (None, 100)
        assert "run.steps(ledger=FOLDER)" in found["samples"]["why"]
        for address, status in (("nothing", 404), ("incident?id=7", 404), ("incident?id=x", 400), ("series?from=-1", 400),
                                ("now?job=other", 404), ("now?job=../old", 404), ("log?worker=a", 404)):  # fmt: skip
            async with client.get(f"{url}/api/v1/{address}") as page:
                assert page.status == status, address

    asks(look)


def test_what_commands_found_is_on_the_page(home: Path) -> None:
    """Whether samples came once, and whether checkpoints were read back: noted in the job's folder, or not known."""
    at = "2026-01-02T03:10:00.000+00:00"
    with closing(Store(home / "jobs/old/job.sqlite")) as store:
        entries = [
            LedgerEntry(seq=EVENTS + n, t_s=60.0, utc=UTC, kind="saved", fields={"step": n, "url": "/tier"})
            for n in (1, 2, 3)
        ]
        store.write(LedgerBatch(entries=entries))
    folder = home / "jobs/old"
    write_checked(folder, SamplesChecked(utc=at, folders=("/s",), once=True, why="all came", steps=90))
    for step, utc, whole in ((1, at, True), (2, at, False), (3, "2025-12-31T00:00:00.000+00:00", True)):
        note_verified(folder, Verified(utc=utc, url="/tier", step=step, whole=whole, why="w" * (not whole)))

    async def look(client: aiohttp.ClientSession, url: str, sessions: Sessions) -> None:
        async with client.get(f"{url}/api/v1/samples") as page:
            found = await page.json()
        assert [found[k] for k in ("once", "why", "checked_utc", "steps", "step")] == [
            True,
            "all came",
            at,
            90,
            100,
        ]
        async with client.get(f"{url}/api/v1/checkpoints") as page:
            shown = (await page.json())["checkpoints"]
        # The third was saved again since: then nobody has read it.
        assert [(c["step"], c["whole"], c["verified_utc"], c["why"]) for c in shown] == [
            (3, None, None, ""),
            (2, False, at, "w"),
            (1, True, at, ""),
        ]

    asks(look)


def incidents(store: Store, many: int) -> None:
    """Each struck rank 1 of its own generation."""
    entries, seq = [], EVENTS
    for number in range(1, many + 1):
        t_s = 60.0 + number
        status = {
            "id": number, "fault": None, "injected": False, "node": "node1", "ranks": [1], "at_step": number, "t_s": t_s,
            "earlier_stalls": 0, "earlier_stall_s": 0.0, "cause": f"cause {number}", "cause_kind": "process", "rule": None,
            "quiet": False, "verdict": None, "where": None, "rung": "spare", "lost_steps": 1, "workers": [f"node1.0#{number}"],
            **dict.fromkeys(("detect_s", "decide_s", "replace_s", "join_s", "restore_s", "first_step_s"), 0.01),
            **dict.fromkeys(("stall_s", "full_strength_s"), 0.1),
        }  # fmt: skip
        workers = [f"node0.0#{number}", f"node1.0#{number}"]
        formed = {
            "generation": number,
            "start": 0,
            "world": 2,
            "workers": workers,
            "restore": [],
            "applied": False,
            "source": "live",
        }
        for kind, fields in (("formed", formed), ("incident-opened", status), ("incident-closed", status)):
            seq += 1
            entries.append(LedgerEntry(seq=seq, t_s=t_s, utc=UTC, kind=kind, fields=fields))
    store.write(LedgerBatch(entries=entries))


def test_an_incident_has_what_its_worker_left_and_those_beside_it(home: Path) -> None:
    finding = {
        "node": "node1", "incident": None, "rule": "row-remapping", "severity": "warning", "remedy": "watch", "source": "log",
        "condition": "faulty", "subject": "", "device": "", "worker": "", "evidence": "x", "count": 1, "shared": False,
        "dry_run": False, "age_s": 0.0, "firm": False,
    }  # fmt: skip
    with closing(Store(home / "jobs/old/job.sqlite")) as store:
        incidents(store, 3)
        entry = LedgerEntry(seq=store.last_seq() + 1, t_s=62.5, utc=UTC, kind="finding", fields=finding)
        store.write(LedgerBatch(entries=[entry]))
    folder = home / "jobs/old/logs/node1"
    folder.mkdir(parents=True)
    (folder / "node1.0-2.log").write_text(
        "step 1\n\x1b[2JTraceback (most recent call last):\n  at main\nValueError: no\n"
    )

    async def look(client: aiohttp.ClientSession, url: str, sessions: Sessions) -> None:
        async def found(number: int) -> Any:
            async with client.get(f"{url}/api/v1/incident?id={number}") as page:
                assert page.status == 200
                return await page.json()

        first, second, third = [await found(n) for n in (1, 2, 3)]
        assert [(x["previous"], x["next"]) for x in (first, second, third)] == [(None, 2), (1, 3), (2, None)]
        output = second["output"]
        assert (output["worker"], output["log"]["lines"][0], output["log"]["note"]) == (
            "node1.0#2",
            "step 1",
            "",
        )
        assert output["log"]["lines"][1] == "\\x1b[2JTraceback (most recent call last):"
        assert output["stack"]["lines"][-1] == "ValueError: no"
        # Of a worker without a log the page says where it would be, and why there is no stack.
        assert first["output"]["log"] == {
            "path": str(folder / "node1.0-1.log"),
            "lines": [],
            "note": "the log is on its node, under this path",
        }
        assert "leaves no stack" in first["output"]["stack"]["note"]
        # What a rule found on its node before.
        assert [
            x["findings"]["before"] and x["findings"]["before"]["ago_s"] for x in (first, second, third)
        ] == [None, None, 0.5]
        async with client.get(f"{url}/api/v1/log?worker=node1.0%232") as page:
            assert (await page.json())["lines"][-1] == "ValueError: no"
        async with client.get(f"{url}/api/v1/findings?count=5") as page:
            assert [f["rule"] for f in (await page.json())["findings"]] == ["row-remapping"]
        async with client.get(f"{url}/api/v1/now") as page:
            # The first entry is at the first second of the job.
            assert (await page.json())["began_utc_s"] == datetime.fromisoformat(UTC).timestamp() - 1.0

    asks(look)


def test_incidents_that_the_timeline_let_go_are_told_by_the_ledger(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = 500
    monkeypatch.setattr(timeline_module, "INCIDENTS_KEPT", 100)
    with closing(Store(home / "jobs/old/job.sqlite")) as store:
        incidents(store, many)

    async def look(client: aiohttp.ClientSession, url: str, sessions: Sessions) -> None:
        before, seen = "", []
        while True:
            async with client.get(f"{url}/api/v1/incidents?count=70{before}") as page:
                found = await page.json()
            assert found["all"] == many
            seen += [(x["id"], x["cause"], x["open"], x["stall_s"]) for x in found["incidents"]]
            if not found["more"]:
                break
            before = f"&before={seen[-1][0]}"
        assert seen == [(n, f"cause {n}", False, 0.1) for n in range(many, 0, -1)]
        for number in (1, 63, 64, 65, 200, 400, many):
            async with client.get(f"{url}/api/v1/incident?id={number}") as page:
                found = await page.json()
            assert found["incident"]["cause"] == f"cause {number}"
            assert found["story"][0].startswith(f"Incident {number} on node1, rank 1")
            assert found["output"]["worker"] == f"node1.0#{number}"
        async with client.get(f"{url}/api/v1/incident?id={many + 1}") as page:
            assert (page.status, await page.text()) == (
                404,
                f"this job does not have an incident {many + 1}: it has {many}\n",
            )
        async with client.get(f"{url}/api/v1/cost") as page:
            assert ((await page.json())["incidents"], (await page.json())["went_back"]) == (many, many)

    asks(look)


def test_the_list_says_how_many_jobs_it_leaves_out(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def listed() -> tuple[int, Any]:
        found: list[tuple[int, Any]] = []

        async def look(client: aiohttp.ClientSession, url: str, sessions: Sessions) -> None:
            async with client.get(f"{url}/api/v1/jobs") as page:
                found.append((page.status, await (page.json() if page.status == 200 else page.text())))

        await looked(look)
        return found[0]

    status, told = asyncio.run(listed())
    assert (status, [one["job"] for one in told["jobs"]], told["more"]) == (200, ["old"], 0)
    monkeypatch.setattr(host_module, "LISTED", 0)
    assert asyncio.run(listed()) == (200, {"jobs": [], "more": 1})

    def denied() -> list[Path]:
        raise PermissionError(errno.EACCES, "Permission denied", str(home))

    monkeypatch.setattr(jobs, "folders", denied)
    status, told = asyncio.run(listed())
    assert status == 503
    assert "the list of jobs cannot be read: [Errno 13] Permission denied" in told


def test_a_stranger_gets_nothing_and_a_code_is_good_once(home: Path) -> None:
    async def look(client: aiohttp.ClientSession, url: str, sessions: Sessions) -> None:
        for path in ("/", "/api/v1/now", "/static/app.js", "/api/v1/stream"):
            async with client.get(f"{url}{path}") as page:
                assert page.status == 401
                assert "holdfast ui" in await page.text()
        async with client.get(f"{url}/", headers={"Host": "evil.example"}) as page:
            assert page.status == 421
        code = sessions.new_code(Role.VIEW)
        for status in (303, 403):
            async with client.get(f"{url}/enter?code={code}", allow_redirects=False) as page:
                assert page.status == status
        cookie = next(iter(client.cookie_jar))
        assert cookie["httponly"]
        assert cookie["samesite"] == "Strict"

    asks(look, role=None)


def test_who_looks_cannot_act_and_nobody_changes_what_has_ended(home: Path) -> None:
    async def look(client: aiohttp.ClientSession, url: str, sessions: Sessions) -> None:
        own = {"Origin": url, "X-Holdfast": "1"}
        async with client.post(f"{url}/api/v1/act/stop", headers=own) as page:
            assert page.status == 403
        async with client.get(f"{url}/enter?code={sessions.new_code(Role.ACT)}"):
            pass
        for headers, status in (
            (own, 409),
            ({"Origin": url}, 403),
            (own | {"Origin": "http://evil.example"}, 403),
        ):
            async with client.post(f"{url}/api/v1/act/stop", headers=headers) as page:
                assert page.status == status, headers
        async with client.post(f"{url}/api/v1/act/reboot", headers=own) as page:
            assert page.status == 404
        async with client.post(f"{url}/api/v1/act/stop", headers=own, data=b"x" * 5000) as page:
            assert page.status == 413

    asks(look)


def test_the_page_runs_its_own_scripts_alone(home: Path) -> None:
    async def look(client: aiohttp.ClientSession, url: str, sessions: Sessions) -> None:
        async with client.get(f"{url}/") as page:
            policy, text = page.headers["Content-Security-Policy"], await page.text()
        inline = re.findall(r"<script[^>]*>([^<]+)</script>", text)
        assert len(inline) == 1
        assert base64.b64encode(hashlib.sha256(inline[0].encode()).digest()).decode() in policy
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        for path in re.findall(r'(?:src|href)="\./([^"]+)"', text):
            async with client.get(f"{url}/{path}") as page:
                assert page.status == 200, path
                etag = page.headers["ETag"]
                content = await page.read()
                assert ("Content-Encoding" in page.headers) == (len(content) > GZIP_BYTES)
            async with client.get(f"{url}/{path}", headers={"If-None-Match": etag}) as page:
                assert page.status == 304
            # Who cannot unpack gets it as it is, under another name, so that no cache mixes them up.
            async with client.get(f"{url}/{path}", headers={"Accept-Encoding": "identity"}) as page:
                assert await page.read() == content
                assert "Content-Encoding" not in page.headers
                assert (page.headers["ETag"] == etag) == (len(content) <= GZIP_BYTES)

    asks(look)


def seqs(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"^id: (\d+)\nevent: event$", text, re.M)]


def test_a_stream_goes_on_where_the_browser_was(home: Path) -> None:
    async def look(client: aiohttp.ClientSession, url: str, sessions: Sessions) -> None:
        async with client.get(f"{url}/api/v1/stream") as page:
            text = await page.text()
        assert seqs(text) == list(range(1, EVENTS + 1))
        assert text.count("event: delta") == 1
        assert text.rstrip().endswith("event: over\ndata: {}")
        async with client.get(f"{url}/api/v1/stream?after=3", headers={"Last-Event-ID": "17"}) as page:
            assert seqs(await page.text()) == list(range(18, EVENTS + 1))
        async with client.get(f"{url}/api/v1/stream?after=5&ledger=another") as page:
            text = await page.text()
        assert "event: reset" in text
        assert seqs(text) == []

    asks(look)


def test_a_slow_viewer_misses_nothing_and_nothing_waits_for_it(tmp_path: Path) -> None:
    """It reads one piece while thousands are written; then it reads on, from the ledger."""
    path = tmp_path / "job.sqlite"
    most = 3 * FRAMES

    async def main() -> list[int]:
        news = Wakeup()
        with closing(Store(path)) as store:
            write(store, 1, 5)

            async def read(what: Callable[[Store], Any]) -> Any:
                with closing(Store(path, read_only=True)) as one:
                    return what(one)

            state = CoreState(spec=JobSpec(name="j", script="s"))
            source = PageSource(
                read=read, state=state, index=PhaseIndex(state.membership, 1), clock=lambda: 1.0, news=news, job_dir=tmp_path, live=True
            )  # fmt: skip
            found: list[int] = []
            stream = source.stream(0, "")
            async for frame in stream:
                found += seqs(frame.decode())
                assert len(seqs(frame.decode())) <= BATCH
                if found == [1, 2, 3, 4, 5]:
                    write(store, 6, most)
                    # Other viewers look meanwhile, so what is kept in memory is far past this one.
                    source._taken_at = -1.0
                    await source.panel("lines", {})
                    assert len(source._frames) == FRAMES > BATCH
                if len(found) == most:
                    news.end()
            return found

    assert asyncio.run(main()) == list(range(1, most + 1))


def test_one_file_has_what_the_page_has(home: Path) -> None:
    async def main() -> str:
        host = UiHost(None, False, nobody)
        try:
            return await single_file(await host.source("old"))
        finally:
            host.close()

    text = asyncio.run(main())
    data = re.search(r'id="holdfast-data">(.*?)</script>', text)
    assert data is not None
    told = msgspec.json.decode(data[1])
    assert told["now"]["step"] == 100
    assert len(told["series?figure=accuracy"]["figure"]["columns"]["step"]) == 100
    assert told["findings"]["findings"] == []
    assert not re.search(r'(?:src|href)="(?!data:)', text)
    assert set(application.IMPORTS) <= set(re.findall(r'"([a-z/]+)":"data:', text))


def test_a_cookie_opens_the_coordinators_page_and_nothing_else_of_it() -> None:
    """In the listener and behind it: a connection may bring several requests."""

    async def fine(request: web.Request) -> web.Response:
        return web.Response(text="fine")

    async def main() -> None:
        listener = loopback(0)
        port = listener.getsockname()[1]
        where = Endpoint(host="127.0.0.1", port=port, pid=1, instance="i")
        sessions = Sessions("token", port, lambda: 1000.0)
        app = web.Application(middlewares=[authorized("token", where, sessions=sessions)])
        app.add_routes([web.get("/", fine), web.get("/ledger", fine), web.post("/page-code", fine)])
        runner = web.AppRunner(app)
        await runner.setup()
        assert runner.server is not None
        entrance = Entrance(listener, "token", where, runner.server, sessions=sessions)
        url, cookie = f"http://127.0.0.1:{port}", sessions.redeem(sessions.new_code(Role.ACT))
        mine, token = {"Cookie": f"{sessions.cookie}={cookie}"}, {"Authorization": "Bearer token"}
        try:
            for first in ("/", "/ledger"):
                async with (
                    aiohttp.ClientSession() as client
                ):  # the second request comes by the same connection
                    for path, headers, status in (
                        (first, mine, 200 if first == "/" else 401),
                        ("/ledger", mine, 401),
                        ("/", mine | {"Host": "evil.example"}, 421 if first == "/" else 401),
                        ("/", {}, 401),
                        ("/", mine | {"Authorization": "Bearer wrong"}, 401),
                        ("/ledger", token, 200),
                        ("/", mine, 200),
                    ):
                        async with client.get(f"{url}{path}", headers=headers) as page:
                            assert page.status == status, (first, path, headers)
        finally:
            entrance.close()
            await runner.cleanup()

    asyncio.run(main())
