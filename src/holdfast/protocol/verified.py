"""What was verified, kept in the job's folder: which checkpoints were read back and compared with their checksums, and whether
every sample came once.

What is not in it was not read back as far as anybody knows here; that is not the same as damaged.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from holdfast.errors import Damaged
from holdfast.protocol.job_report import EpochSeen, SamplesAnswer
from holdfast.protocol.wire.decoding import decode
from holdfast.protocol.wire.stored import decode_file

NOTES = "verified.jsonl"
MOST_BYTES = 1 << 20
"""Of the file; of a longer one the newest line of each checkpoint stays."""


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint was read back."""

    utc: str
    """When that was done."""
    url: str
    """The tier."""
    step: int
    saved_at: str | None = None
    """When it was saved, by its manifest; None: the manifest could not be read. A step may be saved again."""
    whole: bool
    """Every byte was as it was saved."""
    why: str = ""
    """What is wrong."""


_lines = msgspec.json.Decoder(Verified)
ReadBack = Mapping[tuple[str, int], Verified]


def note_verified(job_dir: Path, found: Verified) -> None:
    """Adds a line. Raises OSError."""
    path = job_dir / NOTES
    if path.exists() and path.stat().st_size > MOST_BYTES:
        part = job_dir / f".{NOTES}-{os.getpid()}"
        part.write_bytes(b"".join(msgspec.json.encode(x) + b"\n" for x in verified(job_dir).values()))
        part.replace(path)
    line = msgspec.json.encode(found) + b"\n"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        # One call for a line: two commands at once do not tear each other's.
        os.write(fd, line)
    finally:
        os.close(fd)


def verified(job_dir: Path) -> dict[tuple[str, int], Verified]:
    """Tier and step to the newest look at that checkpoint. Lines that cannot be read are left out: then it is not known."""
    try:
        with (job_dir / NOTES).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 2 * MOST_BYTES))
            content = file.read(2 * MOST_BYTES)
    except OSError:
        return {}
    found: dict[tuple[str, int], Verified] = {}
    for line in content.split(b"\n"):
        try:
            one = decode(_lines.decode, line, "a line")
        except Damaged:
            continue
        found[one.url, one.step] = one
    return found


NOTE = "samples-checked.json"
EPOCHS_KEPT = 100
"""Of a record with more epochs: those that something is wrong with, and the newest."""
NOTE_BYTES = 1 << 20


# ---------------------------------------------------------------- sample check
# Whether every sample came once: what the newest check of a job's record of samples found, kept in the job's folder.
#
# `holdfast data samples` reads the record, which may take minutes, and writes this. The page and the report read this
# alone, so a look at a job costs the same however much was recorded.


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


def samples_shown(job_dir: Path, recorded: str | None) -> SamplesAnswer:
    """The answer. recorded: the folder of the record, as the job's workers named it."""
    recorded = recorded or None
    if (found := _read(job_dir)) is not None:
        return SamplesAnswer(
            once=found.once,
            why=found.why,
            recorded=recorded,
            checked_utc=found.utc,
            steps=found.steps,
            samples=found.samples,
            epochs=found.epochs,
        )
    if recorded:
        why = (
            f"the samples are recorded in {recorded}; `holdfast data samples --job {job_dir.name}` reads them"
        )
    else:
        why = "the job has not reported a record of samples: `run.steps(ledger=FOLDER)` writes one"
    return SamplesAnswer(why=f"not checked: {why}", recorded=recorded)


def _read(job_dir: Path) -> SamplesChecked | None:
    # A note that is damaged is as good as none: the record is still there, and the check can be done again.
    try:
        return decode_file(_notes.decode, job_dir / NOTE, most=NOTE_BYTES)
    except (OSError, Damaged):
        return None
