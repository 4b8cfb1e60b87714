"""Which rung of the ladder is next, and whether it may be taken: pure functions of what was tried before.

restart worker -> reset device -> reboot -> replace -> ask a person
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from holdfast.coordinator.kernel.health_state import Act
from holdfast.protocol.health import Remedy, acts_on_node

DAY_S = 86_400.0

LADDER = (Remedy.RESTART_WORKER, Remedy.RESET_DEVICE, Remedy.REBOOT, Remedy.REPLACE)

TRIES = {Remedy.RESTART_WORKER: 2, Remedy.RESET_DEVICE: 1, Remedy.REBOOT: 2}
"""So often within `TRIES_WINDOW_S` a rung is tried for one cause on one device; the next time it is the rung above. An
error that asks for a reboot after two reboots is the hardware's (gpud: the same numbers)."""

TRIES_WINDOW_S = 3 * DAY_S

NODE_ACTS = 5
NODE_WINDOW_S = 7 * DAY_S
"""A machine that was repaired so often within the window is replaced, whatever is asked for (NVSentinel: to support)."""

BACK_OFF_S = 60.0
BACK_OFF_MOST_S = 3600.0
"""Between two repairs of one machine that can wait: 60 s, and twice as long each time."""

SOFT_SOURCES = frozenset({"worker", "peers", "log"})
"""What these say of a node may as well be the script's doing or the network's: a majority that is well must stand
against it, and it must come twice; unless it is firm: a user said how much of it is a fault."""


class Decision(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What is done about a finding, and why."""

    does: Remedy
    """The remedy; WATCH: nothing."""
    reason: str
    """For people."""
    against: str = ""
    """What spoke against acting, one word; empty: nothing did."""
    weighed: tuple[str, ...] = ()
    """What was looked at, in words."""
    after_s: float | None = None
    """Not before this time on the core's clock; then it is decided again. None: it is decided."""


def soft(source: str, firm: bool) -> bool:
    """One finding of this kind is not enough."""
    return source in SOFT_SOURCES and not firm


def rung(asked: Remedy, before: Sequence[Act]) -> Remedy:
    """The rung for a cause. before: what was done for it on this device lately."""
    # Never below what the rule asks for, and never back down within the window: a rung that did not help has
    # had its chances.
    at = LADDER.index(asked)
    while LADDER[at] in TRIES:
        same = [a for a in before if a.remedy is LADDER[at]]
        # One that failed to be carried out is not tried again. A driver that refuses a reset refuses the next
        # one, too.
        if len(same) < TRIES[LADDER[at]] and not any(a.error for a in same):
            break
        at += 1
    return LADDER[at]


def for_cause(acts: Sequence[Act], machine: str, device: str, rule: str, now: float) -> list[Act]:
    """What was done for one cause on one device (or on the node, where either is not known)."""
    return [
        a
        for a in acts
        if a.machine == machine
        and a.rule == rule
        and now - a.at_s <= TRIES_WINDOW_S
        # Where one of the two is unknown it may be the same. Erring on that side climbs the ladder sooner,
        # and does not repeat a reset for ever.
        and (not device or not a.device or a.device == device)
    ]


def repairs(acts: Sequence[Act], machine: str, now: float) -> list[Act]:
    """Remedies that took a machine out of its job within the window."""
    return [
        a for a in acts if a.machine == machine and acts_on_node(a.remedy) and now - a.at_s <= NODE_WINDOW_S
    ]


def back_off_s(done: Sequence[Act]) -> float:
    """How long after the last repair the next one waits, if it can."""
    # Doubling, so that a machine which breaks after every repair costs the job less and less until it is
    # replaced.
    return min(BACK_OFF_MOST_S, BACK_OFF_S * 2.0 ** (len(done) - 1)) if done else 0.0


def blast_limit(fleet: int, share: float) -> int:
    """So many nodes at most are acted on within the window; at least one."""
    # At least one, or a job of three nodes could never replace any.
    return max(1, int(fleet * share))
