"""The strategies to survive failures, and the result of each: wall time, cost, goodput, and their spread."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from holdfast import formulas
from holdfast.errors import UsageError
from holdfast.tools.plan.inputs import Inputs
from holdfast.tools.plan.renewal import Process, available, simulate

STORAGE, TIERED, PEERS = "restart from storage", "tiered", "peers in memory"
STRATEGIES = (STORAGE, TIERED, PEERS)
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Factors by which the failure rate may be wrong."""
FINISHES = 0.02
"""With less goodput than this, a run does not finish in any practical sense."""
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
POINTS = 60


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One strategy to survive failures, with its parameters and results."""

    strategy: str
    """One of `STRATEGIES`."""
    spares: int
    """Number of spare nodes."""
    waits: bool
    """Without a spare the job waits for a new node; otherwise it continues on fewer nodes."""
    interval_s: float
    """Seconds of training between two saves."""
    recovery_s: float
    """Mean duration of one recovery, without repeated work."""
    recoveries: tuple[tuple[float, float], ...]
    """The kinds of recovery: the probability of each, and its seconds."""
    cost_s: float
    """How long one save stalls training."""
    goodput: float
    """The share of wall time that trains and is kept."""
    wall_s: float
    """Expected wall time; infinite if the run does not finish."""
    cost: float
    """In the currency of the price; spares included."""
    percentiles_s: tuple[float, ...] = ()
    """10th, 50th and 90th percentile of wall time. Empty if the run does not finish, or numpy is missing."""
    best: bool = False
    """It takes the fewest GPU-hours of all candidates."""

    @property
    def name(self) -> str:
        """Its name for people."""
        without = "wait" if self.waits else "go on smaller"
        return f"{self.strategy}, {self.spares} spare{'s' if self.spares != 1 else ''}, then {without}"


def evaluate(inputs: Inputs, strategy: str, spares: int, waits: bool, rate_factor: float = 1.0) -> Candidate:
    """Evaluates one candidate in closed form."""
    mtbf_s = inputs.mtbf_s / rate_factor
    cost_s, interval_s = _saving(inputs, strategy, mtbf_s)
    # A spare is replenished while others fail, so the number in repair is Poisson with mean repair / MTBF.
    free = formulas.spare_free(spares, inputs.repair_s / mtbf_s if mtbf_s < math.inf else 0.0)
    kinds = tuple(
        (share, _recovery_s(inputs, strategy, spare, waits))
        for share, spare in ((free, True), (1 - free, False))
        if share > 1e-12
    )
    # The closed form knows one recovery time. Their mean stands for the kinds: the expected wall time is then exact to
    # first order in recovery / MTBF. The percentiles draw from the kinds themselves.
    recovery_s = sum(share * seconds for share, seconds in kinds)
    wall_s = formulas.run_time_s(inputs.work_s, mtbf_s, interval_s, cost_s, recovery_s)
    goodput = 0.0 if math.isinf(wall_s) else inputs.work_s / wall_s
    gpus = inputs.gpus + spares * inputs.gpus_per_node
    money = formulas.cost(wall_s / formulas.DAY_S, gpus, inputs.price)
    return Candidate(
        strategy=strategy,
        spares=spares,
        waits=waits,
        interval_s=interval_s,
        recovery_s=recovery_s,
        recoveries=kinds,
        cost_s=cost_s,
        goodput=goodput,
        wall_s=wall_s,
        cost=money,
    )


def _saving(inputs: Inputs, strategy: str, mtbf_s: float) -> tuple[float, float]:
    """How long a save stalls training, and the interval between saves that loses least."""
    # The live state of the peers is the copy, so a failure loses at most the step in flight, and no save is
    # needed. The step takes the place of the interval.
    if strategy == PEERS:
        return 0.0, inputs.step_s
    cost_s = inputs.cost_s if strategy == STORAGE else inputs.memory_cost_s
    best_s = formulas.daly_interval_s(cost_s, mtbf_s) if mtbf_s < math.inf else inputs.work_s
    # A save falls between two steps, so it cannot come more often than they do.
    return cost_s, max(inputs.step_s, min(best_s, inputs.work_s))


def _recovery_s(inputs: Inputs, strategy: str, spare: bool, waits: bool) -> float:
    """How long one recovery takes, without repeated work."""
    t = inputs.times
    back_s = {STORAGE: t.resume_s, TIERED: _memory_s(inputs), PEERS: t.peer_s}[strategy]
    if spare:
        return t.detect_s + t.spare_s + back_s
    if waits:
        return t.detect_s + t.replace_s + back_s
    # A job that continues on fewer nodes grows again when the new node arrives. Peers hand over their state
    # within a step; the other strategies restart a second time for that. Until then the job computes 1 /
    # nodes less, hence the last term.
    again_s = back_s if strategy != PEERS else inputs.step_s
    return t.detect_s + back_s + again_s + t.replace_s / inputs.nodes


def _memory_s(inputs: Inputs) -> float:
    """How long a restart with the state from memory takes: as from storage, less the difference between the two reading
    times."""
    if inputs.times.memory_s is not None:
        return inputs.times.memory_s
    share = inputs.checkpoint_bytes / inputs.nodes
    faster_s = share / inputs.storage_bytes_per_s - share / inputs.network_bytes_per_s
    return max(0.0, inputs.times.resume_s - max(0.0, faster_s))


def candidates(inputs: Inputs, trials: int = 1000, seed: int = 0) -> list[Candidate]:
    """All candidates, with the best one marked: the one that takes the fewest GPU-hours. Those that finish have percentiles.

    Raises:
        UsageError: no candidate finishes.
    """
    found = [
        evaluate(inputs, strategy, spares, waits)
        for strategy in STRATEGIES
        for spares in _counts(inputs.spares)
        for waits in (True, False)
    ]
    finishing = [c for c in found if c.goodput >= FINISHES]
    if not finishing:
        least = min(found, key=lambda c: c.recovery_s)
        raise UsageError(
            f"the run does not finish: a failure comes every {_duration(inputs.mtbf_s)} (MTBF of {inputs.nodes} nodes) and "
            f"takes at least {_duration(least.recovery_s)} to recover from; try fewer nodes, a lower rate (rate: 0.016%) or "
            "a faster recovery (detect, replace, resume, peer)"
        )
    # Only among those that finish: a candidate that never ends may still take the fewest GPU-hours on paper.
    best = min(finishing, key=lambda c: _price(inputs, c))
    return [
        msgspec.structs.replace(
            c,
            best=c is best,
            percentiles_s=spread(inputs, c, trials, seed) if c.goodput >= FINISHES else (),
        )
        for c in found
    ]


def shortlist(inputs: Inputs, ways: Sequence[Candidate]) -> list[Candidate]:
    """For each strategy the candidate that takes the fewest GPU-hours, if one finishes; the best of all comes first."""
    finishing = sorted((c for c in ways if c.goodput >= FINISHES), key=lambda c: _price(inputs, c))
    first: dict[str, Candidate] = {}
    for way in finishing:
        first.setdefault(way.strategy, way)
    return list(first.values())


def _price(inputs: Inputs, c: Candidate) -> tuple[float, float]:
    """The key for the choice of the best candidate: node-seconds, spares included, then wall time."""
    return c.wall_s * (inputs.nodes + c.spares), c.wall_s


def _counts(most: int) -> list[int]:
    """0, 1, 2, 4, ... up to `most`."""
    counts = [0]
    while counts[-1] < most:
        counts.append(min(most, max(1, 2 * counts[-1])))
    return counts


def spread(inputs: Inputs, candidate: Candidate, trials: int, seed: int = 0) -> tuple[float, ...]:
    """10th, 50th and 90th percentile of wall time, by simulation; empty where numpy is missing."""
    if math.isinf(inputs.mtbf_s):
        return (candidate.wall_s,) * 3
    if not available():
        return ()
    process = Process(
        work_s=inputs.work_s,
        mtbf_s=inputs.mtbf_s,
        interval_s=candidate.interval_s,
        cost_s=candidate.cost_s,
        recoveries=candidate.recoveries,
    )
    return simulate(process, trials, seed).percentiles_s


class Sensitivity(msgspec.Struct, frozen=True):
    """The best candidate at another failure rate."""

    factor: float
    """That rate as a multiple of the given one."""
    best: str
    """Name of the best candidate at that rate."""
    best_goodput: float
    """Its goodput at that rate."""
    chosen_goodput: float
    """The goodput of the chosen candidate at that rate."""


def sensitivity(inputs: Inputs, chosen: Candidate) -> list[Sensitivity]:
    """How the result changes with the failure rate."""
    rows = []
    for factor in FACTORS:
        ways = [
            evaluate(inputs, s, k, w, factor)
            for s in STRATEGIES
            for k in _counts(inputs.spares)
            for w in (True, False)
        ]
        best = min(ways, key=lambda c: _price(inputs, c))
        same = evaluate(inputs, chosen.strategy, chosen.spares, chosen.waits, factor)
        rows.append(Sensitivity(factor, best.name, best.goodput, same.goodput))
    return rows


class Loss(msgspec.Struct, frozen=True):
    """A use of wall time, in seconds."""

    part: str
    seconds: float


def waterfall(inputs: Inputs, c: Candidate) -> list[Loss]:
    """Training, checkpoints, recomputing and recovery; they add up to the wall time."""
    # `run_time_s` has one figure for everything. Saves and recovery are known exactly; what remains of the wall time is
    # work that a failure destroyed. Rounding must not make it negative.
    saves_s = inputs.work_s * c.cost_s / c.interval_s
    recovering_s = c.wall_s * min(1.0, c.recovery_s / inputs.mtbf_s)
    again_s = max(0.0, c.wall_s - inputs.work_s - saves_s - recovering_s)
    return [
        Loss("training", inputs.work_s),
        Loss("checkpoints", saves_s),
        Loss("steps done again", again_s),
        Loss("recovery", c.wall_s - inputs.work_s - saves_s - again_s),
    ]


def next_commands(inputs: Inputs, best: Candidate) -> list[str]:
    """The commands to continue with: the run, its simulation, and the calibration afterwards."""
    low = inputs.nodes if best.waits else max(1, inputs.nodes - max(1, round(0.05 * inputs.nodes)))
    sizes = str(inputs.nodes) if low == inputs.nodes else f"{low}:{inputs.nodes}"
    run = f"holdfast run --nnodes {sizes} --nproc-per-node {inputs.gpus_per_node}"
    run += f" --spares {best.spares}" if best.spares else ""
    every = f"{best.interval_s:.0f}s" if best.strategy == STORAGE else "30m"
    run += " --snapshot-every 0" if best.strategy == STORAGE else ""
    run += f" --checkpoint s3://BUCKET/run,every={every} train.py"
    rate = f"{100 * inputs.rate:.4g}%"
    simulate_ = (
        f"holdfast plan simulate --nnodes {inputs.nodes} --spares {best.spares} --rate {rate} "
        f"--days {max(1.0, inputs.work_s / formulas.DAY_S):.0f}"
    ) + ("" if best.waits else f" --min-nodes {low}")
    return [run, simulate_, "holdfast plan calibrate REPORT.json   # after the first failures of your own"]


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


class Curve(msgspec.Struct, frozen=True):
    """One curve of a picture."""

    name: str
    points: tuple[tuple[float, float], ...]


def goodput_by_size(inputs: Inputs, spares: int, waits: bool) -> list[Curve]:
    """Goodput of every strategy as a function of the number of nodes."""
    curves = []
    for strategy in STRATEGIES:
        points = []
        for nodes in SIZES:
            sized = msgspec.structs.replace(inputs, nodes=nodes)
            points.append((float(nodes), evaluate(sized, strategy, spares, waits).goodput))
        curves.append(Curve(strategy, tuple(points)))
    return curves


def cost_by_spares(inputs: Inputs, most: int = 16) -> list[Curve]:
    """The cost of the run with 0 to `most` spares, in the price's currency, or in GPU-days if no price is given."""
    # At this price a GPU-day costs 1, so that the formula for the cost gives GPU-days.
    priced = inputs if inputs.price else msgspec.structs.replace(inputs, price=1 / 24)
    return [
        Curve(
            f"{strategy}, {'wait' if waits else 'continue with fewer nodes'}",
            tuple((float(k), evaluate(priced, strategy, k, waits).cost) for k in range(most + 1)),
        )
        for strategy in STRATEGIES
        for waits in (True, False)
    ]


def goodput_by_interval(inputs: Inputs, recovery_s: float) -> list[Curve]:
    """Goodput as a function of the interval between saves, to storage and to memory; each curve is followed by the
    point of Daly's interval."""
    curves = []
    for name, cost_s in ((STORAGE, inputs.cost_s), (TIERED, inputs.memory_cost_s)):
        # A save without cost is best made all the time: an interval of 0, which a logarithmic axis cannot
        # show.
        best_s = max(1e-3, formulas.daly_interval_s(cost_s, inputs.mtbf_s))
        spread = [best_s * 10 ** (3 * i / POINTS - 1.5) for i in range(POINTS + 1)]
        goodput = [formulas.goodput(inputs.mtbf_s, s, cost_s, recovery_s) for s in spread]
        curves.append(Curve(name, tuple(zip(spread, goodput, strict=True))))
        at_best = formulas.goodput(inputs.mtbf_s, best_s, cost_s, recovery_s)
        curves.append(Curve(f"{name}: Daly's interval", ((best_s, at_best),)))
    # A run that never finishes has no goodput, and one such point would set the scale of the whole plot.
    return [x for x in curves if all(math.isfinite(y) for _, y in x.points)]
