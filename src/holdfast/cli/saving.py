"""What a job saves, from the options of `holdfast run`."""

from __future__ import annotations

import re
from pathlib import Path

from holdfast.checkpoint.policy import parse_cadence
from holdfast.checkpoint.tier import open_tier
from holdfast.errors import TierError, UsageError
from holdfast.protocol.snapshots import DurableTier, Saving

SIZES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
EXAMPLE = "--checkpoint s3://bucket/run,every=10m,keep=3,keep-every=10000"


def plan_saving(every: str, copies: int, memory: str, checkpoints: tuple[str, ...], default: Path) -> Saving:
    """What is to be saved, how often and where.

    Args:
        default: the durable tier when none is named.

    Raises:
        UsageError: an option that cannot work; a tier that cannot be written.
    """
    _cadence("--snapshot-every", every)
    if copies < 0:
        raise UsageError(f"--copies {copies}: 0 or more")
    tiers = tuple(parse_tier(text) for text in checkpoints) or (DurableTier(str(default)),)
    if len({t.url for t in tiers}) < len(tiers):
        raise UsageError(f"--checkpoint: the same place is named twice: {', '.join(t.url for t in tiers)}")
    for tier in tiers if checkpoints else ():
        try:
            open_tier(tier.url).check()
        except TierError as error:
            raise UsageError(f"--checkpoint {tier.url}: {error}") from error
    return Saving(every, copies, parse_size("--snapshot-memory", memory) if memory else 0, tiers)


def parse_tier(text: str) -> DurableTier:
    """`URL[,every=CADENCE][,keep=N][,keep-every=STEPS]`. Raises UsageError."""
    url, *options = text.split(",")
    if not url:
        raise UsageError(f"--checkpoint {text!r}: no folder or URL, for example {EXAMPLE}")
    fields: dict[str, str] = {}
    for option in options:
        name, equals, value = option.partition("=")
        if name not in ("every", "keep", "keep-every") or not equals or name in fields:
            raise UsageError(f"--checkpoint {text!r}: {option!r} is no option of it, for example {EXAMPLE}")
        fields[name] = value
    for name in ("keep", "keep-every"):
        if not re.fullmatch(r"\d+", fields.get(name, "1")):
            raise UsageError(f"--checkpoint {text!r}: {name} is a whole number, for example {EXAMPLE}")
    if int(fields.get("keep", "2")) < 1:
        raise UsageError(f"--checkpoint {text!r}: keep at least 1, the newest")
    every = fields.get("every", "auto")
    _cadence(f"--checkpoint {text!r}: every", every)
    place = url if "://" in url else str(Path(url).absolute())
    return DurableTier(place, every, int(fields.get("keep", "2")), int(fields.get("keep-every", "0")))


def parse_size(option: str, text: str) -> int:
    """`8G` in bytes. Raises UsageError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", text)
    if match is None or float(match[1]) <= 0:
        raise UsageError(f"{option} {text!r}: write a size, for example 8G")
    return int(float(match[1]) * SIZES[match[2]])


def _cadence(option: str, text: str) -> None:
    try:
        parse_cadence(text)
    except UsageError as error:
        raise UsageError(f"{option}: {error}") from error
