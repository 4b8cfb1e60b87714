"""Simulates the run as a renewal process, in thousands of trials at once, for the spread of the expected figures.

The model is that of `holdfast.formulas`, so that their means agree, with three features that have no closed form:
recovery times
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
"""A trial with this many failures counts as one that does not finish."""

PERCENTILES = (10, 50, 90)


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """One run, as a renewal process."""

    work_s: float
    """Duration of the run without failures."""
    mtbf_s: float
    """Mean time between failures of the job."""
    interval_s: float
    """Seconds of training between two saves."""
    cost_s: float
    """How long one save stalls training."""
    recoveries: tuple[tuple[float, float], ...]
    """The kinds of recovery: the probability of each, and its seconds. The probabilities add up to 1."""
    shape: float = 1.0
    """Shape of the Weibull distribution of times between failures. 1: exponential; below 1: failures come in bursts."""


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """The distribution of wall time over all trials."""

    trials: int
    """Number of trials."""
    mean_s: float
    """Mean wall time."""
    percentiles_s: tuple[float, ...]
    """Wall times at `PERCENTILES`."""
    goodput: float
    """Goodput of the mean wall time."""
    error: float
    """Standard error of that goodput."""
    failures: float
    """Mean number of failures per trial."""


def available() -> bool:
    """Whether numpy is installed."""
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
    return Spread(
        trials=trials,
        mean_s=mean,
        percentiles_s=spread,
        goodput=goodput,
        error=error,
        failures=float(failures.mean()),
    )


def _run(np: Any, p: Process, trials: int, rng: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    """Wall time and failures of every trial."""
    # All trials go from failure to failure together: one pass of the loop draws the next failure of each trial that is not
    # finished. So the Python work grows with the failures of one trial and not with the number of trials.
    #
    # A segment is an interval of training and the save after it. A failure loses the segment in which it strikes, because
    # only the save makes it permanent.
    segment_s = p.interval_s + p.cost_s
    segments = max(1, math.ceil(p.work_s / p.interval_s - 1e-9))
    todo = np.full(trials, float(segments))
    last_s = p.work_s - (segments - 1) * p.interval_s + p.cost_s  # the last segment may be shorter
    # With this scale the Weibull distribution has the mean `mtbf_s` for every shape, so shapes compare fairly.
    scale = p.mtbf_s / math.gamma(1 + 1 / p.shape)
    wall, failures = np.zeros(trials), np.zeros(trials)
    ready = np.zeros(trials)  # seconds of recovery before the next second of training
    active = np.arange(trials)
    for _ in range(MAX_FAILURES):
        gap = _gaps(rng, len(active), scale, p.shape)
        left, wait = todo[active], ready[active]
        # A failure may strike during recovery as well. Then `gap < wait`, nothing was trained, and recovery starts again:
        # as `formulas.run_time_s` has it, against which a test compares the means.
        need = wait + (left - 1) * segment_s + last_s
        done = gap >= need
        wall[active] += np.minimum(gap, need)
        failed = active[~done]
        if not len(failed):
            return wall, failures
        trained = np.floor(np.maximum(0.0, gap - wait)[~done] / segment_s)
        # At least one segment is left, however the division above was rounded: a trial that had a failure has
        # not finished.
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
    # The probabilities may add up to a little less than 1 by rounding; a draw above their sum is of the last kind.
    return seconds[np.minimum(np.searchsorted(shares, rng.random(n)), len(kinds) - 1)]


def _numpy() -> Any:
    try:
        import numpy
    except ImportError:
        raise UsageError("percentiles need numpy: pip install 'holdfast-train[plan]'") from None
    return numpy
