"""What failures cost, and how a global batch divides over workers, in closed form. Pure; each formula with its source. Times in
seconds unless the name says hours.

A failure strikes after an exponential time with mean M (MTBF). It costs the time since the last checkpoint and R seconds
of recovery, during which the next failure may strike. Checkpoints are made every `interval_s` seconds of training and
stop training for `cost_s` each. What is not of this kind (ageing nodes, racks that fail together, spares that run out,
elastic jobs) is simulated: `holdfast.tools.plan.renewal` and `holdfast.tools.simulate`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import msgspec

HOUR_S = 3600.0
DAY_S = 86400.0

# ---------------------------------------------------------------- how often


def mtbf_hours(nodes: int, rate_per_node_hour: float) -> float:
    """Mean time between failures of a job on `nodes` nodes: 1 / (N lambda). Nodes fail independently."""
    return math.inf if rate_per_node_hour == 0 else 1.0 / (nodes * rate_per_node_hour)


def rate_per_node_hour(failures: int, nodes: int, hours: float) -> float:
    """Failures per node-hour, as observed."""
    return failures / (nodes * hours)


def rate_interval(failures: int, node_hours: float, level: float = 0.95) -> tuple[float, float]:
    """The rates per node-hour under which so many failures are not surprising, exact for a Poisson count.

    Source: F. Garwood, "Fiducial limits for the Poisson distribution", Biometrika 28 (1936). The lower limit is the
    rate at which seeing this many or more has probability (1 - level) / 2, the upper one the same for this many or
    fewer.
    """
    tail = (1 - level) / 2
    low = _poisson_mean(lambda mean: 1 - _poisson_cdf(failures - 1, mean), tail) if failures else 0.0
    high = _poisson_mean(lambda mean: 1 - _poisson_cdf(failures, mean), 1 - tail)
    return low / node_hours, high / node_hours


# ---------------------------------------------------------------- how often to save


def young_interval_s(cost_s: float, mtbf_s: float) -> float:
    """sqrt(2 cost MTBF), to first order. Source: J. W. Young, CACM 17 (1974)."""
    return math.sqrt(2 * cost_s * mtbf_s)


def daly_interval_s(cost_s: float, mtbf_s: float) -> float:
    """The time between two saves that loses least.

    Args:
        cost_s: what one save takes away from training.
        mtbf_s: mean time between failures that need it.

    Source: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
    FGCS 22 (2006), eq. 37.
    """
    if cost_s <= 0:
        return 0.0
    # Daly's series is for saves that are short against the MTBF. Beyond this bound he takes the MTBF itself.
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    # The series needs a small ratio, which the bound above holds below 1.
    ratio = cost_s / (2 * mtbf_s)
    return young_interval_s(cost_s, mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


# ---------------------------------------------------------------- how long, and how much of it counts


def run_time_s(work_s: float, mtbf_s: float, interval_s: float, cost_s: float, recovery_s: float) -> float:
    """Expected wall time of `work_s` seconds of training: M e^(R/M) (e^((tau + d)/M) - 1) work / tau.

    Exact for exponential failures that may strike at any time, also while a checkpoint is made or during recovery.
    math.inf where the exponent leaves the range of floats: such a run does not finish.

    Source: Daly (2006), eq. 20 without the approximation.
    """
    if interval_s <= 0:
        return work_s * retried_s(mtbf_s, recovery_s)
    # Without failures the formula is infinity times zero; this is its limit.
    if math.isinf(mtbf_s):
        return work_s * (1 + cost_s / interval_s)
    # expm1, because for a large MTBF exp(x) - 1 loses the digits that are the result.
    try:
        segment_s = mtbf_s * math.exp(recovery_s / mtbf_s) * math.expm1((interval_s + cost_s) / mtbf_s)
    except OverflowError:
        return math.inf
    return work_s * segment_s / interval_s


def retried_s(mtbf_s: float, recovery_s: float) -> float:
    """Wall time per second of training when nothing but the recovery is ever lost: e^(R/M), the limit of `run_time_s`
    for free checkpoints made all the time."""
    return 1.0 if math.isinf(mtbf_s) else _exp(recovery_s / mtbf_s)


def goodput(mtbf_s: float, interval_s: float, cost_s: float, recovery_s: float) -> float:
    """The share of wall time spent on steps that are kept (ETTR): 1 / `run_time_s` of one second."""
    return 1.0 / run_time_s(1.0, mtbf_s, interval_s, cost_s, recovery_s)


# ---------------------------------------------------------------- days and money


def productive_days(gpu_hours: float, gpus: int) -> float:
    """Days that so many GPU-hours take when nothing fails."""
    return gpu_hours / gpus / 24


def days_lost(nodes: int, rate_per_node_hour: float, days: float, downtime_hours: float) -> float:
    """Days that stand still beside `days` of training: N lambda * 24 days * downtime, in days.

    As the published tables count: failures only while training goes on, each costs the same.
    """
    return nodes * rate_per_node_hour * days * downtime_hours


def share_saved(nodes: int, rate_per_node_hour: float, hours: float, than_hours: float) -> float:
    """The share of the whole time saved by `hours` of downtime per failure instead of `than_hours`."""
    # Against the whole time with the longer downtime, which is how the published table counts; against the
    # productive time the same saving would look larger.
    per_hour = nodes * rate_per_node_hour
    return 1 - (1 + per_hour * hours) / (1 + per_hour * than_hours)


def cost(days: float, gpus: int, price_per_gpu_hour: float) -> float:
    """What so many days of all GPUs cost, in the price's currency."""
    return days * 24 * gpus * price_per_gpu_hour


