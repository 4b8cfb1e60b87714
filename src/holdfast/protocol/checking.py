"""What `holdfast check` and the coordinator of a running job say to each other."""

from __future__ import annotations

import msgspec

from holdfast.protocol.health import CheckResult


class CheckNews(msgspec.Struct, frozen=True, kw_only=True):
    """How far a run of checks is."""

    id: int
    version: int
    """Grows with every change."""
    doing: str
    """What runs now, in words."""
    waiting: tuple[str, ...]
    """Nodes that have not answered."""
    over: bool
    """The results are final."""
    results: dict[str, tuple[CheckResult, ...]] = {}
