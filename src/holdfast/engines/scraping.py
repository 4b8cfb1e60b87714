"""Files by which Prometheus finds the running jobs of a home: one for each, in the format of `file_sd_configs`.

Prometheus watches the folder, so that a job is scraped from its start on without a reload. The file exists as long as the job's
launcher runs.
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
"""Name of the folder in the home."""


def target_file(home: Path, job: str) -> Path:
    """The file of a job. Its suffix matches Prometheus' pattern, and a job's name is always a valid file name."""
    return home / FOLDER / f"{job}.json"


def publish(job_dir: Path, host: str, port: int) -> None:
    """Writes a job's file with its address. If the folder cannot be written, this only logs a warning and the job is not
    scraped."""
    home = home_of(job_dir)
    if home is None:
        return
    try:
        make_scrape_token(home)
        (home / FOLDER).mkdir(mode=0o700, exist_ok=True)
        _sweep(home)
        path = target_file(home, job_dir.name)
        # Prometheus reads the folder whenever it changes. It must never see half a file, so the temporary name does not match its
        # pattern.
        work = path.with_name(f".{path.name}.{os.getpid()}")
        work.write_bytes(_targets(job_dir, host, port))
        work.replace(path)
    except OSError as error:
        _log.warning("Prometheus does not find the job: %s", error)


def withdraw(job_dir: Path, host: str, port: int) -> None:
    """Removes a job's file, if it still has this address. If another launcher has taken over, the file has that one's and is
    kept."""
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
    """Removes the files of jobs whose launcher was killed."""
    for path in (home / FOLDER).glob("*.json"):
        try:
            gone = not jobs.is_running(home / "jobs" / path.stem)
        except HoldfastError:  # another job's damaged folder must not affect this one
            continue
        if gone:
            path.unlink(missing_ok=True)


def _targets(job_dir: Path, host: str, port: int) -> bytes:
    return msgspec.json.encode(
        [{"targets": [host_and_port(host, port)], "labels": {"holdfast_job": job_dir.name}}]
    )
