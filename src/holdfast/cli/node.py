"""`holdfast node`: the histories of machines over all jobs: which are not used, why, and how to clear them."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from holdfast.cli.common import AsJson, JobName, Output, width_of, write_as

if TYPE_CHECKING:
    from holdfast.coordinator.service.history_store import HistoryRecord, HistoryStore
    from holdfast.engines.client import JobClient

T = TypeVar("T")

app = typer.Typer(
    help="Shows and changes the histories of machines over all jobs, and takes nodes out of a job.",
    no_args_is_help=True,
)

Where = Annotated[
    str | None,
    typer.Option(
        "--node-history",
        metavar="FILE|URL",
        show_default="$HOLDFAST_HOME/health.sqlite",
        help="History of the machines: a SQLite file or a PostgreSQL URL.",
    ),
]
Name = Annotated[
    str,
    typer.Argument(
        metavar="NODE",
        help="Name of the machine as `holdfast node ls` shows it, or the name of a node in a job.",
    ),
]


@app.command("ls")
def ls(where: Where = None, as_json: AsJson = False, output: Output = None) -> None:
    """Shows every machine that has a history, and rules with repeated false positives."""
    with _history(where) as history:
        entries = history.all()
    machines = [_summary(machine, entries) for machine in dict.fromkeys(e.machine for e in entries)]
    wrong = _wrong(entries)
    if write_as({"machines": machines, "false_positives": wrong}, as_json, output):
        return
    if not machines:
        sys.stdout.write("no machine has a history\n")
        return
    from holdfast.observe.tables import WIDTH, print_table

    rows = [
        [x["machine"], x["node"], str(x["incidents"]), str(x["jobs"]), x["last"], x["standing"]]
        for x in machines
    ]
    heads = ("machine", "last as", "incidents", "jobs", "last", "standing")
    print_table(sys.stdout, heads, rows, width=width_of(output, WIDTH))
    for rule, times in wrong.items():
        sys.stdout.write(
            f"\nthe rule {rule} was reported as wrong {times} times: see `holdfast health explain {rule}`\n"
        )


@app.command("show")
def show(name: Name, where: Where = None, as_json: AsJson = False, output: Output = None) -> None:
    """Shows the history of one machine."""
    import msgspec

    from holdfast.coordinator.service.history_store import find_machine

    with _history(where) as history:
        entries = history.all()
    machine = find_machine(entries, name)
    mine = [e for e in entries if e.machine == machine]
    records = [msgspec.to_builtins(e) for e in mine]
    if write_as({**_summary(machine, entries), "records": records}, as_json, output):
        return
    sys.stdout.write(f"{machine}: {_summary(machine, entries)['standing']}\n\n")
    from holdfast.observe.tables import WIDTH, print_table

    rows = [[_when(e.utc_s), e.job, e.node, e.kind.value, _told(e)] for e in mine]
    print_table(sys.stdout, ("when", "job", "as", "what", ""), rows, width=width_of(output, WIDTH))


InJob = Annotated[str, typer.Argument(metavar="NODE", help="Name of the node as `holdfast status` shows it.")]
Reason = Annotated[str, typer.Option("--reason", metavar="TEXT", help="The reason to record in the ledger.")]


@app.command("replace")
def replace(node: InJob, job: JobName = None, reason: Reason = "holdfast node replace") -> None:
    """Takes a node out of a running job between two steps, and its machine out of use until `holdfast node clear`."""
    _order(node, job, "replace", reason)
    sys.stdout.write(
        f"{node} leaves the job when another node has taken its place. Its machine is not used again until it has "
        "passed the deep checks, or until you run `holdfast node clear`\n"
    )


@app.command("reboot")
def reboot(node: InJob, job: JobName = None, reason: Reason = "holdfast node reboot") -> None:
    """Takes a node out of a running job between two steps and has its machine booted; it comes back by itself."""
    _order(node, job, "reboot", reason)
    sys.stdout.write(
        f"{node} leaves the job when another node has taken its place, and is rebooted then. With --engine ssh or "
        "`holdfast agent` you have to reboot it yourself: the launcher says when\n"
    )


def _order(node: str, job: str | None, remedy: str, reason: str) -> None:
    import asyncio
    from urllib.parse import urlencode

    from holdfast.engines import jobs
    from holdfast.engines.reach import client_of

    folder = jobs.existing(job)
    query = urlencode({"node": node, "remedy": remedy, "reason": reason})

    async def ask() -> None:
        async with client_of(folder) as client:
            await client.post(f"/node?{query}")

    asyncio.run(ask())


@app.command("clear")
def clear(
    name: Name,
    false_positive: Annotated[
        str | None,
        typer.Option(
            "--false-positive",
            metavar="RULE",
            help=(
                "Record that this rule was wrong on this machine. After the second time the rule is only on trial "
                "there: it records what it finds but does not act."
            ),
        ),
    ] = None,
    where: Where = None,
) -> None:
    """Clears a machine: jobs use it again, and its earlier incidents no longer count."""
    import asyncio

    from holdfast.coordinator.kernel.history import DOUBTED, RecordKind
    from holdfast.coordinator.service.history_store import HistoryRecord, machines_meant, now_s, the_one
    from holdfast.errors import UsageError

    with _history(where) as history:
        entries = history.all()
        meant = machines_meant(((e.machine, e.node) for e in entries), name)
        if not meant:
            # On Kubernetes a job's history is with its coordinator.
            _clear_in_jobs(name, false_positive or "")
            return
        machine = the_one(meant, name)
        rules = sorted({e.rule for e in entries if e.machine == machine and e.rule})
        if false_positive is not None and false_positive not in rules:
            raise UsageError(
                f"--false-positive {false_positive!r}: this rule did not match on {machine}; rules that did: "
                f"{', '.join(rules) or 'none'}"
            )
        node = next(e.node for e in reversed(entries) if e.machine == machine)
        kind = RecordKind.CLEARED if false_positive is None else RecordKind.FALSE_POSITIVE
        history.add(
            HistoryRecord(
                utc_s=now_s(),
                machine=machine,
                node=node,
                job="",
                kind=kind,
                rule=false_positive or "",
                text="holdfast node clear",
            )
        )
        mine = history.past(machine)
    # The record first: a job that starts from now on reads it. A job that runs has read the history when
    # the node joined, and has to be told.
    told = asyncio.run(_ask_jobs(lambda client: client.post(_clearing(machine, false_positive or ""))))
    sys.stdout.write(_cleared(machine, false_positive, f", also in {', '.join(told)}" if told else ""))
    wrong = sum(e.kind is RecordKind.FALSE_POSITIVE and e.rule == false_positive for e in mine)
    if wrong >= DOUBTED:
        sys.stdout.write(
            f"{false_positive} was wrong on this machine {wrong} times: from now on the rule is on trial there\n"
        )


def _clear_in_jobs(name: str, rule: str) -> None:
    """For a machine that running jobs alone know. They remember it themselves."""
    import asyncio

    from holdfast.coordinator.service.history_store import machines_meant, the_one

    known: dict[str, list[tuple[str, str]]] = {}
    for job, view in asyncio.run(_ask_jobs(lambda client: client.view())).items():
        rows = [(row.identity or row.node, row.node) for row in view.nodes]
        known[job] = [*rows, *((machine, "") for machine in view.health.quarantine)]
    machine = the_one(machines_meant((pair for pairs in known.values() for pair in pairs), name), name)
    told = asyncio.run(_ask_jobs(lambda client: client.post(f"{_clearing(machine, rule)}&remember=1")))
    having = [job for job in told if any(machine == one for one, _ in known.get(job, ()))]
    sys.stdout.write(_cleared(machine, rule, f" in {', '.join(having)}"))


def _clearing(machine: str, rule: str) -> str:
    from urllib.parse import urlencode

    return f"/clear?{urlencode({'machine': machine, 'rule': rule})}"


def _cleared(machine: str, rule: str | None, where: str) -> str:
    return f"{machine} is cleared{f' of {rule}' if rule else ''}{where}\n"


async def _ask_jobs(ask: Callable[[JobClient], Awaitable[T]]) -> dict[str, T]:
    """The answers of all running jobs, by their names."""
    from holdfast.engines import jobs
    from holdfast.engines.client import NoAnswer
    from holdfast.engines.reach import client_of

    answers: dict[str, T] = {}
    for folder in sorted((jobs.home() / "jobs").glob("*")):
        if not jobs.is_running(folder):
            continue
        try:
            async with client_of(folder) as client:
                answers[folder.name] = await ask(client)
        # It ends or starts again just now: its successor reads the history, which has the record already.
        except NoAnswer:
            continue
    return answers


@contextmanager
def _history(where: str | None) -> Iterator[HistoryStore]:
    from holdfast.coordinator.service.history_store import FILE_NAME, HistoryStore
    from holdfast.engines import jobs

    history = HistoryStore(where or str(jobs.home() / FILE_NAME), must_exist=True)
    try:
        yield history
    finally:
        history.close()


def _summary(machine: str, entries: Sequence[HistoryRecord]) -> dict[str, Any]:
    from holdfast.coordinator.kernel.history import standing
    from holdfast.coordinator.service.history_store import now_s

    mine = [e for e in entries if e.machine == machine]
    known = standing([e.remembered(now_s()) for e in mine])
    words = [f"quarantine: {known.quarantine}"] if known.quarantine else []
    words += [f"lemon: {known.lemon}"] if known.lemon else []
    words += [f"on trial: {', '.join(known.trial)}"] if known.trial else []
    return {
        "machine": machine,
        "node": mine[-1].node,
        "incidents": known.incidents,
        "jobs": known.jobs,
        "last": _when(mine[-1].utc_s),
        "quarantine": known.quarantine or None,
        "lemon": known.lemon or None,
        "trial": list(known.trial),
        "standing": "; ".join(words) or "may be used",
    }


def _wrong(entries: Sequence[HistoryRecord]) -> dict[str, int]:
    """Rules that people repeatedly called wrong, and how often."""
    from holdfast.coordinator.kernel.history import DOUBTED, RecordKind

    times: dict[str, int] = {}
    for entry in entries:
        if entry.kind is RecordKind.FALSE_POSITIVE:
            times[entry.rule] = times.get(entry.rule, 0) + 1
    return {rule: n for rule, n in sorted(times.items()) if n >= DOUBTED}


def _when(utc_s: float) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(utc_s, UTC).strftime("%Y-%m-%d %H:%M")


def _told(entry: HistoryRecord) -> str:
    parts = (entry.rule, entry.remedy, entry.device, entry.text)
    return ": ".join(p for i, p in enumerate(parts) if p and not (i == 0 and entry.text.startswith(p)))
