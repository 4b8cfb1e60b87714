"""`holdfast ls`: the jobs of this home, the newest first."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.cli.common import WIDE, AsJson, Format, Output, write_as

ANSWER_S = 2.0
"""How long a running job may take to answer; others are shown meanwhile."""
ASKED_AT_ONCE = 32
SHOWN = 20


def ls(
    all_jobs: Annotated[
        bool, typer.Option("--all", help=f"List all jobs, not only the newest {SHOWN}.")
    ] = False,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Lists jobs: state, step, rate, time to go, goodput, age."""
    import asyncio

    from holdfast.engines import jobs

    folders = jobs.folders()
    shown = folders if all_jobs or as_json or output in (Format.JSON, Format.YAML) else folders[:SHOWN]
    found = asyncio.run(look_at(shown))
    if write_as(found, as_json, output):
        return
    if not found:
        sys.stdout.write(f"there is no job in {jobs.home() / 'jobs'}\n")
        return
    from holdfast.observe.tables import print_table
    from holdfast.protocol import units

    wide = output is Format.WIDE
    rows = [
        (
            x["job"],
            x["state"],
            units.count(x["step"]),
            units.rate(x["steps_per_s"]),
            units.seconds(x["eta_s"]),
            units.share(x["goodput"]),
            units.UNKNOWN if x["age_s"] is None else units.clock(x["age_s"]),
            x["engine"] or "-",
            *([x["folder"]] if wide else []),
        )
        for x in found
    ]
    names = (
        "job",
        "state",
        "step",
        "rate",
        "left",
        "goodput",
        "age",
        "engine",
        *(["folder"] if wide else []),
    )
    print_table(sys.stdout, names, rows, **({"width": WIDE} if wide else {}))
    for x in found:
        if x["problem"]:
            sys.stderr.write(f"{x['job']}: {x['problem']}\n")
    if len(shown) < len(folders):
        sys.stdout.write(f"{len(folders) - len(shown)} older jobs are not shown: use `holdfast ls --all`\n")


async def look_at(folders: list[Path]) -> list[dict[str, Any]]:
    """What is known of each job: job, state, step, steps_per_s, eta_s, goodput, age_s, engine, problem."""
    import asyncio

    # All at once would open a connection for each job of a year; one after the other would take two seconds
    # for each that does not answer.
    turn = asyncio.Semaphore(ASKED_AT_ONCE)

    async def one(folder: Path) -> dict[str, Any]:
        async with turn:
            return await _entry(folder)

    return await asyncio.gather(*(one(folder) for folder in folders))


async def _entry(folder: Path) -> dict[str, Any]:
    """What is known of one job. A job that is damaged or does not answer hides no other."""
    import asyncio

    from holdfast.errors import HoldfastError

    known: dict[str, Any] = {
        "job": folder.name,
        "state": "unknown",
        "step": None,
        "steps_per_s": None,
        "eta_s": None,
        "goodput": None,
        "age_s": None,
        "engine": None,
        "folder": str(folder),
        "problem": None,
    }
    try:
        from holdfast.engines import jobs

        known["age_s"] = round(time.time() - (folder / "spec.json").stat().st_mtime, 3)
        known["engine"] = jobs.read_spec(folder).engine
        known |= (
            await _running(folder) if jobs.is_running(folder) else await asyncio.to_thread(_ended, folder)
        )
    except TimeoutError:
        known["problem"] = f"its coordinator did not answer within {ANSWER_S:g} s"
    # An OSError: it was removed meanwhile, or is another user's.
    except (HoldfastError, OSError) as error:
        known["problem"] = str(error)
    return known


async def _running(folder: Path) -> dict[str, Any]:
    import asyncio

    from holdfast.engines.reach import client_of
    from holdfast.observe.dashboard import job_word

    async with asyncio.timeout(ANSWER_S), client_of(folder) as client:
        view = await client.view()
    return {
        "state": job_word(view.phase, view.outcome),
        "step": view.step,
        "steps_per_s": view.pace.steps_per_s,
        "eta_s": view.pace.eta_s,
        "goodput": view.goodput.share,
    }


def _ended(folder: Path) -> dict[str, Any]:
    from holdfast.cli.report import report_of

    report = report_of(folder)
    return {
        "state": report.outcome,
        "step": report.steps.committed if report.steps is not None else None,
        "steps_per_s": report.pace.steps_per_s if report.pace is not None else None,
        "eta_s": report.pace.eta_s if report.pace is not None else None,
        "goodput": report.goodput.share if report.goodput is not None else None,
    }
