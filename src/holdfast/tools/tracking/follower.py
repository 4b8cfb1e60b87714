"""Gives trackers what a job's ledgers have, from the oldest start that is kept to the end of the one that runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec

from holdfast import plugins
from holdfast.coordinator.service.store import News, Store
from holdfast.engines import jobs
from holdfast.engines.client import JobClient, NoAnswer
from holdfast.engines.reach import client_of
from holdfast.errors import UsageError
from holdfast.protocol.wire.decoding import decode
from holdfast.tools.tracking.base import Tracker, TrackerKind
from holdfast.tools.tracking.position import Batch, take_in

EVERY_S = 1.0
"""Between two questions to a running job. What is read is at least `SETTLED_S` old, so a tracker is 2 to 3 s behind; in
exchange a job of many steps a second costs its coordinator one request a second."""

HOW = "must be jsonl:PATH, tensorboard:DIR, mlflow:URI, wandb:PROJECT or otlp:URL"
OpenLedger = Callable[[Path], AbstractContextManager[Store]]
_news = msgspec.json.Decoder(News)


def tracker(target: str, folder: Path) -> Tracker:
    """Of `jsonl:PATH`, `tensorboard:DIR`, `mlflow:URI`, `wandb:PROJECT` or `otlp:URL`, or of another package's kind.

    folder: the job's. A target that is no path has its position there.

    Raises:
        UsageError: there is no such tracker, its library is missing, or another follower writes there.
    """
    kind, where = _kind_of(target, f"--to {target!r}")
    return kind(where, folder)


def check_target(target: str) -> None:
    """What can be known before a job starts. Raises UsageError as `tracker`."""
    kind, where = _kind_of(target, repr(target))
    kind.check(where)


def _kind_of(target: str, shown: str) -> tuple[TrackerKind, str]:
    name, _, where = target.partition(":")
    point = plugins.find(plugins.TRACKERS, name)
    kind: TrackerKind | None = point.load() if point is not None else None
    if point is not None and not (
        callable(kind) and hasattr(kind, "needs_target") and hasattr(kind, "check")
    ):
        raise point.broken("not a TrackerKind of holdfast.tools.tracking.base")
    if kind is None or (not where and kind.needs_target):
        raise UsageError(f"{shown}: {HOW}")
    return kind, where


async def follow(folder: Path, trackers: Sequence[Tracker], open_ledger: OpenLedger) -> None:
    """Until the job has ended; of a job that has, all at once."""
    if jobs.is_running(folder):
        async with client_of(folder) as client:
            await asyncio.gather(*(_follow_running(folder, client, x, open_ledger) for x in trackers))
    # Once more from the file, when nobody answers any more: what came between the last answer and the end is
    # only there.
    for each in trackers:
        await asyncio.to_thread(_read_ended, folder, each, open_ledger)


async def _follow_running(folder: Path, client: JobClient, to: Tracker, open_ledger: OpenLedger) -> None:
    """Until the job's last event. A coordinator that dies, or hands over, is waited for."""
    ended = False
    while jobs.is_running(folder) and not ended:
        at = to.position
        try:
            data = await client.get_bytes(f"/news?seq={at.seq}&place={at.place}")
            news = decode(_news.decode, data, "the coordinator's answer cannot be read", error=UsageError)
        except NoAnswer:
            continue  # it was asked for several seconds
        if news.ledger and news.ledger != at.ledger:
            # Of another start than this position: those between are read first, then the question is asked anew.
            await asyncio.to_thread(_read_put_away, folder, to, open_ledger)
            await asyncio.to_thread(to.write, _beginning(to, news))
            continue
        if news.events or news.steps or to.waits:
            await asyncio.to_thread(to.write, take_in(at, news))
        # By the event: the launcher holds the job's lock for a while after the end, and whoever asked in that
        # time would wait for an answer that does not come.
        ended = any(entry.kind == "ended" for entry in news.events)
        if not news.more and not ended:
            # There is no event for a commit: one for each would be a message for each step.
            await asyncio.sleep(EVERY_S)


def _read_ended(folder: Path, to: Tracker, open_ledger: OpenLedger) -> None:
    _read_put_away(folder, to, open_ledger)
    with open_ledger(folder) as store:
        read_ledger(store, to)


def _read_put_away(folder: Path, to: Tracker, open_ledger: OpenLedger) -> None:
    """The starts before the newest, from the tracker's own on."""
    runs = sorted((d for d in (folder / "runs").glob("*") if d.name.isdigit()), key=lambda d: int(d.name))
    names = []
    for run in runs:
        try:
            with open_ledger(run) as store:
                names.append((store.news(0, 0, limit=1).ledger, run))
        except UsageError:
            continue  # refused before it had a ledger, or lost by its disk
    # A position that is in none of these is in the newest start, or in one that is not kept any more. Of the
    # second all that are kept came after it: names are times, and compare as text.
    for name, run in names:
        if name >= to.position.ledger:
            with open_ledger(run) as store:
                read_ledger(store, to)


def read_ledger(store: Store, to: Tracker) -> None:
    """All that a ledger has after the tracker's position."""
    ledger = store.news(0, 0, limit=1)
    if ledger.ledger and ledger.ledger != to.position.ledger:
        to.write(_beginning(to, ledger))
    more = True
    while more:
        news = store.news(to.position.seq, to.position.place)
        if news.events or news.steps:
            to.write(take_in(to.position, news))
        more = news.more


def _beginning(to: Tracker, news: News) -> Batch:
    """Nothing yet, of the ledger of a later start."""
    position = to.position.at_beginning_of(news.ledger)
    return Batch(parts=(), began_utc_s=news.began_utc_s, position=position)
