"""Which events a person has to do something about, and which of them are sent when. Pure.

A matter is told once. What comes again, or with many others, must not become a storm of messages at night: the same matter is
silent for hours, messages keep a distance, and what comes between two of them is one message.
"""

from __future__ import annotations

import msgspec

from holdfast.coordinator.service.store import LedgerEntry
from holdfast.observe.event_text import event_line
from holdfast.observe.traces import event_id
from holdfast.tools.tracking.base import Matter, Notes

APART_S = 60.0
"""Between two messages."""
AGAIN_S = 6 * 3600.0
"""The same matter is not told again before."""
MOST = 20
"""Matters of one message; of those beyond them the number is told."""
REMEMBERED = 256
"""Matters that are recognized when they come again."""
PATIENCE_S = 600.0
"""The longest time between two attempts to deliver."""
TEXT_CHARS = 500


def matter_of(entry: LedgerEntry, ledger: str, job: str) -> Matter | None:
    """What a person has to do because of an event; None: nothing."""
    fields = entry.fields
    incident = fields.get("incident")
    match entry.kind:
        case "asked":
            key, command = f"asked {fields.get('node')} {fields.get('rule')}", _why(job, incident)
        case "ended" if fields.get("outcome") == "failed":
            key, command = "ended", f"holdfast report --job {job}"
        case "ledger-failed":
            key, command = entry.kind, f"holdfast status --job {job}"
        case "tier-failed" | "tier-slow":
            command = f"holdfast events --kind {entry.kind} --tail 5 --job {job}"
            key = f"{entry.kind} {fields.get('url')}"
        case "storm" | "blast-limit":
            key, command = f"{entry.kind} {fields.get('rule')}", f"holdfast why --job {job}"
        case _:
            return None
    return Matter(
        key=key,
        id=event_id(ledger, entry.seq),
        text=event_line(msgspec.to_builtins(entry), everything=True, width=TEXT_CHARS),
        command=command,
        utc=entry.utc,
        incident=incident,
        node=fields.get("node"),
    )


def _why(job: str, incident: int | None) -> str:
    return f"holdfast why --job {job}" if incident is None else f"holdfast why {incident} --job {job}"


def take_in(notes: Notes, matters: list[Matter], now_s: float) -> Notes:
    """With what is new among the matters. now_s: seconds since 1970."""
    # Forgotten after AGAIN_S: a matter that still stands then is told once more.
    told = {key: at_s for key, at_s in notes.told.items() if now_s - at_s < AGAIN_S}
    new = []
    for matter in matters:
        if matter.key not in told:
            new.append(matter)
            told[matter.key] = now_s
    waiting = (*notes.waiting, *new)
    newest = dict(sorted(told.items(), key=lambda item: item[1])[-REMEMBERED:])
    # What is beyond the bound is counted: whoever gets the message has to know that there is more.
    more = notes.more + max(0, len(waiting) - MOST)
    return msgspec.structs.replace(notes, waiting=waiting[:MOST], more=more, told=newest)


def sent(notes: Notes, now_s: float) -> Notes:
    """After all that waited was delivered."""
    return msgspec.structs.replace(notes, waiting=(), more=0, failures=0, next_s=now_s + APART_S)


def not_sent(notes: Notes, now_s: float) -> Notes:
    """After an attempt that failed: each waits twice as long as the one before."""
    wait_s = min(PATIENCE_S, APART_S * 2**notes.failures)
    return msgspec.structs.replace(notes, failures=notes.failures + 1, next_s=now_s + wait_s)
