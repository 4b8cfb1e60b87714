"""Who watches a job: the status as changes, and a bound on what somebody costs who does not read."""

from __future__ import annotations

import asyncio
import random
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import WSCloseCode, WSMsgType, web

from holdfast.coordinator.kernel.state import Assignment, CoreState, Node, Worker, WorkerPhase
from holdfast.coordinator.service import job_view, routes, watchers
from holdfast.coordinator.service.job_view import build_status
from holdfast.coordinator.service.store import LedgerBatch, LedgerEntry, Store
from holdfast.coordinator.service.watchers import PIECE, QUEUE_BYTES, JobWatcher, StatusFeed, Watchers
from holdfast.protocol.job import JobSpec
from holdfast.protocol.job_view import CHANGED, WHOLE, JobView, ReceivedView
from holdfast.protocol.messages import Generation, Member

UTC = "2026-01-02T03:04:05.000+00:00"
NOW = 100.0


def job(nodes: int = 3) -> CoreState:
    state = CoreState(spec=JobSpec(name="job", script="train.py"))
    for n in range(nodes):
        name = f"n{n}"
        state.membership.nodes[name] = Node(name=name, session="s", host="h", slots=2, last_seen_s=0.0)
        for slot in range(2):
            worker = Worker(name=f"{name}.{slot}#1", node=name, slot=slot, started_s=0.0, awaited_s=0.0)
            worker.phase, worker.committed, worker.loss = WorkerPhase.MEMBER, 5, 1.0
            state.membership.workers[worker.name] = worker
    regroup(state)
    return state


def regroup(state: CoreState) -> None:
    there = [x for x in state.membership.workers.values() if x.phase is WorkerPhase.MEMBER]
    members = tuple(
        Member(rank=rank, worker=w.name, node=w.node, slot=w.slot) for rank, w in enumerate(there)
    )
    state.membership.number += 1
    state.membership.generation = Generation(number=state.membership.number, members=members)


def disturb(state: CoreState, rng: random.Random) -> None:
    """Something that happens to a job."""
    workers = [w for w in state.membership.workers.values() if w.phase is not WorkerPhase.GONE]
    match rng.randrange(6):
        case 0:
            for worker in workers:
                worker.committed = (worker.committed or 0) + 1
        case 1:
            rng.choice(workers).committed = rng.choice((None, 3, 40))
        case 2:
            rng.choice(workers).phase = rng.choice(tuple(WorkerPhase))
        case 3:
            rng.choice(list(state.membership.nodes.values())).failures += 1
        case 4:
            name = f"new{len(state.membership.workers)}"
            made = Worker(name=name, node="n0", slot=0, started_s=1.0, awaited_s=1.0, phase=WorkerPhase.READY)
            state.membership.workers[name] = made
        case _:
            regroup(state)


def test_changes_put_together_are_the_status() -> None:
    async def look_often() -> None:
        rng = random.Random(7)
        state = job()
        feed = StatusFeed(state, lambda: NOW)
        await feed.look()
        heard = ReceivedView()
        heard.whole(msgspec.json.decode((await feed.whole())[1])["value"])
        for _ in range(100):
            disturb(state, rng)
            await feed.look()
            said = msgspec.json.decode(feed.change)
            assert said["kind"] == CHANGED
            there = heard.changed(said["value"])
            assert there == build_status(state, NOW)
            assert there == msgspec.json.decode(await feed.page(), type=JobView)

    asyncio.run(look_often())


@pytest.mark.parametrize("told", [True, False], ids=["they say so", "their word was lost"])
def test_who_has_the_state_of_a_checkpoint_does_not_fetch_it_any_more(told: bool) -> None:
    """As after a requeue: all read it from disk, say no bytes of it, and go on in step."""

    async def go_on() -> None:
        state = job()
        state.membership.level = 2
        generation = state.membership.generation
        assert generation is not None
        state.membership.generation = msgspec.structs.replace(generation, start=5)
        for member in generation.members:
            state.membership.assignments[member.worker] = Assignment(rank=member.rank, restore=True)
        feed, heard = StatusFeed(state, lambda: NOW), ReceivedView()
        await feed.look()
        said = heard.whole(msgspec.json.decode((await feed.whole())[1])["value"])
        assert {row.state for row in said.workers} == {"restoring"}
        for worker in state.membership.workers.values():
            worker.committed = 6
            if told:
                worker.joined_generation = state.membership.number
                worker.committed = 5
        await feed.look()
        said = heard.changed(msgspec.json.decode(feed.change)["value"])
        assert {row.state for row in said.workers} == {"member"}
        assert {row["state"] for row in await job_view.rank_rows(state)} == {"training"}

    asyncio.run(go_on())