# ---------------------------------------------------------------- spares


def spare_free(spares: int, in_repair: float) -> float:
    """The probability that a failure finds a spare free, with `in_repair` nodes in repair on average.

    Nodes in repair are Poisson (Palm's theorem: whatever the distribution of repair times), and a failure sees their time
    average; a spare is free while fewer are in repair than there are spares.
    """
    return _poisson_cdf(spares - 1, in_repair)


# ---------------------------------------------------------------- numbers


def _exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


def _poisson_cdf(count: int, mean: float) -> float:
    """P(X <= count)."""
    # From logarithms: e^-mean is 0 in floating point from a mean of 746 on, and so would be every term.
    if count < 0:
        return 0.0
    if mean <= 0:
        return 1.0
    logs = [k * math.log(mean) - mean - math.lgamma(k + 1) for k in range(count + 1)]
    return min(1.0, math.fsum(math.exp(x) for x in logs))


def _poisson_mean(rising: Callable[[float], float], wanted: float) -> float:
    """The mean at which a probability that rises with it has a value."""
    # Bisection: a hundred halvings reach the last bit, and need neither scipy nor a starting value that converges.
    low, high = 0.0, 1.0
    while rising(high) < wanted:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < wanted else (low, middle)
    return (low + high) / 2


# ---------------------------------------------------------------- sizes of a job: micro-batches are not split


def idle_share(micro_batches: int, world: int) -> float:
    """The share of the workers' time that nobody can use: the slowest has ceil(V / W) micro-batches, so 1 - V / (W *
    ceil(V / W)). 0 when W divides V.

    Raises:
        ValueError: more workers than micro-batches, or none.
    """
    if not 1 <= world <= micro_batches:
        raise ValueError(
            f"{world} workers cannot share {micro_batches} micro-batches; use between 1 and {micro_batches} workers"
        )
    return 1.0 - micro_batches / (world * -(-micro_batches // world))


class Division(msgspec.Struct, frozen=True):
    """One world size: most is what the slowest worker computes, least the others."""

    world: int
    most: int
    least: int
    idle: float


def divide(micro_batches: int, worlds: Iterable[int]) -> list[Division]:
    """Every world size that can share the micro-batches."""
    return [
        Division(w, -(-micro_batches // w), micro_batches // w, idle_share(micro_batches, w))
        for w in worlds
        if 1 <= w <= micro_batches
    ]


class Suggestion(msgspec.Struct, frozen=True):
    """A micro-batch size, and the largest idle share of any world size with it."""

    micro_batch: int
    worst: float


def suggest(global_batch: int, micro_batch: int, worlds: Iterable[int]) -> list[Suggestion]:
    """Micro-batch sizes that divide the global batch and leave less idle than the given one, the largest first: larger
    ones use a device better.
    """
    sizes = list(worlds)

    def worst(size: int) -> float:
        return max((d.idle for d in divide(global_batch // size, sizes)), default=1.0)

    # Smaller sizes only: a larger micro-batch may not fit into the memory of a device.
    now = worst(micro_batch)
    smaller = [s for s in range(micro_batch - 1, 0, -1) if global_batch % s == 0]
    better: list[Suggestion] = []
    for size in smaller:
        # Each suggestion must leave less idle than all larger ones, which use a device better. A size with which the largest
        # world has more workers than micro-batches is no suggestion.
        if global_batch // size >= max(sizes) and worst(size) < min([now, *(b.worst for b in better)]):
            better.append(Suggestion(size, worst(size)))
    return better
