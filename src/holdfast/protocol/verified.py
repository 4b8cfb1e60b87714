"""Which checkpoints were read back and compared with their checksums, and when: lines in the folder of the job that saves them.

What is not in it was not read back as far as anybody knows here; that is not the same as damaged.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from holdfast.errors import Damaged
from holdfast.protocol.decoding import decode

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
