"""What a job saves, from the options of `holdfast run`."""

from __future__ import annotations

from pathlib import Path

from holdfast.checkpoint.policy import parse_cadence
from holdfast.checkpoint.tier import open_tier, parse_tier
from holdfast.errors import TierError, UsageError
from holdfast.protocol.sizes import parse_size
from holdfast.protocol.snapshots import DurableTier, Saving


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
    tiers = tuple(_tier(text) for text in checkpoints) or (DurableTier(str(default)),)
    if len({t.url for t in tiers}) < len(tiers):
        raise UsageError(f"--checkpoint: the same place is named twice: {', '.join(t.url for t in tiers)}")
    for tier in tiers if checkpoints else ():
        try:
            open_tier(tier.url).check()
        except TierError as error:
            raise UsageError(f"--checkpoint {tier.url}: {error}") from error
    return Saving(every, copies, parse_size("--snapshot-memory", memory) if memory else 0, tiers)


def _tier(text: str) -> DurableTier:
    try:
        return parse_tier(text)
    except UsageError as error:
        raise UsageError(f"--checkpoint {error}") from error


def _cadence(option: str, text: str) -> None:
    try:
        parse_cadence(text)
    except UsageError as error:
        raise UsageError(f"{option}: {error}") from error
