"""`holdfast logs`: what the workers of a job printed."""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.common import JobName, ledger

if TYPE_CHECKING:
    from holdfast.observe.log_sources import LogSources
    from holdfast.observe.log_tail import Write

LINES = 20


def logs(
    job: JobName = None,
    rank: Annotated[
        int | None,
        typer.Option(
            "--rank", metavar="RANK", help="Show the logs of every worker that ever had this rank.", min=0
        ),
    ] = None,
    node: Annotated[
        str | None,
        typer.Option(
            "--node",
            metavar="NODE",
            help="Show the logs of the workers of this node. Pass its name, or 2 for node2.",
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep printing new lines until the job ends.")
    ] = False,
    lines: Annotated[
        int,
        typer.Option(
            "-n", "--lines", metavar="N", help="Show only the last N lines of each log; 0 shows all.", min=0
        ),
    ] = LINES,
    since: Annotated[
        str | None,
        typer.Option(
            "--since",
            metavar="AGO|TIME",
            help=(
                "Show only logs that were written to in the last 30m or 2h, for example, or since a time (UTC). "
                "Single lines cannot be selected, because they have no times."
            ),
        ),
    ] = None,
) -> None:
    """Shows what workers printed. By default, the workers of the newest generation."""
    from holdfast.cli.events import moment
    from holdfast.engines import jobs
    from holdfast.errors import UsageError
    from holdfast.observe.log_sources import LogSources

    if rank is not None and node is not None:
        raise UsageError("--rank and --node cannot be combined; pass one of them")
    since_s = datetime.fromisoformat(moment(since)).timestamp() if since else 0.0
    folder = jobs.existing(job)
    sources = LogSources(rank, node)
    seq = 0
    with ledger(folder) as store:
        for entry in store.events():
            sources.heard(entry.kind, entry.fields)
            seq = entry.seq
    # Without labels for one rank: it may have had several workers, and their logs, one after the other, are
    # what that rank printed.
    write = _write_plain if rank is not None else _write_labelled
    allocation = jobs.read_allocation(folder)
    if allocation is not None and allocation.engine == "kubernetes":
        from holdfast.kubernetes.commands.follow import show_logs

        if since:
            raise UsageError(
                f"--since is not available for {folder.name!r}, whose logs are in its pods; use -n, or kubectl logs "
                "--since"
            )
        show_logs(folder, sources.placed(_chosen(sources, folder)), lines, write, follow=follow)
        return
    if follow and jobs.is_running(folder):
        import asyncio

        asyncio.run(_follow(folder, sources, seq, lines, write, since_s))
        return
    chosen = _chosen(sources, folder)
    chosen = {path: label for path, label in chosen.items() if _written_s(path) >= since_s}
    printed = [_print(path, label, lines, write) for path, label in chosen.items()]
    if not any(printed):
        away = (
            ""
            if all(path.exists() for path in chosen)
            else "; logs that are not there are on the hosts of their nodes"
        )
        sys.stderr.write(f"nothing was printed; the logs are in {folder / 'logs'}{away}\n")


def _written_s(path: Path) -> float:
    """When something was last written to it, in seconds since 1970; 0: it is not here."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _chosen(sources: LogSources, folder: Path) -> dict[Path, str]:
    from holdfast.errors import UsageError

    if not (chosen := sources.chosen()):
        raise UsageError(
            f"the job {folder.name!r} does not have such a log: {sources.known() or 'no worker was started'}"
        )
    return chosen


def _print(path: Path, label: str, lines: int, write: Write) -> bool:
    """Whether there was anything to print."""
    from holdfast.observe.log_tail import WholeLines, first_data, last_lines
    from holdfast.protocol import units

    cut, some = WholeLines(), False
    try:
        with path.open("rb") as file:
            if lines <= 0 and (gone := first_data(file, 0)):
                sys.stderr.write(
                    f"{label}: the first {units.size(gone)} of this log were deleted (--log-limit)\n"
                )
            for block in last_lines(file, lines):
                if whole := cut.take(block):
                    write(label, whole)
                    some = True
    except FileNotFoundError:
        return False
    if cut.rest:
        write(label, cut.rest + b"\n")
    return some or bool(cut.rest)


async def _follow(
    folder: Path, sources: LogSources, seq: int, lines: int, write: Write, since_s: float
) -> None:
    """The logs as they grow; workers that come later are shown from their first line on, and of logs that were not written
    to since `since_s` only what comes now."""
    from holdfast.engines.reach import client_of
    from holdfast.observe.log_tail import NOTHING, Tail

    tail = Tail(write)
    try:
        for path, label in sources.chosen().items():
            # One that is not there yet has no time: it is not old, and is shown from its first line on.
            tail.add(path, label, NOTHING if 0 < _written_s(path) < since_s else lines)
        # From the last event that the ledger had: the watch begins after it, so no worker that starts
        # between the reading and the connecting is missed. A log that is chosen again with the next event
        # is followed once (`Tail.add`).
        async with client_of(folder) as client:
            async for announcement in client.watch(seq):
                if announcement.kind == "event":
                    sources.heard(announcement.value["kind"], announcement.value["fields"])
                    for path, label in sources.chosen().items():
                        tail.add(path, label, 0)
    finally:
        tail.close()


def _write_plain(label: str, lines: bytes) -> None:
    # On a terminal a log shows what would control it. A file or a pipe gets the bytes.
    if sys.stdout.isatty():
        from holdfast.observe.log_tail import last_said
        from holdfast.observe.printable import printable

        lines = b"\n".join(map(last_said, lines.split(b"\n")))
        lines = printable(lines.decode(errors="backslashreplace"), colours=True).encode()
    sys.stdout.buffer.write(lines)
    sys.stdout.buffer.flush()


def _write_labelled(label: str, lines: bytes) -> None:
    from holdfast.observe.log_tail import last_said

    begin = f"{label} | ".encode()
    whole = lines.removesuffix(b"\n").split(b"\n")
    _write_plain(label, b"".join(begin + last_said(line) + b"\n" for line in whole))
