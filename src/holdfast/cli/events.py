"""`holdfast events`: the ledger of a job."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.cli.common import AsJson, Format, JobName, Output, ledger

WIDTH = 100


def events(
    job: JobName = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep printing new events until the job ends.")
    ] = False,
    as_json: AsJson = False,
    output: Output = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(
            "--kind",
            metavar="KIND",
            help="Show only events of this kind, for example lost. Can be repeated.",
        ),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            "--since",
            metavar="AGO|TIME",
            help=(
                "Show only events of the last 30m or 2h, for example, or since a time (UTC), for example "
                "2026-11-23T09:30."
            ),
        ),
    ] = None,
    tail: Annotated[
        int | None, typer.Option("--tail", "-n", metavar="N", help="Show only the newest N events.", min=1)
    ] = None,
) -> None:
    """Shows everything that happened to a job: nodes, generations, faults, incidents, decisions."""
    from collections import deque

    from holdfast.engines import jobs
    from holdfast.errors import UsageError

    folder = jobs.existing(job)
    if output is Format.YAML:
        raise UsageError(
            "-o yaml is not available, because events are printed one by one; -o json prints one JSON object per line"
        )
    show = _Printer(as_json or output is Format.JSON, _kinds(kind), moment(since) if since else "")
    follows = follow and jobs.is_running(folder)
    if tail is not None or not follows:
        # Filtered before they are counted: the newest N of those that are asked for.
        for entry in deque((x for x in _stored(folder, 0) if show.wants(x)), tail):
            show(entry)
    if follows:
        import asyncio

        asyncio.run(_follow(folder, show))
        # What came after the connection ended is only in the ledger. It is read from the last entry shown, so that none
        # appears twice.
        for entry in _stored(folder, show.last_seq):
            show(entry)


def _stored(folder: Path, after: int) -> Iterator[dict[str, Any]]:
    with ledger(folder) as store:
        for x in store.events(after):
            yield {"t_s": x.t_s, "utc": x.utc, "kind": x.kind, "fields": x.fields, "seq": x.seq}


def moment(text: str) -> str:
    """As the ledger writes times (ISO 8601, UTC), which compare as text.

    Raises:
        UsageError: it is neither a duration nor a time.
    """
    from datetime import UTC, datetime, timedelta

    from holdfast.errors import UsageError
    from holdfast.protocol.units import parse_seconds

    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        try:
            when = datetime.now(UTC) - timedelta(seconds=parse_seconds("--since", text))
        except UsageError:
            raise UsageError(
                f"--since {text!r}: must be a duration, for example 30m, or a time (UTC), for example 2026-11-23T09:30"
            ) from None
    return (
        # A time without a zone is UTC, as the ledger's are: read as local time it would mean another moment
        # on each machine that asks.
        (when if when.tzinfo else when.replace(tzinfo=UTC)).astimezone(UTC).isoformat(timespec="milliseconds")
    )


class _Printer:
    """Writes ledger entries, each once."""

    def __init__(self, as_json: bool, kinds: frozenset[str] | None, since_utc: str = "") -> None:
        self._as_json, self._kinds, self._since = as_json, kinds, since_utc
        self._width = WIDTH if sys.stdout.isatty() else 100_000
        self.last_seq = 0

    def wants(self, entry: Mapping[str, Any]) -> bool:
        """Whether it was asked for."""
        return (self._kinds is None or entry["kind"] in self._kinds) and entry["utc"] >= self._since

    def __call__(self, entry: Mapping[str, Any]) -> None:
        self.last_seq = entry["seq"]
        if not self.wants(entry):
            return
        sys.stdout.write(self._line(entry) + "\n")
        sys.stdout.flush()

    def _line(self, entry: Mapping[str, Any]) -> str:
        if self._as_json:
            import msgspec

            keys = ("seq", "t_s", "utc", "kind", "fields")
            return msgspec.json.encode({k: entry[k] for k in keys}).decode()
        from holdfast.observe.event_text import event_line

        begin = f"{entry['t_s']:9.2f} s  {entry['kind']:17}  "
        return begin + event_line(entry, everything=True, width=self._width - len(begin))


def _kinds(chosen: list[str] | None) -> frozenset[str] | None:
    if not chosen:
        return None
    from holdfast.errors import UsageError
    from holdfast.protocol.ledger import EVENTS

    for kind in chosen:
        if kind not in EVENTS:
            raise UsageError(
                f"--kind {kind!r}: there is no such kind of event; choose one of {', '.join(sorted(EVENTS))}"
            )
    return frozenset(chosen)


async def _follow(folder: Path, show: _Printer) -> None:
    from holdfast.engines.reach import client_of

    async with client_of(folder) as client:
        async for announcement in client.watch(show.last_seq):
            if announcement.kind == "event":
                show(announcement.value)
