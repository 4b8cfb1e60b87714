"""What `holdfast check` and the coordinator of a running job say to each other."""

from __future__ import annotations

import msgspec

from holdfast.protocol.health import CheckResult


class CheckWish(msgspec.Struct, frozen=True, omit_defaults=True):
    """nodes: by name; empty: those that do not train. disturb: also nodes that train. seconds: about how long each
    check lasts; 0: as usual."""

    nodes: tuple[str, ...] = ()
    deep: bool = False
    disturb: bool = False
    seconds: float = 0.0


class CheckNews(msgspec.Struct, frozen=True):
    """How far a run of checks is. doing: in words. waiting: nodes that have not answered. version: grows with every
    change. over: the results are final."""

    id: int
    version: int
    doing: str
    waiting: tuple[str, ...]
    over: bool
    results: dict[str, tuple[CheckResult, ...]] = {}
