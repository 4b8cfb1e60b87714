"""Decides which nodes are measured with which, and what the measurements mean: pure.

Two rounds single out a bad node or a bad link. In the first, every node is measured with another one. In the second,
each node of a slow pair is measured again, with a node of a fast pair. A node that is slow both times is itself slow;
one that was slow only in the first round has a bad link to its partner.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from holdfast.protocol.health import CheckResult, Condition

Pair = tuple[str, str]

SLOW_SHARE = 0.5
"""A pair is slow below this share of the bandwidth of the fastest quarter, or above twice that quarter's latency.
(DLRover's check of the network takes the median, which one bad node among five spoils: the odd one out is in two
pairs.)"""

LATENCY_FLOOR_S = 50e-6
"""Smaller differences in latency come from the scheduler, not from the network."""


class Measured(msgspec.Struct, frozen=True):
    """The measurement of a pair of nodes."""

    bytes_per_s: float | None
    """In the slower direction. 0: the two nodes did not reach each other. None: it could not be tried."""
    latency_s: float = 0.0
    """Round-trip time; 0: not measured."""
    why: str = ""
    """The reason of a failure."""
    damaged: bool = False
    """Bytes arrived changed."""


def measured_of(results: list[CheckResult], check: str = "pair") -> Measured:
    """The measurement of the check `pair` (or `rdma-pair`), taken from its results."""
    pair = next((r for r in results if r.name == check), None)
    if pair is None or pair.condition is Condition.UNKNOWN:
        return Measured(None, why=pair.detail if pair else "no answer")
    latency = next((r.value for r in results if r.name == f"{check}-latency"), None)
    damaged = pair.condition is Condition.FAULTY and bool(pair.value)
    why = pair.detail if latency is None else ""  # otherwise the detail is the latency
    return Measured((pair.value or 0.0) * 1e9, latency or 0.0, why, damaged)


def first_round(nodes: Sequence[str]) -> list[list[Pair]]:
    """Pairs each node with another one. Pairs of one batch have no node in common, so they can be measured at once."""
    pairs = list(zip(nodes[::2], nodes[1::2], strict=False))
    batches = [pairs] if pairs else []
    # In a batch of its own, because the first node is in another pair already and must not be measured twice
    # at once.
    if len(nodes) % 2 and len(nodes) > 1:
        batches.append([(nodes[-1], nodes[0])])
    return batches


def slow_pairs(first: Mapping[Pair, Measured]) -> list[Pair]:
    """The pairs that are far behind the others, or did not reach each other."""
    known = {p: m for p, m in first.items() if m.bytes_per_s is not None}
    rates = sorted(m.bytes_per_s for m in known.values() if m.bytes_per_s)
    if not rates:
        return list(known)
    # The upper quartile: in a round of pairs one bad node spoils one pair of every two to five, so half of
    # the pairs of a small job may be slow and the median with them.
    rate = rates[3 * len(rates) // 4]
    latency_s = sorted(m.latency_s for m in known.values() if m.bytes_per_s)[(len(rates) - 1) // 4]
    ceiling_s = max(2 * latency_s, latency_s + LATENCY_FLOOR_S)
    return [
        p
        for p, m in known.items()
        if (m.bytes_per_s or 0) < SLOW_SHARE * rate or m.latency_s > ceiling_s or m.damaged
    ]


def second_round(first: Mapping[Pair, Measured]) -> list[list[Pair]]:
    """Pairs each node of a slow pair with one of a fast pair. Empty if there are no slow or no fast pairs."""
    slow = slow_pairs(first)
    suspects = list(dict.fromkeys(n for p in slow for n in p))
    fast = list(dict.fromkeys(n for p, m in first.items() if p not in slow and m.bytes_per_s for n in p))
    # With an odd number of nodes the first is in two pairs. If one of them is fast, only the other partner is
    # suspect.
    cleared = [n for n in suspects if n in fast]  # already fast with another node
    suspects = [n for n in suspects if n not in cleared]
    if not fast:
        return []
    batches: list[list[Pair]] = []
    # No fast node twice in one batch: two measurements at once would halve each other and accuse both.
    for start in range(0, len(suspects), len(fast)):
        part = suspects[start : start + len(fast)]
        batches.append([(node, fast[i]) for i, node in enumerate(part)])
    return batches


def judge(
    first: Mapping[Pair, Measured], second: Mapping[Pair, Measured], over: str = ""
) -> dict[str, list[CheckResult]]:
    """A result `pair` for every node, and `link` for nodes with a bad link to one other node. over: a prefix of both
    names, such as `rdma-`."""
    slow = slow_pairs(first)
    nodes = list(dict.fromkeys(n for p in first for n in p))
    best = _best(nodes, [*first.items(), *second.items()])
    # No fast pair at all: there is no good partner to measure against, so nobody is blamed.
    unclear = bool(slow) and not second and not any(p not in slow and m.bytes_per_s for p, m in first.items())
    again = _again(first, second, slow)
    results: dict[str, list[CheckResult]] = {}
    for node in nodes:
        mine = [p for p in slow if node in p]
        if best[node] is None:
            why = next((m.why for p, m in first.items() if node in p and m.why), "not measured")
            results[node] = [CheckResult(name=f"{over}pair", condition=Condition.UNKNOWN, detail=why)]
        elif unclear:
            results[node] = [
                _pair(
                    over,
                    Condition.UNKNOWN,
                    best[node],
                    "all pairs are slow: the network or every node is at fault",
                )
            ]
        elif mine and node in again and again[node]:
            partners = ", ".join(_other(p, node) for p in mine)
            what = f"slow or unreachable with {partners}, and also with a fast partner"
            reasons = dict.fromkeys(first[p].why for p in mine)
            results[node] = [
                _pair(over, Condition.FAULTY, best[node], "; ".join(filter(None, (what, *reasons))))
            ]
        elif mine and node not in again:
            results[node] = [
                _pair(over, Condition.UNKNOWN, best[node], "slow, and not measured again with a fast partner")
            ]
        else:
            results[node] = [_pair(over, Condition.HEALTHY, best[node], "")]
            for other in (_other(p, node) for p in mine):
                # Both ends are fast with other nodes, so the link between them is bad. It is reported once
                # from each side, and as a fault of neither node.
                if again.get(other) is False:
                    measured = first.get((node, other)) or first[(other, node)]
                    results[node].append(_link(over, other, measured))
    return results


def _again(
    first: Mapping[Pair, Measured], second: Mapping[Pair, Measured], slow: Sequence[Pair]
) -> dict[str, bool]:
    """For each suspect that was measured again, whether it was slow again."""
    fine = {p: m for p, m in first.items() if p not in slow and m.bytes_per_s}
    again = {node: False for pair in fine for node in pair}
    for pair, measured in second.items():
        if measured.bytes_per_s is not None:
            again[pair[0]] = pair in slow_pairs(fine | {pair: measured})
    return again


def _best(nodes: Iterable[str], measured: Iterable[tuple[Pair, Measured]]) -> dict[str, Measured | None]:
    """The best measurement of each node."""
    best: dict[str, Measured | None] = dict.fromkeys(nodes)
    for pair, m in measured:
        for node in pair:
            if m.bytes_per_s is None:
                continue
            known = best.get(node)
            if known is None or m.bytes_per_s > (known.bytes_per_s or 0):
                best[node] = m
    return best


def _pair(over: str, condition: Condition, measured: Measured | None, detail: str) -> CheckResult:
    if measured is None or not measured.bytes_per_s:
        return CheckResult(name=f"{over}pair", condition=condition, detail=detail)
    latency = f"{measured.latency_s * 1e6:.0f} µs there and back" if measured.latency_s else ""
    value = round(measured.bytes_per_s / 1e9, 3)
    return CheckResult(
        name=f"{over}pair",
        condition=condition,
        detail="; ".join(filter(None, (detail, latency))),
        value=value,
        unit="GB/s",
    )


def _link(over: str, other: str, measured: Measured) -> CheckResult:
    rate = measured.bytes_per_s or 0.0
    how = "bytes came back changed" if measured.damaged else "slow with this node, fast with another"
    if not rate:
        how = "these two nodes cannot connect to each other, and both connect to others"
    return CheckResult(
        name=f"{over}link",
        condition=Condition.FAULTY,
        detail=how,
        value=round(rate / 1e9, 3),
        unit="GB/s",
        with_node=other,
    )


def _other(pair: Pair, node: str) -> str:
    return pair[1] if pair[0] == node else pair[0]
