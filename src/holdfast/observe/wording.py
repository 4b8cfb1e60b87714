"""Events in words."""

from __future__ import annotations

from typing import Any


def event_line(entry: dict[str, Any]) -> str:
    """One line for a ledger entry; '' for those that are of no interest to a person."""
    f = entry["fields"]
    return f"{entry['kind']}: " + ", ".join(f"{k}={v}" for k, v in f.items() if v not in (None, [], ""))
