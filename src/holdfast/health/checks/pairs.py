"""Which nodes are measured with which, and what that says: pure.

Two rounds single out a bad node or a bad way. First everyone is measured with somebody; then each of a slow pair is
measured again, with one of a fast pair. Who is slow both times is slow itself; who was slow only with that other one has
a bad way to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from holdfast.protocol.health import CheckResult, Condition

Pair = tuple[str, str]

SLOW_SHARE = 0.5
"""Of the bandwidth that the fast quarter has, and twice its latency. (DLRover's check of the network takes the median,
which one bad node among five spoils: the odd one out is in two pairs.)"""

LATENCY_FLOOR_S = 50e-6
"""Differences below are the scheduler's, not the network's."""


class Measured(msgspec.Struct, frozen=True):
    """What a pair of nodes measured."""

    bytes_per_s: float | None
    """The slower direction. 0: they did not reach each other. None: it could not be tried."""
    latency_s: float = 0.0
    """There and back; 0: not measured."""
    why: str = ""
    """What went wrong."""
    damaged: bool = False
    """Bytes came back changed."""


def measured_of(results: list[CheckResult], check: str = "pair") -> Measured:
    """What the check `pair` (or `rdma-pair`) measured, out of its results."""
    pair = next((r for r in results if r.name == check), None)
    if pair is None or pair.condition is Condition.UNKNOWN:
        return Measured(None, why=pair.detail if pair else "no answer")
    latency = next((r.value for r in results if r.name == f"{check}-latency"), None)
    damaged = pair.condition is Condition.FAULTY and bool(pair.value)
    why = pair.detail if latency is None else ""  # else it says the latency
    return Measured((pair.value or 0.0) * 1e9, latency or 0.0, why, damaged)


def first_round(nodes: Sequence[str]) -> list[list[Pair]]:
    """Everyone with somebody. Pairs of one batch have no node in common, so they can be measured at once."""
    pairs = list(zip(nodes[::2], nodes[1::2], strict=False))
    batches = [pairs] if pairs else []
    # In a batch of its own, because the first node is in another pair already and must not be measured twice
    # at once.
    if len(nodes) % 2 and len(nodes) > 1:
        batches.append([(nodes[-1], nodes[0])])
    return batches


def slow_pairs(first: Mapping[Pair, Measured]) -> list[Pair]:
    """Those that are far behind the others, or did not reach each other."""
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
    """Each of a slow pair with one that was fast. Nothing to do without either of them."""
    slow = slow_pairs(first)
    suspects = list(dict.fromkeys(n for p in slow for n in p))
    fast = list(dict.fromkeys(n for p, m in first.items() if p not in slow and m.bytes_per_s for n in p))
    # With an odd number of nodes the first is in two pairs. If one of them is fast, the other partner is to
    # be asked.
    cleared = [n for n in suspects if n in fast]  # with somebody else it was fast already
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
    """A result `pair` for every node, and `link` for those whose way to one other is bad. over: goes before both names,
    `rdma-`."""
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
            told = dict.fromkeys(first[p].why for p in mine)
            results[node] = [
                _pair(over, Condition.FAULTY, best[node], "; ".join(filter(None, (what, *told))))
            ]
        elif mine and node not in again:
            results[node] = [
                _pair(over, Condition.UNKNOWN, best[node], "slow, and not measured again with a fast partner")
            ]
        else:
            results[node] = [_pair(over, Condition.HEALTHY, best[node], "")]
            for other in (_other(p, node) for p in mine):
                # Both ends are fast with others, so it is the way between them: a link, reported once from
                # each side and against no node.
                if again.get(other) is False:
                    measured = first.get((node, other)) or first[(other, node)]
                    results[node].append(_link(over, other, measured))
    return results


def _again(
    first: Mapping[Pair, Measured], second: Mapping[Pair, Measured], slow: Sequence[Pair]
) -> dict[str, bool]:
    """Whether each suspect was slow again; those that were not measured again are not in it."""
    fine = {p: m for p, m in first.items() if p not in slow and m.bytes_per_s}
    again = {node: False for pair in fine for node in pair}
    for pair, measured in second.items():
        if measured.bytes_per_s is not None:
            again[pair[0]] = pair in slow_pairs(fine | {pair: measured})
    return again


def _best(nodes: Iterable[str], measured: Iterable[tuple[Pair, Measured]]) -> dict[str, Measured | None]:
    """The fastest that each node was."""
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
    told = f"{measured.latency_s * 1e6:.0f} µs there and back" if measured.latency_s else ""
    value = round(measured.bytes_per_s / 1e9, 3)
    return CheckResult(
        name=f"{over}pair",
        condition=condition,
        detail="; ".join(filter(None, (detail, told))),
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
