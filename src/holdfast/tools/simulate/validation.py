"""Compares the planner with itself and with published numbers. If a published number cannot be reproduced, the output
says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from holdfast import formulas as f
from holdfast.tools.plan.renewal import Process, simulate
from holdfast.tools.simulate.scenario import FailureClass, Scenario
from holdfast.tools.simulate.trial import run

HOUR_S, DAY_S = f.HOUR_S, f.DAY_S
POINTS = 0.005
"""Tolerance: two goodputs agree if they differ by no more than this."""

MTBF_HOURS = (0.5, 3.09, 8.0, 24.7)
COSTS = ((30.0, 600.0), (120.0, 1800.0), (5.0, 60.0))
"""Checkpoint cost and recovery, in seconds."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One comparison."""

    name: str
    expected: float
    ours: float
    unit: str
    """`%`: both values are shares."""
    reproduced: bool | None
    """None: the publication lacks the data that its computation needs."""
    note: str = ""


def validate(trials: int = 10_000) -> list[Comparison]:
    """Runs all comparisons; takes some seconds."""
    return [*_formula(trials), *_core(), *_rates(), *_public()]


def _formula(trials: int) -> Iterator[Comparison]:
    for mtbf_h in MTBF_HOURS:
        for cost_s, recovery_s in COSTS:
            mtbf_s = mtbf_h * HOUR_S
            interval_s = f.daly_interval_s(cost_s, mtbf_s)
            exact = f.goodput(mtbf_s, interval_s, cost_s, recovery_s)
            # Long enough for hundreds of failures in each trial, so that the difference shows an error and
            # not chance.
            work_s = 200 * mtbf_s if mtbf_h >= 1 else 40 * mtbf_s
            found = simulate(
                Process(
                    work_s=work_s,
                    mtbf_s=mtbf_s,
                    interval_s=interval_s,
                    cost_s=cost_s,
                    recoveries=((1.0, recovery_s),),
                ),
                trials,
            )
            name = f"formula, simulation: MTBF {mtbf_h:g} h, save {cost_s:g} s, recovery {recovery_s:g} s"
            yield Comparison(
                name=name,
                expected=exact,
                ours=found.goodput,
                unit="%",
                reproduced=abs(exact - found.goodput) <= POINTS,
            )


def _core() -> Iterator[Comparison]:
    """The core decides, with enough spares: a failure then costs detection, joining and the transfer of the state from
    a peer."""
    kind = (FailureClass(name="node", scope="node", rate=0.005),)
    for nodes, peer_s in ((16, 60.0), (64, 30.0), (256, 10.0)):
        # With more spares than can fail at once, so that a failure costs as much as in the formula, and no
        # waiting.
        s = Scenario(
            nodes=nodes, work_s=3 * DAY_S, classes=kind, spares=16, peer_s=peer_s, replace_s=60, detection_s=5
        )
        found = [run(s, seed) for seed in range(4)]
        goodput = sum(t.spent.training for t in found) / sum(t.wall_s for t in found)
        recovery_s = s.detection_s + s.join_s + s.peer_s
        mtbf_s = f.mtbf_hours(nodes, s.rate) * HOUR_S
        exact = f.goodput(mtbf_s, s.step_s, 0.0, recovery_s)
        yield Comparison(
            name=f"formula, core: {nodes} nodes, a failure every {mtbf_s / 60:.0f} min, recovery {recovery_s:g} s",
            expected=exact,
            ours=goodput,
            unit="%",
            reproduced=abs(exact - goodput) <= 2 * POINTS,
        )


def _rates() -> Iterator[Comparison]:
    for name, failures, nodes, hours, published in (
        ("OPT-175B", 105, 124, 1440, 0.0588),
        ("Llama 3.1 405B", 417, 2000, 1296, 0.0161),
        ("MPT-7B", 4, 55, 228, 0.0319),
    ):
        rate = 100 * f.rate_per_node_hour(failures, nodes, hours)
        low, high = (100 * x for x in f.rate_interval(failures, nodes * hours))
        note = f"{failures} events: 95% between {low:.4f} and {high:.4f}"
        yield Comparison(
            name=f"{name}: failures per node-hour",
            expected=published,
            ours=rate,
            unit="% rate",
            reproduced=round(rate, 4) == published,
            note=note,
        )


def _public() -> Iterator[Comparison]:
    mtbf_h = f.mtbf_hours(2048, 419 / (2048 * 54 * 24))
    yield Comparison(
        name="Llama 3: hours between failures",
        expected=3.1,
        ours=mtbf_h,
        unit="h",
        reproduced=round(mtbf_h, 1) == 3.1,
        note="419 in 54 days",
    )
    most_s = _most(lambda s: f.goodput(mtbf_h * HOUR_S, 60.0, 1.0, s), 0.9)
    yield Comparison(
        name="Llama 3: minutes lost per failure at 90% effective time",
        expected=18.6,
        ours=mtbf_h * 60 * 0.1,
        unit="min",
        reproduced=abs(mtbf_h * 6 - 18.6) < 0.1,
        note=f"with a snapshot every minute, >90% needs recovery in less than {most_s / 60:.0f} min",
    )
    kind = (FailureClass(name="node", scope="node", rate=0.0161e-2),)
    s = Scenario(nodes=2048, work_s=10 * DAY_S, classes=kind, spares=8, peer_s=105, detection_s=10)
    ours = run(s, 1).goodput
    yield Comparison(
        name="Llama 3: effective time, at its rate, with 105 s from peers",
        expected=0.9,
        ours=ours,
        unit="%",
        reproduced=ours > 0.9,
        note="published as >90%",
    )
    rate = 0.0161e-2
    # Neither reproduced nor refuted: the note says what is missing in the source, and no number of ours is
    # adapted to it.
    robust_s = f.mtbf_hours(1200, rate) * HOUR_S
    ours = f.goodput(robust_s, 60.0, 1.0, 109 + 65)
    allowed = _most(lambda x: f.goodput(robust_s, 60.0, 1.0, x), 0.97)
    yield Comparison(
        name="ByteRobust: ETTR on 9,600 GPUs",
        expected=0.97,
        ours=ours,
        unit="%",
        reproduced=None,
        note="its failure rate is not published; at Llama's, with its own 109 s + 65 s, it comes out higher: 97% would be "
        f"{allowed / 60:.0f} min per failure",
    )
    lost = 178_000 / (992 * 1440)
    yield Comparison(
        name="OPT-175B: share of GPU-hours lost",
        expected=0.16,
        ours=lost,
        unit="%",
        reproduced=None,
        note="178,000 of 992 GPUs x 1,440 h are 12.5%; of what 16% are is not said",
    )
    rsc = 24_000 / 6.5
    yield Comparison(
        name="Meta RSC-1: hours at 16,384 GPUs",
        expected=1.8,
        ours=rsc / 2048,
        unit="h",
        reproduced=round(rsc / 2048, 1) == 1.8,
    )
    yield Comparison(
        name="Meta RSC-1: hours at 1,024 GPUs",
        expected=7.9,
        ours=rsc / 128,
        unit="h",
        reproduced=None,
        note="does not follow from its own rate of 6.5 per 1,000 node-days: small jobs fail of other causes",
    )
    yield Comparison(
        name="Llama 3: share of GPU faults (148 of 419)",
        expected=0.301,
        ours=148 / 419,
        unit="%",
        reproduced=None,
        note="the paper prints 30.1%",
    )


def _most(falling: Callable[[float], float], wanted: float) -> float:
    """The largest argument for which a decreasing function is still at least `wanted`."""
    low, high = 0.0, 86400.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > wanted else (low, middle)
    return low