def test_a_step_of_all_members_costs_no_row() -> None:
    async def step() -> None:
        state = job(200)
        feed = StatusFeed(state, lambda: NOW)
        await feed.look()
        for worker in state.membership.workers.values():
            worker.committed = 6
        await feed.look()
        change = msgspec.json.decode(feed.change)["value"]
        assert (change["workers"], change["nodes"], change["common"]) == ([], [], 6)
        assert len(feed.change) < len((await feed.whole())[1]) / 50

    asyncio.run(step())


class Socket:
    """Takes what it is sent when it is let to."""

    def __init__(self) -> None:
        self.said: list[tuple[str, Any]] = []
        self.reads = asyncio.Event()

    async def send_frame(self, message: bytes, opcode: WSMsgType) -> None:
        await self.reads.wait()
        assert opcode is WSMsgType.TEXT
        said = msgspec.json.decode(message)
        self.said.append((said["kind"], said["value"]))

    def seqs(self) -> list[int]:
        return [value["seq"] for kind, value in self.said if kind == "event"]


def entry(seq: int) -> LedgerEntry:
    return LedgerEntry(seq=seq, t_s=float(seq), utc=UTC, kind="stop-requested", fields={"reason": "x" * 1000})


def test_one_who_does_not_read_is_behind_in_the_ledger_and_nowhere_else(tmp_path: Path) -> None:
    async def fall_behind() -> None:
        store = Store(tmp_path / "job.sqlite")

        async def read(what: Any) -> Any:
            await asyncio.sleep(0)
            return what(store)

        with closing(store):
            feed = StatusFeed(job(), lambda: NOW)
            watchers, watcher, socket = Watchers(feed), JobWatcher(0), Socket()
            watchers.all.add(watcher)
            sending = asyncio.create_task(watcher.send(socket, read, feed))  # type: ignore[arg-type]
            for seq in range(1, 2001):
                store.write(LedgerBatch(entries=[entry(seq)]))
                watchers.announce("event", entry(seq))
                watchers.announce("log", {"text": "word"})
                await asyncio.sleep(0)
                assert watcher._nbytes <= QUEUE_BYTES
                assert sum(len(one.data) for one in watcher._queue) == watcher._nbytes
            watchers.announce("provide-node", {"order_id": 1})
            await watchers.look()
            watchers.end()
            socket.reads.set()
            assert await sending is WSCloseCode.OK
            assert socket.seqs() == list(range(1, 2001))
            assert [kind for kind, _ in socket.said if kind == "provide-node"] == ["provide-node"]

    asyncio.run(fall_behind())


