"""The curves of the planner's plots, as values: a terminal and matplotlib draw the same ones."""

from __future__ import annotations

import math

import msgspec

from holdfast import formulas
from holdfast.tools.plan import candidates as c
from holdfast.tools.plan.inputs import Inputs

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
POINTS = 60


class Curve(msgspec.Struct, frozen=True):
    """One line of a picture."""

    name: str
    points: tuple[tuple[float, float], ...]


def goodput_by_size(inputs: Inputs, spares: int, waits: bool) -> list[Curve]:
    """Goodput of every strategy against the number of nodes."""
    curves = []
    for strategy in c.STRATEGIES:
        points = []
        for nodes in SIZES:
            sized = msgspec.structs.replace(inputs, nodes=nodes)
            points.append((float(nodes), c.evaluate(sized, strategy, spares, waits).goodput))
        curves.append(Curve(strategy, tuple(points)))
    return curves


def cost_by_spares(inputs: Inputs, most: int = 16) -> list[Curve]:
    """What the run costs with 0 to `most` spares, in the price's currency, or in GPU-days where there is no price."""
    # At this price a GPU-day costs 1, so that the formula for the cost gives GPU-days.
    priced = inputs if inputs.price else msgspec.structs.replace(inputs, price=1 / 24)
    return [
        Curve(
            f"{strategy}, {'wait' if waits else 'continue with fewer nodes'}",
            tuple((float(k), c.evaluate(priced, strategy, k, waits).cost) for k in range(most + 1)),
        )
        for strategy in c.STRATEGIES
        for waits in (True, False)
    ]


def goodput_by_interval(inputs: Inputs, recovery_s: float) -> list[Curve]:
    """Goodput against the interval between saves, to storage and to memory; each followed by the point of Daly's interval."""
    curves = []
    for name, cost_s in ((c.STORAGE, inputs.cost_s), (c.TIERED, inputs.memory_cost_s)):
        # A save that costs nothing is best made all the time: an interval of 0, which a logarithmic axis cannot show.
        best_s = max(1e-3, formulas.daly_interval_s(cost_s, inputs.mtbf_s))
        spread = [best_s * 10 ** (3 * i / POINTS - 1.5) for i in range(POINTS + 1)]
        goodput = [formulas.goodput(inputs.mtbf_s, s, cost_s, recovery_s) for s in spread]
        curves.append(Curve(name, tuple(zip(spread, goodput, strict=True))))
        at_best = formulas.goodput(inputs.mtbf_s, best_s, cost_s, recovery_s)
        curves.append(Curve(f"{name}: Daly's interval", ((best_s, at_best),)))
    # A run that never finishes has no goodput, and one such point would set the scale of the whole plot.
    return [x for x in curves if all(math.isfinite(y) for _, y in x.points)]
