"""Makes the part of a job's specification about snapshots and checkpoints of the options of `holdfast run`."""

from __future__ import annotations

from pathlib import Path

from holdfast.checkpoint.policy import parse_cadence
from holdfast.checkpoint.tier import open_tier, parse_tier
from holdfast.engines.run_options import SaveOptions
from holdfast.errors import TierError, UsageError
from holdfast.protocol.snapshots import DurableTier, Saving
from holdfast.protocol.units import parse_size


def plan_saving(given: SaveOptions, default: Path) -> Saving:
    """What is to be saved, how often and where.

    Args:
        default: the durable tier when none is named.

    Raises:
        UsageError: an option that cannot work; a tier that cannot be written.
    """
    _cadence("--snapshot-every", given.snapshot_every)
    # There is always a durable tier: what is only in memory is lost with the machines, and nobody should
    # learn of that afterwards.
    tiers = tuple(_tier(text) for text in given.checkpoints) or (DurableTier(str(default)),)
    # Two tiers of one URL would prune each other's checkpoints, each by its own retention.
    if len({t.url for t in tiers}) < len(tiers):
        raise UsageError(f"--checkpoint: the same place is given twice: {', '.join(t.url for t in tiers)}")
    # The default tier is not tried: its folder is the job's own, which does not exist before the job starts.
    for tier in tiers if given.checkpoints else ():
        try:
            open_tier(tier.url).check()
        except TierError as error:
            raise UsageError(f"--checkpoint {tier.url}: {error}") from error
    memory = parse_size("--snapshot-memory", given.snapshot_memory) if given.snapshot_memory else 0
    return Saving(given.snapshot_every, given.copies, memory, tiers)


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