def test_one_who_takes_no_order_is_given_up_and_gets_all_that_are_open_anew(tmp_path: Path) -> None:
    async def overflow() -> None:
        with closing(Store(tmp_path / "job.sqlite")) as store:

            async def read(what: Any) -> Any:
                return what(store)

            feed = StatusFeed(job(), lambda: NOW)
            watcher, socket = JobWatcher(0), Socket()
            sending = asyncio.create_task(watcher.send(socket, read, feed))  # type: ignore[arg-type]
            order = msgspec.json.encode({"kind": "mark-node", "value": "x" * 1000})
            for _ in range(QUEUE_BYTES // 1000 + 1):
                watcher.tell(order)
            socket.reads.set()
            assert await sending is WSCloseCode.TRY_AGAIN_LATER

    asyncio.run(overflow())


def test_one_who_keeps_up_gets_the_whole_status_once(tmp_path: Path) -> None:
    async def keep_up() -> None:
        with closing(Store(tmp_path / "job.sqlite")) as store:

            async def read(what: Any) -> Any:
                return what(store)

            feed = StatusFeed(job(), lambda: NOW)
            watchers, watcher, socket = Watchers(feed), JobWatcher(0), Socket()
            watchers.all.add(watcher)
            socket.reads.set()
            sending = asyncio.create_task(watcher.send(socket, read, feed))  # type: ignore[arg-type]
            for _ in range(3):
                await watchers.look()
                for _ in range(5):
                    await asyncio.sleep(0)
            # Two looks between which it had no turn: the newest change would not tell of the first.
            await watchers.look()
            await watchers.look()
            watchers.end()
            await asyncio.sleep(0)
            sending.cancel()
            kinds = [kind for kind, _ in socket.said]
            assert kinds[:3] == [WHOLE, CHANGED, CHANGED]

    asyncio.run(keep_up())


def test_many_events_are_sent_in_pieces_with_a_turn_for_others(tmp_path: Path) -> None:
    async def send_all() -> None:
        with closing(Store(tmp_path / "job.sqlite")) as store:

            async def read(what: Any) -> Any:
                return what(store)

            # So short that all of them are read at once.
            entries = [
                LedgerEntry(seq=seq, t_s=0.0, utc=UTC, kind="stop-requested", fields={})
                for seq in range(1, 501)
            ]
            store.write(LedgerBatch(entries=entries))
            watcher, socket, longest, before = JobWatcher(0), Socket(), 0, 0
            socket.reads.set()
            watcher.end()
            feed = StatusFeed(job(), lambda: NOW)
            sending = asyncio.create_task(watcher.send(socket, read, feed))  # type: ignore[arg-type]
            while not sending.done():
                await asyncio.sleep(0)
                longest, before = max(longest, len(socket.said) - before), len(socket.said)
            assert socket.seqs() == list(range(1, 501))
            assert longest <= PIECE

    asyncio.run(send_all())


def test_the_whole_status_is_put_together_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    made_by = []
    join = watchers._object

    def noted(*values: Any, **lists: Any) -> bytes:
        made_by.append(threading.current_thread())
        return join(*values, **lists)

    async def ask() -> None:
        feed = StatusFeed(job(), lambda: NOW)
        await feed.look()
        monkeypatch.setattr(watchers, "_object", noted)
        version, first = await feed.whole()
        assert (version, (await feed.whole())[1] is first) == (1, True)
        assert [one is threading.main_thread() for one in made_by] == [False]
        await feed.page()
        # What changed since the look before is small, and is put together at once.
        assert [one is threading.main_thread() for one in made_by] == [False, True, False]

    asyncio.run(ask())


class Touched:
    """A worker that counts how often anything of it is looked at."""

    count = 0

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def __getattr__(self, name: str) -> Any:
        Touched.count += 1
        return getattr(self._worker, name)


async def most_in_a_turn(feed: StatusFeed) -> int:
    """Of a look: how often it touches workers at most before others have their turn."""
    most = before = Touched.count = 0
    looking = asyncio.create_task(feed.look())
    while not looking.done():
        await asyncio.sleep(0)
        most, before = max(most, Touched.count - before), Touched.count
    await looking
    return most


@pytest.mark.parametrize("leave", [0, 1500])
def test_a_look_gives_others_a_turn_however_many_workers_there_are(leave: int) -> None:
    async def look() -> None:
        state = job(2000)
        workers = state.membership.workers
        for name, worker in workers.items():
            workers[name] = Touched(worker)  # type: ignore[assignment]
        feed = StatusFeed(state, lambda: NOW)
        # A row is made of about ten words of a worker. One pass over all of them, even of one word each, is more.
        assert 0 < await most_in_a_turn(feed) <= 3 * watchers.WORKERS_AT_ONCE < len(workers)
        for name in list(workers)[:leave]:
            workers[name]._worker.phase = WorkerPhase.GONE  # type: ignore[attr-defined]
        assert 0 < await most_in_a_turn(feed) <= 3 * watchers.WORKERS_AT_ONCE
        said = msgspec.json.decode(feed.change)["value"]
        assert said["gone"] == list(workers)[:leave]
        assert len(msgspec.json.decode(await feed.page())["workers"]) == len(workers) - leave

    asyncio.run(look())


def test_a_change_of_many_rows_is_put_together_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    made_by = []
    join = watchers._change

    def noted(*values: Any) -> bytes:
        made_by.append(threading.current_thread() is threading.main_thread())
        return join(*values)

    monkeypatch.setattr(watchers, "_change", noted)

    async def look() -> None:
        state = job(400)
        feed, heard = StatusFeed(state, lambda: NOW), ReceivedView()
        heard.whole({"job": "job", "phase": "running", "nodes": [], "workers": []})
        await feed.look()
        assert len(state.membership.nodes) + len(state.membership.workers) > watchers.WORKERS_AT_ONCE
        assert heard.changed(msgspec.json.decode(feed.change)["value"]) == msgspec.json.decode(
            await feed.page(), type=JobView
        )
        # Of the second look nearly nothing changed.
        assert made_by == [False, True]

    asyncio.run(look())


def test_no_version_is_seen_before_its_change_is_there() -> None:
    async def look() -> None:
        feed = StatusFeed(job(400), lambda: NOW)
        seen: set[tuple[int, bool]] = set()
        looking = asyncio.create_task(feed.look())
        while not looking.done():
            await asyncio.sleep(0)
            seen.add((feed.version, feed.change != b""))
        assert seen == {(0, False), (1, True)}

    asyncio.run(look())


class Answer(web.StreamResponse):
    """Notes what is written to it."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.pieces: list[bytes] = []

    async def prepare(self, request: Any) -> None:
        return None

    async def write(self, data: Any) -> None:
        self.pieces.append(bytes(data))

    async def write_eof(self, data: bytes = b"") -> None:
        return None


def test_a_large_answer_is_written_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes.web, "StreamResponse", Answer)
    body = random.Random(1).randbytes(3 * routes.BODY_PIECE + 5)
    answer = asyncio.run(routes._in_pieces(None, body, "text/plain"))  # type: ignore[arg-type]
    assert isinstance(answer, Answer)
    assert (answer.content_length, b"".join(answer.pieces) == body) == (len(body), True)
    assert max(map(len, answer.pieces)) == routes.BODY_PIECE
