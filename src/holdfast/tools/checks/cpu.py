"""The processor: the same arithmetic on every core, again and again, must give the same bits.

A core that computes wrongly now and then (a few in a thousand machines of a large fleet have one) shows in no log: it
only shows in results. https://dl.acm.org/doi/10.1145/3458336.3465297 (Cores that don't count)
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec
import xxhash

from holdfast.health.capacity import cpu_model
from holdfast.health.checks.check import CannotCheck, Task
from holdfast.protocol.health import CheckResult, Condition

if TYPE_CHECKING:
    import torch

SIZE = 384
"""Size of the square matrices: three of them fit into a core's own cache."""

SEED = 20261121


class CoreRun(msgspec.Struct, frozen=True, kw_only=True):
    """The rounds of one core."""

    core: int
    digest: str
    """Digest of its first round."""
    rounds: int
    seconds: float
    wrong: int = 0
    """Number of rounds that differed from its first."""


def check_cpu(task: Task) -> Iterator[CheckResult]:
    """Matrix and vector work on every core at once; every round's result is hashed."""
    try:
        import torch
    except ImportError:
        raise CannotCheck("needs torch, which is not installed here") from None
    # Each core must do its own arithmetic. With torch's pool one core's fault would be spread over the
    # results of all.
    torch.set_num_threads(1)
    operands = operands_for(SIZE)
    cores = sorted(os.sched_getaffinity(0))
    work_once(*operands)  # libraries choose their kernels in the first call

    def run(core: int) -> CoreRun:
        # 0 is the calling thread; the pool has a thread for each core, and none of them migrates.
        os.sched_setaffinity(0, {core})
        return run_core(core, operands, task.seconds)

    with ThreadPoolExecutor(len(cores)) as threads:
        runs = list(threads.map(run, cores))
    yield judge_cores(runs, cpu_model())
    yield _speed(runs)


def operands_for(size: int) -> tuple[Any, ...]:
    """Two matrices and a vector, the same on every machine."""
    import torch

    generator = torch.Generator().manual_seed(SEED)
    # Integers over a power of two are exact in binary, so the operands are the same bits on every machine,
    # whatever its library of mathematics rounds to.
    vector = torch.randint(1, 1 << 20, (size * size,), generator=generator).to(torch.float64) / (1 << 20)
    return (*matrices(torch.device("cpu"), size), vector)


def matrices(device: torch.device, size: int) -> tuple[Any, Any]:
    """Two square matrices, the same on every machine: from integers, which no library rounds its own way."""
    import torch

    generator = torch.Generator().manual_seed(SEED)
    both = torch.randint(-(1 << 20), 1 << 20, (2, size, size), generator=generator, dtype=torch.int32)
    a, b = (both.to(device).to(torch.float32) / (1 << 20)).unbind()
    return a, b


def work_once(a: Any, b: Any, vector: Any) -> str:
    """A matrix product in float32, and square roots, exponentials and divisions in float64; hash of the bits."""
    product = a @ b
    # Roots, exponentials and divisions run in other units of a core than multiplications; defects are often
    # limited to one of them.
    values = (vector.sqrt() + (-vector).exp()) / (vector + 1.0)
    digest = xxhash.xxh3_64(product.numpy())
    digest.update(values.numpy())
    return digest.hexdigest()


def run_core(core: int, operands: tuple[Any, ...], seconds: float) -> CoreRun:
    """Runs rounds on the core to which this thread is pinned, for `seconds`, but at least two."""
    began_s = time.monotonic()
    first = work_once(*operands)
    rounds, wrong = 1, 0
    # Compared with this core's own first round as well as with other cores: a core may be wrong always, or
    # only when it is hot.
    while rounds < 2 or time.monotonic() - began_s < seconds:
        wrong += work_once(*operands) != first
        rounds += 1
    return CoreRun(core=core, digest=first, rounds=rounds, seconds=time.monotonic() - began_s, wrong=wrong)


def judge_cores(runs: list[CoreRun], model: str) -> CheckResult:
    """Compares the cores: each must have the majority's bits in every round."""
    digests = [r.digest for r in runs]
    # The majority on one machine has one model and one library, so it must agree bit by bit.
    common = statistics.mode(digests)
    bad = [r for r in runs if r.wrong or r.digest != common]
    rounds = sum(r.rounds for r in runs)
    if not bad:
        return CheckResult(
            name="cpu-bits",
            condition=Condition.HEALTHY,
            detail=f"equal in {rounds} rounds on {len(runs)} cores",
            model=model,
            digest=common,
        )
    cores = ", ".join(
        f"core {r.core} ({r.wrong} of {r.rounds} rounds)" if r.wrong else f"core {r.core}" for r in bad[:8]
    )
    return CheckResult(
        name="cpu-bits",
        condition=Condition.FAULTY,
        detail=f"the same arithmetic gave other bits on {cores}",
        model=model,
        digest=common,
    )


def _speed(runs: list[CoreRun]) -> CheckResult:
    """The speed of all cores together; the slowest core is named if it is far behind."""
    flop = 2 * SIZE**3
    rates = {r.core: r.rounds * flop / r.seconds / 1e9 for r in runs}
    slowest = min(rates, key=lambda core: rates[core])
    median = statistics.median(rates.values())
    behind = (
        f"core {slowest} has {rates[slowest] / median:.0%} of the median"
        if rates[slowest] < median / 2
        else ""
    )
    return CheckResult(
        name="cpu-matrix",
        condition=Condition.HEALTHY,
        detail=behind,
        value=round(sum(rates.values()), 1),
        unit="GFLOP/s",
        model=cpu_model(),
    )
