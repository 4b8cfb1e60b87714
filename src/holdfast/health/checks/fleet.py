"""Compares nodes with each other: pure. A device far behind others of its model is faulty, even if it passes its floor."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from holdfast.protocol.health import CheckResult, Condition

LEAST_VALUES = 4
"""With fewer devices of a model, there is no median against which one of them could be judged."""

SIGMAS = 4.0
_MAD_TO_SIGMA = 1.4826

TOLERANCES = {
    "gpu": 0.05,  # SuperBench calls 5% below the baseline defective
    "cpu-matrix": 0.1,
    "memory-copy": 0.1,
    "all-reduce": 0.2,
    "loopback": 0.5,
    "pair": 0.5,
    "disk": 0.5,
    "rdma-ports": 0.0,
    "rdma-rate": 0.0,  # link speed: no tolerance
}
"""How much worse than the median a healthy device may be, as a share of the median. The longest prefix of the check's
name applies."""

Results = Mapping[str, Sequence[CheckResult]]


def tolerance(name: str) -> float | None:
    """The tolerance for a check. None: its values are not compared (free space says nothing about health)."""
    fit = [key for key in TOLERANCES if name.startswith(key)]
    return TOLERANCES[max(fit, key=len)] if fit else None


def against_fleet(by_node: Results) -> dict[str, list[CheckResult]]:
    """Returns the same results, except that a healthy one becomes faulty if it is far worse than the median of its
    model, or its digest differs from that of most devices of its model."""
    groups: dict[tuple[str, str], list[CheckResult]] = defaultdict(list)
    for results in by_node.values():
        for r in results:
            # Faulty results count for the median as well: leaving out the worst would raise it and make the
            # next worst faulty.
            if r.condition is not Condition.UNKNOWN and not r.with_node:
                # Of one model only. A node of another generation is not slow because the rest is newer.
                groups[r.name, r.model].append(r)
    return {
        node: [_judged(r, groups.get((r.name, r.model), [])) for r in results]
        for node, results in by_node.items()
    }


def summary(results: Results) -> dict[str, Condition]:
    """The condition of each node as a whole: faulty if any result is, else unknown if any is. A bad link is not a fault
    of the node."""
    order = (Condition.FAULTY, Condition.UNKNOWN)
    return {
        node: next(
            (c for c in order if any(r.condition is c and not r.with_node for r in rs)), Condition.HEALTHY
        )
        if rs
        else Condition.UNKNOWN
        for node, rs in results.items()
    }


def _judged(result: CheckResult, group: Sequence[CheckResult]) -> CheckResult:
    if result.condition is not Condition.HEALTHY or result.with_node:
        return result
    if result.digest:
        return _same_bits(result, group)
    allowed = tolerance(result.name)
    values = [r.value for r in group if r.value is not None]
    if allowed is None or result.value is None or len(values) < LEAST_VALUES:
        return result
    median = statistics.median(values)
    # The median distance is untouched by the one bad node that is looked for; a standard deviation would grow
    # with it and hide it. The factor makes it the standard deviation of a normal distribution.
    spread = _MAD_TO_SIGMA * statistics.median(abs(v - median) for v in values)
    behind = result.value - median if result.lower else median - result.value
    # Both tests: the tolerance keeps a fleet of nearly equal nodes from losing its last by 1%, the spread
    # keeps a fleet that is uneven by nature from losing half.
    if not median or behind <= allowed * median or behind <= SIGMAS * spread:
        return result
    side = "above" if result.lower else "below"
    why = f"{behind / median:.0%} {side} the median of {len(values)} ({median:g} {result.unit})"
    return _faulty(result, why)


def _same_bits(result: CheckResult, group: Sequence[CheckResult]) -> CheckResult:
    """A device whose digest differs from the majority's is faulty. Without a majority all are unknown."""
    counts = Counter(r.digest for r in group if r.digest)
    common, most = counts.most_common(1)[0]
    total = counts.total()
    if len(counts) == 1 or (result.digest == common and most * 2 > total):
        return result
    # Two that differ contradict each other; three, with a majority of two, are the fewest that can tell.
    if most * 2 > total and total >= 3:
        return _faulty(result, f"its result differs from {most} of {total} devices of its model, which agree")
    detail = f"{len(counts)} different results among {total} devices of its model: no majority shows which is right"
    return msgspec.structs.replace(result, condition=Condition.UNKNOWN, detail=detail)


def _faulty(result: CheckResult, why: str) -> CheckResult:
    detail = "; ".join(filter(None, (why, result.detail)))
    return msgspec.structs.replace(result, condition=Condition.FAULTY, detail=detail)
