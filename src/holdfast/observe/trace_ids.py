"""Ids of traces and spans, made of what the ledger says: whoever makes them again makes the same ones."""

from __future__ import annotations

from hashlib import sha256


def trace_id(ledger: str, incident: int | str) -> str:
    """32 hexadecimal digits. ledger: its name, which no other start of a job has. incident: its number; a text: of what else
    has a trace."""
    return _digest(ledger, str(incident))[:32]


def span_id(ledger: str, incident: int | str, name: str) -> str:
    """16 hexadecimal digits. name: of the span within the incident's trace."""
    return _digest(ledger, str(incident), name)[:16]


def event_id(ledger: str, seq: int) -> str:
    """16 hexadecimal digits, of one event."""
    return _digest(ledger, "event", str(seq))[:16]


def _digest(*parts: str) -> str:
    # A separator that no part has, so that two lists of parts never make the same text.
    return sha256("\0".join(parts).encode()).hexdigest()
