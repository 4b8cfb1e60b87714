"""Where a Prometheus finds the running jobs of a home: one file for each, as `file_sd_configs` reads them.

Prometheus watches the folder, so a job is scraped from its start on without a reload. The file is there for as long as the
job's launcher runs.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec

from holdfast.engines import jobs
from holdfast.errors import HoldfastError
from holdfast.protocol.network.proof import home_of, make_scrape_token
from holdfast.protocol.network.sockets import host_and_port

_log = logging.getLogger(__name__)
FOLDER = "prometheus"
"""Within the home."""


def target_file(home: Path, job: str) -> Path:
    """Of a job. The name ends as Prometheus' pattern wants it, and jobs' names are good names of files."""
    return home / FOLDER / f"{job}.json"


def publish(job_dir: Path, host: str, port: int) -> None:
    """The job is at this address. A folder that cannot be written costs a note: the job trains without being scraped."""
    home = home_of(job_dir)
    if home is None:
        return
    try:
        make_scrape_token(home)
        (home / FOLDER).mkdir(mode=0o700, exist_ok=True)
        _sweep(home)
        path = target_file(home, job_dir.name)
        # Prometheus reads the folder whenever it changes: it must never see half a file, or this one under a name
        # that its pattern takes.
        work = path.with_name(f".{path.name}.{os.getpid()}")
        work.write_bytes(_targets(job_dir, host, port))
        work.replace(path)
    except OSError as error:
        _log.warning("Prometheus does not find the job: %s", error)


def withdraw(job_dir: Path, host: str, port: int) -> None:
    """The job is not at this address any more. Another launcher that took over has its own there by now, which stays."""
    home = home_of(job_dir)
    if home is None:
        return
    path = target_file(home, job_dir.name)
    try:
        if path.read_bytes() == _targets(job_dir, host, port):
            path.unlink()
    except FileNotFoundError:
        pass
    except OSError as error:
        _log.warning("Prometheus still looks for the job: %s", error)


def _sweep(home: Path) -> None:
    """Removes files of jobs whose launcher was killed: it could not."""
    for path in (home / FOLDER).glob("*.json"):
        try:
            gone = not jobs.is_running(home / "jobs" / path.stem)
        except HoldfastError:  # another job's damaged folder is no matter of this one
            continue
        if gone:
            path.unlink(missing_ok=True)


def _targets(job_dir: Path, host: str, port: int) -> bytes:
    return msgspec.json.encode(
        [{"targets": [host_and_port(host, port)], "labels": {"holdfast_job": job_dir.name}}]
    )
