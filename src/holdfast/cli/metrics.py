"""`holdfast metrics`: a job's figures in Prometheus' text format, and what a Prometheus and a Grafana need to use them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.common import JobName, kept_state, ledger

app = typer.Typer(
    help="Prints a job's metrics for Prometheus, and writes Prometheus' configuration, alert rules and dashboards.",
    invoke_without_command=True,
)
Out = Annotated[
    Path,
    typer.Option("--out", metavar="DIR", help="Folder to write into. It is created if it does not exist."),
]


@app.callback()
def metrics(context: typer.Context, job: JobName = None) -> None:
    """Prints a job's figures in Prometheus' text format, for node_exporter's textfile collector, or to look at."""
    from holdfast.engines import jobs

    if context.invoked_subcommand is None:
        sys.stdout.write(read_metrics(jobs.existing(job)).decode())


@app.command("config")
def config() -> None:
    """Prints the entry of scrape_configs with which a Prometheus finds and reads all jobs of this home."""
    import json

    from holdfast.engines import jobs
    from holdfast.engines.scraping import FOLDER
    from holdfast.protocol.network.proof import FILE_NAME, make_scrape_token

    home = jobs.home().absolute()
    # A Prometheus that starts before the first job could not watch a folder that is not there, and would look at it only
    # every five minutes; without the token every scrape would fail.
    (home / FOLDER).mkdir(mode=0o700, parents=True, exist_ok=True)
    make_scrape_token(home)
    # JSON's strings are YAML's: whatever is in a path stays one string.
    sys.stdout.write(
        f"""scrape_configs:
  - job_name: holdfast
    authorization:
      credentials_file: {json.dumps(str(home / FILE_NAME))}
    file_sd_configs:
      - files: [{json.dumps(str(home / FOLDER / "*.json"))}]
        refresh_interval: 30s
"""
    )


@app.command("rules")
def rules(out: Out) -> None:
    """Writes alert rules for Prometheus, and their tests for promtool."""
    _write(out, ("alerts.yaml", "alerts_test.yaml"))


@app.command("dashboards")
def dashboards(out: Out) -> None:
    """Writes dashboards for Grafana 10.4 and later: fleet, job, node health, storage."""
    _write(out, tuple(f"dashboards/{name}.json" for name in ("fleet", "job", "nodes", "storage")))


def _write(out: Path, names: tuple[str, ...]) -> None:
    from importlib.resources import files

    out.mkdir(parents=True, exist_ok=True)
    for name in names:
        path = out / Path(name).name
        path.write_bytes((files("holdfast.tools.monitoring") / name).read_bytes())
        sys.stdout.write(f"{path}\n")


def read_metrics(folder: Path) -> bytes:
    """From the coordinator, as Prometheus gets them; from the ledger when the job does not run."""
    import asyncio

    from holdfast.engines.client import NoAnswer
    from holdfast.engines.reach import client_of

    async def ask() -> bytes:
        async with client_of(folder) as client:
            return await client.get_bytes("/metrics")

    try:
        return asyncio.run(ask())
    except NoAnswer:
        return _stored(folder)


def _stored(folder: Path) -> bytes:
    """As the job's last coordinator left them.

    Raises:
        UsageError: the job was never started.
    """
    from holdfast.coordinator.service.metrics import metrics_text
    from holdfast.coordinator.service.tally import Tally

    with ledger(folder) as store:
        state = kept_state(store, folder)
        return metrics_text(state, store.tally(Tally()), state.began_s + store.last_t_s())
