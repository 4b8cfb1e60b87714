"""`holdfast check`: tests the nodes of a running job, or this machine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from holdfast.cli.common import Format, JobName, Output, width_of, write_as
from holdfast.cli.options import command
from holdfast.protocol.check_options import CheckOptions

if TYPE_CHECKING:
    from holdfast.protocol.health import CheckNews, CheckResult, Condition

    Results = dict[str, Sequence[CheckResult]]

T = TypeVar("T")
WIDTH = 100
EXIT_FAULTY = 1
EXIT_UNKNOWN = 3
HERE = "this machine"


@command
def check(
    options: CheckOptions,
    job: JobName = None,
    folder: Annotated[
        Path,
        typer.Option(
            "--folder",
            metavar="DIR",
            help="Without a job: folder on the disk that is tested.",
            show_default="the working folder",
        ),
    ] = Path(),
    json: Annotated[
        Path | None,
        typer.Option(
            "--json", metavar="FILE", help="Write the results as JSON to this file; - means standard output."
        ),
    ] = None,
    write_topology: Annotated[
        Path | None,
        typer.Option(
            "--write-topology",
            metavar="FILE",
            help=(
                "Instead of the checks, measure the network between every pair of nodes, and write to this file "
                "which nodes are close to each other, for `holdfast run --topology FILE`."
            ),
        ),
    ] = None,
    output: Output = None,
) -> None:
    """Checks nodes of a running job, or this machine if neither nodes nor a job are named.

    Exit code 0: all are healthy. 1: something is faulty. 3: nothing is faulty, but something could not be tested.
    """
    from holdfast.errors import UsageError
    from holdfast.health.checks.fleet import summary
    from holdfast.protocol.health import Condition

    # Before the checks, because they take a minute: a report that cannot be written would come too late.
    if json is not None and str(json) != "-" and not json.resolve().parent.is_dir():
        raise UsageError(f"--json {json}: the folder {json.resolve().parent} does not exist")
    if write_topology is not None:
        _write_topology(write_topology, job, options, json, output)
        return
    if options.nodes or job:
        news = _of_job(job, options)
        results: Results = {node: list(results) for node, results in news.results.items()}
    else:
        if not folder.is_dir():
            raise UsageError(f"--folder {folder}: this folder does not exist")
        results = {HERE: _of_machine(folder.resolve(), options.deep, options.seconds)}
    conditions = summary(results)
    _show(results, conditions, json, output)
    # Both may be there at once. The fault is the one that somebody has to act on, so it decides the exit
    # code.
    if Condition.FAULTY in conditions.values():
        raise typer.Exit(EXIT_FAULTY)
    if Condition.UNKNOWN in conditions.values():
        raise typer.Exit(EXIT_UNKNOWN)


def _of_machine(folder: Path, deep: bool, seconds: float) -> Sequence[CheckResult]:
    import asyncio

    from holdfast.checkpoint.memory import memory_system
    from holdfast.health.checks.basic import Needs, run_basic
    from holdfast.health.checks.check import SECONDS, CheckProgress, Task
    from holdfast.health.checks.child import check_in_child

    results = run_basic(Needs("127.0.0.1", 1, folder, memory_system()))
    if not deep:
        return results
    task = Task(node=HERE, folder=str(folder), seconds=seconds or SECONDS)

    async def run() -> list[CheckResult]:
        with _Doing() as doing:

            def tell(progress: CheckProgress) -> None:
                if progress.running:
                    doing.now(f"checking {progress.running}")

            return await doing.during(check_in_child(task, tell))

    return [*results, *asyncio.run(run())]


def _write_topology(
    path: Path, job: str | None, options: CheckOptions, json: Path | None, output: Format | None
) -> None:
    from dataclasses import replace

    from holdfast.cli.check_places import refuse_file, write_places
    from holdfast.errors import UsageError

    if options.deep:
        raise UsageError(
            "--write-topology measures pairs of nodes and does nothing else; run `holdfast check --deep` separately"
        )
    refuse_file(path)
    news = _of_job(job, replace(options, every_pair=True))
    if not write_places(news.pairs, options.seconds, path, json, output):
        raise typer.Exit(EXIT_UNKNOWN)


def _of_job(job: str | None, options: CheckOptions) -> CheckNews:
    import asyncio

    from holdfast.engines import jobs

    return asyncio.run(_ask(jobs.existing(job), options))


async def _ask(folder: Path, options: CheckOptions) -> CheckNews:
    import msgspec

    from holdfast.engines.reach import client_of
    from holdfast.errors import UsageError
    from holdfast.protocol.health import CheckNews
    from holdfast.protocol.wire.decoding import decode

    read = partial(msgspec.convert, type=CheckNews)
    what = "the coordinator's answer cannot be read"
    async with client_of(folder) as client:
        with _Doing() as doing:
            said = await client.post("/check", msgspec.json.encode(options).decode())
            news: CheckNews = decode(read, said, what, error=UsageError)
            while not news.over:
                doing.now(_told(news))
                # The answer comes when there is something newer than `version`, so this waits at the
                # coordinator and does not poll it.
                page = f"/check?id={news.id}&after={news.version}"
                news = decode(read, await client.get(page), what, error=UsageError)
            return news


def _told(news: CheckNews) -> str:
    from holdfast.protocol.units import clip

    return clip(
        f"{news.doing}: waiting for {', '.join(news.waiting)}" if news.waiting else news.doing, WIDTH - 20
    )


class _Doing:
    """Shows what is going on after two silent seconds: one line, rewritten in a terminal, and ever more rarely elsewhere."""

    def __init__(self) -> None:
        import time

        from holdfast.observe.transfer_progress import SILENT_S

        self._clock: Callable[[], float] = time.monotonic
        self._silence_s = SILENT_S
        self._began_s = self._shown_s = self._clock()
        self._what = ""
        self._open = False

    def __enter__(self) -> _Doing:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._open:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()

    def now(self, what: str) -> None:
        """This goes on now."""
        self._what = what
        self._show()

    async def during(self, work: Coroutine[Any, Any, T]) -> T:
        """Waits for the work and shows how long it takes."""
        import asyncio

        task = asyncio.create_task(work)
        while not (await asyncio.wait({task}, timeout=1.0))[0]:
            self._show()
        return task.result()

    def _show(self) -> None:
        from holdfast.observe.transfer_progress import LONGEST_SILENCE_S

        now_s = self._clock()
        if now_s - self._shown_s < self._silence_s:
            return
        line = f"{self._what} ({now_s - self._began_s:.0f} s)"
        self._shown_s = now_s
        self._open = sys.stderr.isatty()
        if self._open:
            self._silence_s = 0.0
        else:
            self._silence_s = min(2 * self._silence_s, LONGEST_SILENCE_S)
        sys.stderr.write(f"\r\033[K{line}" if self._open else f"{line}\n")
        sys.stderr.flush()


def _show(
    results: Results, conditions: Mapping[str, Condition], path: Path | None, output: Format | None
) -> None:
    from datetime import UTC, datetime

    import msgspec

    report = {
        "utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "nodes": {n: {"condition": conditions[n], "results": rs} for n, rs in results.items()},
    }
    if path is not None:
        # With `-` nothing but the JSON goes to stdout, so that a program can read it.
        text = msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"
        if str(path) == "-":
            sys.stdout.write(text.decode())
            return
        path.write_bytes(text)
    if write_as(report, False, output):
        return
    from holdfast.observe.checks import checks_table
    from holdfast.observe.tables import PrintableConsole

    usual = min(WIDTH, PrintableConsole().width) if sys.stdout.isatty() else WIDTH
    console = PrintableConsole(width=width_of(output, usual), highlight=False)
    console.print(checks_table(results, conditions))
    for node, condition in conditions.items():
        console.print(f"{node}: {condition.value}", soft_wrap=True)
