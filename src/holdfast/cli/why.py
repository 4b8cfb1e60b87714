"""`holdfast why`: explains one incident, and lists decisions not to act."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from holdfast.cli.common import AsJson, Format, JobName, Output, ledger, write_as


def why(
    incident: Annotated[
        int | None,
        typer.Argument(
            metavar="[NUMBER]", help="Number of an incident. By default all incidents are listed."
        ),
    ] = None,
    job: JobName = None,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Explains an incident: what was seen, what was decided and why, what was done, and what it cost."""
    import msgspec

    from holdfast.engines import jobs
    from holdfast.errors import UsageError
    from holdfast.observe.incident_report import incident_lines, unheeded

    folder = jobs.existing(job)
    with ledger(folder) as store:
        entries: list[dict[str, Any]] = [msgspec.structs.asdict(e) for e in store.events()]
    from holdfast.observe.printable import printable

    numbers = [e["fields"]["id"] for e in entries if e["kind"] == "incident-opened"]
    if incident is None:
        _list(entries, unheeded(entries), as_json, output)
        return
    lines = incident_lines(incident, entries)
    if not lines:
        there = f"it had incidents 1 to {max(numbers)}" if numbers else "it has not had any"
        raise UsageError(f"the job {folder.name} did not have an incident {incident}: {there}")
    if not write_as({"incident": incident, "story": lines}, as_json, output):
        sys.stdout.write("\n".join(map(printable, lines)) + "\n")


def _list(entries: list[dict[str, Any]], ignored: list[str], as_json: bool, output: Format | None) -> None:
    from holdfast.observe.printable import printable
    from holdfast.protocol.health import remedy_text
    from holdfast.protocol.ledger import add_incident

    causes: dict[int, dict[str, Any]] = {}
    for entry in entries:
        add_incident(causes, entry["kind"], entry["fields"])
    for facts in causes.values():
        facts.pop("explained", None)
    # The newest decision of each incident, which is the one that holds: a finding may be decided again when
    # its grace is over.
    decided = {e["fields"]["incident"]: e["fields"] for e in entries if e["kind"] == "verdict"}
    told = {"incidents": [{**c, "decided": decided.get(n)} for n, c in causes.items()], "ignored": ignored}
    if write_as(told, as_json, output):
        return
    if not causes and not ignored:
        sys.stdout.write("this job has not had any incidents\n")
    for number, cause in causes.items():
        done = f" -> {remedy_text(decided[number]['does'])}" if number in decided else ""
        where = f"{cause['node']}: " if cause.get("node") else ""
        sys.stdout.write(printable(f"{number:4}  {where}{cause['cause']}{done}") + "\n")
    if ignored:
        sys.stdout.write("\nRules on trial:\n" + "\n".join(ignored) + "\n")
