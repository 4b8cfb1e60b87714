"""Where a job's coordinator listens, as it wrote it into the job's folder."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

FILE_NAME = "coordinator.json"


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Address of the newest coordinator process."""

    host: str
    port: int
    pid: int
    instance: str
    """Made up by the process: no other has it."""
    term: int = 0
    """Its term of office, see `protocol.leadership`; 0: no other machine can have the coordinator."""

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://{self.host}:{self.port}"

    @property
    def name(self) -> str:
        """By which `protocol.proof` knows it."""
        # With the term: who calls the coordinator of a term is answered by none of another one.
        return f"coordinator {self.instance} of term {self.term}"


def read_endpoint(job_dir: Path) -> Endpoint | None:
    """What the newest coordinator wrote; None while there is none."""
    try:
        return msgspec.json.decode((job_dir / FILE_NAME).read_bytes(), type=Endpoint)
    # Not there yet, or not readable on this machine yet: both mean the same to whoever waits for a
    # coordinator.
    except (OSError, msgspec.MsgspecError):
        return None


def write_endpoint(job_dir: Path, endpoint: Endpoint) -> None:
    """Replaces the file in one step."""
    work = job_dir / f".{FILE_NAME}.{os.getpid()}"
    work.write_bytes(msgspec.json.encode(endpoint))
    # Readers look at any moment. They see the old address or the new one, and never half of one.
    work.replace(job_dir / FILE_NAME)
