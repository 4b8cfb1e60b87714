"""Figures as people read them, and times and sizes as people write them. Unknown is a dash, never 0."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.errors import UsageError

UNKNOWN = "–"


def seconds(value: float | None) -> str:
    """`0.21 s`, `12.3 s`, `3 min 05 s`; short times in milliseconds."""
    # Unknown is a dash everywhere. A zero would be read as a measurement.
    if value is None:
        return UNKNOWN
    # The borders lie where the rounding changes the number of digits, so a time is never shown as 100 ms in
    # one place and 0.10 s in the next.
    if value < 0.0995:
        return f"{value * 1e3:.0f} ms" if value >= 0.01 or value == 0 else f"{value * 1e3:.1f} ms"
    if value < 9.995:
        return f"{value:.2f} s"
    if value < 119.95:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 120:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def clock(value: float) -> str:
    """A time since the job's start: `0:35`, `1:02:03`."""
    minutes, rest = divmod(int(value), 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d}"
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def count(value: int | None) -> str:
    """`12,345`."""
    return UNKNOWN if value is None else f"{value:,}"


def size(nbytes: int | None) -> str:
    """`1.50 GB`, `39.1 MB`, `512 B`: powers of 1000, as disks and networks are sold."""
    if nbytes is None:
        return UNKNOWN
    value, unit = float(nbytes), "B"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    if unit == "B":
        return f"{nbytes} B"
    return (
        f"{value:.2f} {unit}"
        if value < 9.995
        else f"{value:.1f} {unit}"
        if value < 99.95
        else f"{value:.0f} {unit}"
    )


def amount(value: float) -> str:
    """`57.05 M`, `812.3 k`: of money in whatever currency."""
    if value >= 1e6:
        return f"{value / 1e6:,.2f} M"
    return f"{value / 1e3:.1f} k" if value >= 1e4 else f"{value:.0f}"


def rate(value: float | None) -> str:
    """`4.90 steps/s`."""
    if value is None:
        return f"{UNKNOWN} steps/s"
    return f"{value:.1f} steps/s" if value >= 9.995 else f"{value:.2f} steps/s"


def share(value: float | None) -> str:
    """`42.3%`."""
    return UNKNOWN if value is None else f"{value * 100:.1f}%"


def loss(value: float | None) -> str:
    """`2.6190`, `0.001312`, `2.191e-14`: at least four significant digits, however small."""
    if value is None:
        return UNKNOWN
    return f"{value:.4g}" if abs(value) < 0.1 else f"{value:.4f}"


def figures(logged: Mapping[str, Mapping[str, Any]]) -> str:
    """`accuracy 0.913, lr 0.0003 of step 80`; where the steps differ each has its own."""
    steps = {entry["step"] for entry in logged.values()}
    own = len(steps) > 1
    parts = [
        f"{name} {UNKNOWN if entry['value'] is None else format(entry['value'], '.4g')}"
        + (f" of step {count(entry['step'])}" if own else "")
        for name, entry in sorted(logged.items())
    ]
    last = f" of step {count(steps.pop())}" if len(steps) == 1 else ""
    return ", ".join(parts) + last


def text(value: object) -> str:
    """A word or a number as it is."""
    return UNKNOWN if value is None or value == "" else str(value)


LEVELS = ("restart", "checkpoint", "in process", "elastic")
"""What happens after a fault, by how much of Holdfast a script uses."""


def level(number: int) -> str:
    """A level with its name: `2 (in process)`."""
    return f"{number} ({LEVELS[number]})" if 0 <= number < len(LEVELS) else str(number)


def plural(number: int, noun: str) -> str:
    """`1 worker`, `2 workers`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def ranks(numbers: Sequence[int]) -> str:
    """`0-3,7`; a dash when there are none."""
    if not numbers:
        return UNKNOWN
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def clip(line: str, width: int) -> str:
    """The line in `width` characters; what does not fit is cut, with an ellipsis in its place."""
    line = " ".join(line.split())
    return line if len(line) <= width else line[: width - 1].rstrip() + "…"


def clip_words(line: str, width: int, whole: Sequence[str]) -> str:
    """As `clip`, but what is in `whole` is never cut: the words beside it share `width` characters."""
    kept = [re.escape(text) for text in sorted(filter(None, whole), key=len, reverse=True)]
    if not kept or len(line) <= width:
        return clip(line, width)
    said = ""
    # `split` with a group keeps what it splits at: every second piece is one of `whole`.
    for index, piece in enumerate(re.split(f"({'|'.join(kept)})", line)):
        if index % 2 or not piece:
            said += piece
            continue
        words = re.sub(r"\s+", " ", piece)
        # Cut once. What follows the cut would not be read as what it is.
        if len(words) > width:
            said += words[: max(0, width - 1)].rstrip() + "…"
            width = 0
        else:
            said += words
            width -= len(words)
    return said


def clip_path(path: str, width: int) -> str:
    """A path in `width` characters: its end is what tells one from the other."""
    # Its beginning is the same for all paths of a job.
    return path if len(path) <= width else "…" + path[len(path) - width + 1 :]


_UNITS_S = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_seconds(where: str, text: str) -> float:
    """`8s`, `500ms`, `2m` or `1.5h` (without a unit: seconds) in seconds. where: the option, for the message.

    Raises:
        UsageError: anything else.
    """
    # No sign, no exponent, no spaces: whatever else a person types is answered with an example, and not
    # guessed.
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h)?", text)
    if match is None:
        raise UsageError(f"{where}={text!r} is not a time; write for example 8s, 500ms or 2m")
    return float(match[1]) * _UNITS_S[match[2] or "s"]


SHARE = "^([0-9]+([.][0-9]*)?|[.][0-9]+)%?$"
"""As `parse_share` reads it."""


def parse_share(option: str, text: str) -> float:
    """`25%` or `0.25`: more than nothing, at most everything. Raises UsageError."""
    share = 0.0
    if re.fullmatch(SHARE, text.strip()):
        share = float(text.strip().removesuffix("%")) / (100 if text.strip().endswith("%") else 1)
    if not 0 < share <= 1:
        raise UsageError(f"{option} must be a share of the nodes (got {text!r}), for example 25% or 0.25")
    return share


SIZES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_size(option: str, text: str) -> int:
    """`8G` in bytes. Raises UsageError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:iB?|B)?", text)
    # Powers of 1024, as memory is sized. Zero is refused: it would mean "no memory at all" for one reader and
    # "no limit" for the next.
    if match is None or float(match[1]) <= 0:
        raise UsageError(f"{option} must be a size (got {text!r}), for example 8G")
    return int(float(match[1]) * SIZES[match[2]])
