"""What `holdfast check` and the coordinator of a running job say to each other."""

from __future__ import annotations

import msgspec

from holdfast.protocol.health import CheckResult


class PairFigures(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What two nodes measured between them."""

    nodes: tuple[str, str]
    bytes_per_s: float | None = None
    """The slower direction. 0: they did not reach each other. None: it could not be tried."""
    latency_s: float = 0.0
    """There and back; 0: not measured."""
    why: str = ""
    """What went wrong."""
    damaged: bool = False
    """Bytes came back changed."""


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
    pairs: tuple[PairFigures, ...] = ()
    """Of every pair of nodes, if that was asked for, when it is over."""
