"""Moments as Kubernetes writes them: UTC, whole seconds."""

from __future__ import annotations

from datetime import UTC, datetime

from holdfast.errors import Damaged
from holdfast.protocol.wire.decoding import decode


def timestamp(utc_s: float) -> str:
    """`2026-11-22T09:00:11Z`."""
    return datetime.fromtimestamp(utc_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def from_timestamp(text: str | None) -> float | None:
    """Seconds since 1970; None: it is not known, or nobody can read it."""
    try:
        return decode(_utc_s, text, "a time") if text else None
    except Damaged:
        return None


def _utc_s(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
