"""The run as a renewal process, thousands of trials at once: what spread the expected figures have.

The same model as `plan.formulas`, so that their means agree, and three things that have no closed form: recovery times
of several kinds, ageing or ever healthier hardware (Weibull), and percentiles. All trials go from failure to failure
together, so a trial costs as much as it has failures. numpy is imported when it is needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_FAILURES = 200_000
"""So many failures in a trial, and it is said not to finish."""

PERCENTILES = (10, 50, 90)


class Process(msgspec.Struct, frozen=True):
    """One run. All in seconds.

    recoveries: (probability, seconds) of each kind; their probabilities add up to 1. shape: of the Weibull times between
    failures; 1: exponential, below 1: failures come in bursts.
    """

    work_s: float
    mtbf_s: float
    interval_s: float
    cost_s: float
    recoveries: tuple[tuple[float, float], ...]
    shape: float = 1.0


class Spread(msgspec.Struct, frozen=True):
    """Wall time over all trials. error: standard error of the mean's goodput."""

    trials: int
    mean_s: float
    percentiles_s: tuple[float, ...]
    goodput: float
    error: float
    failures: float


def available() -> bool:
    """Whether numpy is there."""
    from importlib.util import find_spec

    return find_spec("numpy") is not None


def simulate(process: Process, trials: int = 10_000, seed: int = 0) -> Spread:
    """Runs all trials.

    Raises:
        UsageError: numpy is missing, or the run does not finish.
    """
    np = _numpy()
    wall, failures = _run(np, process, trials, np.random.default_rng(seed))
    mean = float(wall.mean())
    goodput = process.work_s / mean
    error = goodput * float(wall.std()) / mean / math.sqrt(trials)
    spread = tuple(float(x) for x in np.percentile(wall, PERCENTILES))
    return Spread(trials, mean, spread, goodput, error, float(failures.mean()))


def _run(np: Any, p: Process, trials: int, rng: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    """A segment is an interval of training and its checkpoint; what is not a whole one at a failure is lost."""
    segment_s = p.interval_s + p.cost_s
    segments = max(1, math.ceil(p.work_s / p.interval_s - 1e-9))
    todo = np.full(trials, float(segments))
    last_s = p.work_s - (segments - 1) * p.interval_s + p.cost_s  # the last segment may be shorter
    scale = p.mtbf_s / math.gamma(1 + 1 / p.shape)
    wall, failures = np.zeros(trials), np.zeros(trials)
    ready = np.zeros(trials)  # seconds of recovery before the next second of training
    active = np.arange(trials)
    for _ in range(MAX_FAILURES):
        gap = _gaps(rng, len(active), scale, p.shape)
        left, wait = todo[active], ready[active]
        need = wait + (left - 1) * segment_s + last_s
        done = gap >= need
        wall[active] += np.minimum(gap, need)
        failed = active[~done]
        if not len(failed):
            return wall, failures
        trained = np.floor(np.maximum(0.0, gap - wait)[~done] / segment_s)
        todo[failed] -= np.minimum(trained, todo[failed] - 1)
        failures[failed] += 1
        ready[failed] = _recoveries(rng, len(failed), p.recoveries)
        active = failed
    raise UsageError(
        f"the run does not finish: after {MAX_FAILURES:,} failures there is work left (MTBF {p.mtbf_s:g} s)"
    )


def _gaps(rng: Any, n: int, scale: float, shape: float) -> Any:
    drawn = rng.standard_exponential(n)
    return scale * (drawn if shape == 1.0 else drawn ** (1 / shape))


def _recoveries(rng: Any, n: int, kinds: Sequence[tuple[float, float]]) -> Any:
    if len(kinds) == 1:
        return kinds[0][1]
    np = _numpy()
    shares = np.cumsum([share for share, _ in kinds])
    seconds = np.array([s for _, s in kinds])
    return seconds[np.minimum(np.searchsorted(shares, rng.random(n)), len(kinds) - 1)]


def _numpy() -> Any:
    try:
        import numpy
    except ImportError:
        raise UsageError("percentiles need numpy: pip install 'holdfast[plan]'") from None
    return numpy
