"""What `holdfast check` and the coordinator of a running job say to each other."""

from __future__ import annotations

import msgspec

from holdfast.protocol.health import CheckResult


class CheckNews(msgspec.Struct, frozen=True):
    """How far a run of checks is. doing: in words. waiting: nodes that have not answered. version: grows with every
    change. over: the results are final."""

    id: int
    version: int
    doing: str
    waiting: tuple[str, ...]
    over: bool
    results: dict[str, tuple[CheckResult, ...]] = {}
