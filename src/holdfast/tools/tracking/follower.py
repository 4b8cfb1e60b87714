"""Passes the content of a job's ledgers to trackers, from the oldest start that is kept to the end of the one that
runs."""

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
"""Seconds between two requests to a running job. Steps are read when they are at least `SETTLED_S` old, so a tracker is
2 to 3 s behind; in exchange, a job with many steps per second costs its coordinator one request per second."""

HOW = "must be jsonl:PATH, tensorboard:DIR, mlflow:URI, wandb:PROJECT or otlp:URL"
OpenLedger = Callable[[Path], AbstractContextManager[Store]]
_news = msgspec.json.Decoder(News)


def tracker(target: str, folder: Path) -> Tracker:
    """Makes a tracker from `jsonl:PATH`, `tensorboard:DIR`, `mlflow:URI`, `wandb:PROJECT` or `otlp:URL`, or a kind of another
    package.

    folder: the job's. If the target is not a path, its position is kept there.

    Raises:
        UsageError: there is no such tracker, its library is missing, or another follower writes there.
    """
    kind, where = _kind_of(target, f"--to {target!r}")
    return kind(where, folder)


def check_target(target: str) -> None:
    """Checks what can be checked before a job starts. Raises UsageError as `tracker`."""
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
    """Follows a job until it has ended; one that has ended already is read at once."""
    if jobs.is_running(folder):
        async with client_of(folder) as client:
            await asyncio.gather(*(_follow_running(folder, client, x, open_ledger) for x in trackers))
    # Once more from the file when the coordinator does not answer any more: entries between the last answer
    # and the end are only there.
    for each in trackers:
        await asyncio.to_thread(_read_ended, folder, each, open_ledger)


async def _follow_running(folder: Path, client: JobClient, to: Tracker, open_ledger: OpenLedger) -> None:
    """Follows until the job's last event. Waits for a coordinator that died, or hands over."""
    ended = False
    while jobs.is_running(folder) and not ended:
        at = to.position
        try:
            data = await client.get_bytes(f"/news?seq={at.seq}&place={at.place}")
            news = decode(_news.decode, data, "the coordinator's answer cannot be read", error=UsageError)
        except NoAnswer:
            continue  # the client has already tried for several seconds
        if news.ledger and news.ledger != at.ledger:
            # The ledger is that of another start than the position: the starts between them are read first,
            # then the request is repeated.
            await asyncio.to_thread(_read_put_away, folder, to, open_ledger)
            await asyncio.to_thread(to.write, _beginning(to, news))
            continue
        if news.events or news.steps or to.waits:
            await asyncio.to_thread(to.write, take_in(at, news))
        # Detected by the event: the launcher holds the job's lock for a while after the end, and a request in
        # that time would wait for an answer that does not come.
        ended = any(entry.kind == "ended" for entry in news.events)
        if not news.more and not ended:
            # Commits are polled: an event for each would be a message for each step.
            await asyncio.sleep(EVERY_S)


def _read_ended(folder: Path, to: Tracker, open_ledger: OpenLedger) -> None:
    _read_put_away(folder, to, open_ledger)
    with open_ledger(folder) as store:
        read_ledger(store, to)


def _read_put_away(folder: Path, to: Tracker, open_ledger: OpenLedger) -> None:
    """Reads the starts before the newest, beginning with the one of the tracker's position."""
    runs = sorted((d for d in (folder / "runs").glob("*") if d.name.isdigit()), key=lambda d: int(d.name))
    names = []
    for run in runs:
        try:
            with open_ledger(run) as store:
                names.append((store.news(0, 0, limit=1).ledger, run))
        except UsageError:
            continue  # refused before it had a ledger, or lost with its disk
    # If the position belongs to none of these, it belongs to the newest start, or to one that is not kept any
    # more. In the second case all that are kept came after it: names are times, and compare as text.
    for name, run in names:
        if name >= to.position.ledger:
            with open_ledger(run) as store:
                read_ledger(store, to)


def read_ledger(store: Store, to: Tracker) -> None:
    """Reads everything in a ledger after the tracker's position."""
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
    """An empty batch at the beginning of the ledger of a later start."""
    position = to.position.at_beginning_of(news.ledger)
    return Batch(parts=(), began_utc_s=news.began_utc_s, position=position)
