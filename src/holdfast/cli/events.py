"""`holdfast events`: the ledger of a job."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.cli.common import AsJson, JobName, ledger

WIDTH = 100


def events(
    job: JobName = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue until the job ends.")] = False,
    as_json: AsJson = False,
    kind: Annotated[
        list[str] | None,
        typer.Option("--kind", metavar="KIND", help="Show only events of this kind. Can be repeated."),
    ] = None,
) -> None:
    """Shows everything that happened to a job: nodes, generations, faults, incidents, decisions."""
    from holdfast.engines import jobs

    folder = jobs.existing(job)
    show = _Printer(as_json, _kinds(kind))
    if follow and jobs.is_running(folder):
        import asyncio

        asyncio.run(_follow(folder, show))
    # Also after following: what came after the connection ended is only in the ledger. It is read from the last entry shown,
    # so that none appears twice.
    with ledger(folder) as store:
        for entry in store.events(show.last_seq):
            show(
                {
                    "t_s": entry.t_s,
                    "utc": entry.utc,
                    "kind": entry.kind,
                    "fields": entry.fields,
                    "seq": entry.seq,
                }
            )


class _Printer:
    """Writes ledger entries, each once."""

    def __init__(self, as_json: bool, kinds: frozenset[str] | None) -> None:
        self._as_json, self._kinds = as_json, kinds
        self._width = WIDTH if sys.stdout.isatty() else 100_000
        self.last_seq = 0

    def __call__(self, entry: Mapping[str, Any]) -> None:
        self.last_seq = entry["seq"]
        if self._kinds is not None and entry["kind"] not in self._kinds:
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
            raise UsageError(f"--kind {kind!r}: there are {', '.join(sorted(EVENTS))}")
    return frozenset(chosen)


async def _follow(folder: Path, show: _Printer) -> None:
    from holdfast.engines.client import JobClient

    async with JobClient(folder) as client:
        async for announcement in client.watch():
            if announcement.kind == "event":
                show(announcement.value)
