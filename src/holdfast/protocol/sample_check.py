"""Whether every sample came once: what the newest check of a job's record of samples found, kept in the job's folder.

`holdfast data samples` reads the record, which may take minutes, and writes this. The page and the report read this alone, so
a look at a job costs the same however much was recorded.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from holdfast.errors import Damaged
from holdfast.protocol.stored import decode_file

NOTE = "samples-checked.json"
EPOCHS_KEPT = 100
"""Of a record with more epochs: those that something is wrong with, and the newest."""
NOTE_BYTES = 1 << 20


class EpochSeen(msgspec.Struct, frozen=True, kw_only=True):
    """How often the samples of one epoch came."""

    epoch: int
    came: int
    """Samples that came at least once."""
    repeated: int
    """Samples that came more than once."""
    missing: int
    """Samples that did not come. In the last epoch these may be those that are still to come."""


class SamplesChecked(msgspec.Struct, frozen=True, kw_only=True):
    """What a check found."""

    utc: str
    """When it began."""
    folders: tuple[str, ...]
    once: bool | None
    """Every sample came once in each epoch; None: the record does not tell."""
    why: str
    """A sentence for people."""
    steps: int | None = None
    """Committed steps that were looked at."""
    samples: int | None = None
    """In the data set."""
    epochs: tuple[EpochSeen, ...] = ()


_notes = msgspec.json.Decoder(SamplesChecked)


def write_checked(job_dir: Path, found: SamplesChecked) -> None:
    """Keeps it in the job's folder, in place of the one before. Raises OSError."""
    part = job_dir / f".{NOTE}-{os.getpid()}"
    part.write_bytes(msgspec.json.format(msgspec.json.encode(found)))
    # Replaced in one go: whoever looks meanwhile reads the one or the other.
    part.replace(job_dir / NOTE)


def samples_shown(job_dir: Path, recorded: str | None) -> dict[str, Any]:
    """The answer for people, as far as it is known. recorded: the folder of the record, as the job's workers named it.

    Keys: `once` (None: not known), `why`, `recorded`, `checked_utc`, `steps`, `samples`, `epochs`.
    """
    found = _read(job_dir)
    known: dict[str, Any] = {
        "recorded": recorded or None,
        "checked_utc": None,
        "steps": None,
        "samples": None,
        "epochs": [],
    }
    if found is not None:
        kept = msgspec.to_builtins(found)
        known |= {k: kept[k] for k in ("steps", "samples", "epochs")} | {"checked_utc": found.utc}
        return {"once": found.once, "why": found.why, **known}
    if recorded:
        why = (
            f"the samples are recorded in {recorded}; `holdfast data samples --job {job_dir.name}` reads them"
        )
    else:
        why = "the job has not reported a record of samples: `run.steps(ledger=FOLDER)` writes one"
    return {"once": None, "why": f"not checked: {why}", **known}


def _read(job_dir: Path) -> SamplesChecked | None:
    # A note that is damaged is as good as none: the record is still there, and the check can be done again.
    try:
        return decode_file(_notes.decode, job_dir / NOTE, most=NOTE_BYTES)
    except (OSError, Damaged):
        return None
