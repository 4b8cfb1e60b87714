"""Stacks that faulthandler wrote: the main thread's innermost frames, to tell who differs."""

from __future__ import annotations

from pathlib import Path

FRAMES = 12
"""The standard library's and torch's own take some before the script's come."""


def innermost(path: Path, offset: int) -> str:
    """The innermost frames of the main thread in the dump that begins at `offset`; '' when there is none."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    threads = text.strip().split("\n\n")
    main = threads[-1].splitlines()[1:] if threads else []
    return "\n".join(line.strip() for line in main[:FRAMES])
