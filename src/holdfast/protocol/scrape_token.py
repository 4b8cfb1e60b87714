"""What a Prometheus shows to read `/metrics`, and nothing else, of every job of a home.

A job's own token opens everything, and each start makes a new one. One entry of `scrape_configs` has one token for all of its
targets, so there is one for the home that lasts.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

FILE_NAME = "metrics-token"
PATH = "/metrics"
"""The one HTTP path that it opens, for GET."""


def home_of(job_dir: Path) -> Path | None:
    """The home of a job's folder; None: it is in none, so nobody looks for its jobs there."""
    folder = job_dir.absolute()
    return folder.parents[1] if folder.parent.name == "jobs" else None


def read_scrape_token(job_dir: Path) -> str:
    """Empty: there is none, and nobody is let in by it."""
    home = home_of(job_dir)
    try:
        return "" if home is None else (home / FILE_NAME).read_text().strip()
    except OSError:
        return ""


def make_scrape_token(home: Path) -> None:
    """Makes one where there is none. Raises OSError."""
    path = home / FILE_NAME
    if path.exists():
        return
    # Whole and with its mode from the first moment, and only if nobody was faster: two jobs that start together must
    # not each keep a token of their own.
    work = home / f".{FILE_NAME}.{os.getpid()}.{secrets.token_hex(4)}"
    fd = os.open(work, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(fd, "w") as out:
            out.write(secrets.token_urlsafe(32))
        # A link and no rename: a rename would replace the token of a job that was faster.
        with suppress(FileExistsError):
            os.link(work, path)
    finally:
        work.unlink(missing_ok=True)
