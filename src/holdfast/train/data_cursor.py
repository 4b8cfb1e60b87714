"""The position of a run in its data. It is part of the protected state, so it is saved, transferred and committed with the
rest. Also the rules for adapting the learning rate to a changed global batch, which are applied only if the script asks for
one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch

from holdfast.data.fingerprint import check_fingerprint, identity
from holdfast.errors import UsageError

NAME = "holdfast"
"""Under this name the cursor is in the protected state."""

BatchChanged = Literal["refuse", "keep", "linear", "sqrt"]


class DataCursor:
    """The number of committed samples, with the data set and order that give it its meaning.

    It counts samples and not steps, so a change of the global batch neither repeats nor skips any.

    Attributes:
        samples: how many samples were trained on in committed steps.
        from_peer: what is loaded next comes from a worker of this run, which must have the same data.
    """

    def __init__(
        self,
        global_batch: int,
        seed: int,
        data: Any,
        threads: int | None,
        batch_changed: BatchChanged,
        probe: str | None = None,
    ) -> None:
        """data: the data set. threads: of the processor in an operation, where the result
        must not depend on them. probe: a hash of some samples, where the data set has no fingerprint."""
        if batch_changed not in get_args(BatchChanged):
            raise UsageError(
                f"batch_changed={batch_changed!r}; choose one of {', '.join(map(repr, get_args(BatchChanged)))}"
            )
        self.samples = 0
        self._global_batch = self._saved_batch = global_batch
        self._seed = seed
        self._data, self._identity = data, identity(data)
        self._threads = threads
        self._batch_changed = batch_changed
        self._probe = probe
        self.from_peer = False

    def advance(self) -> None:
        """A step was committed."""
        # Part of the update closure, so it advances exactly once for every committed step, also for one that
        # is committed after a fault.
        self.samples += self._global_batch

    def state_dict(self) -> dict[str, Any]:
        """A few plain values, the same on every worker."""
        return {
            "samples": self.samples,
            "global_batch": self._saved_batch,
            "seed": self._seed,
            "data": self._identity,
            "threads": self._threads,
            "probe": self._probe,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from there.

        Raises:
            UsageError: the state was made in another way, and nobody said what then.
        """
        batch = state["global_batch"]
        if batch != self._global_batch and self._batch_changed == "refuse":
            raise UsageError(
                f"run.steps(global_batch={self._global_batch}): the state was saved with {batch}; specify how to "
                'change the learning rate: batch_changed="keep", "linear" or "sqrt" (see holdfast.scale_lr)'
            )
        if state["seed"] != self._seed:
            raise UsageError(
                f"run.steps(seed={self._seed}): the state was saved with seed {state['seed']}, which gives a "
                "different order of samples; use the same seed"
            )
        if state["data"] is not None:
            check_fingerprint(state["data"], self._data)
        theirs = state.get("probe")
        # Of a checkpoint nobody asks it: a run may go on with more data.
        if self.from_peer and theirs is not None and self._probe is not None and theirs != self._probe:
            raise UsageError(
                "run.steps(data): the data set of this worker contains different samples than that of another "
                "worker, so they would not train on the same global batch. Seed your split "
                "(torch.utils.data.random_split(data, lengths, generator=torch.Generator().manual_seed(0))), sort "
                "the names of files, and use one version of the data everywhere"
            )
        if self._threads and state["threads"] and state["threads"] != self._threads:
            raise UsageError(
                f'reduction="exact": this worker computes with {self._threads} threads, but the state was saved with '
                f"{state['threads']}, and the number changes the last bits: set OMP_NUM_THREADS to the same value "
                "everywhere"
            )
        self.samples = int(state["samples"])
        # Kept until `adapt`: the learning rates that were loaded are those of this batch. A peer that joins
        # later fetches the adapted state, whose batch is the new one, so it does not adapt twice.
        self._saved_batch = int(batch)

    def adapt(self, protected: Mapping[str, Any]) -> None:
        """Applies the script's rule for a changed global batch, once, after all state is loaded."""
        factor = self._global_batch / self._saved_batch
        self._saved_batch = self._global_batch
        if factor == 1.0 or self._batch_changed not in ("linear", "sqrt"):
            return
        schedulers = [t for t in protected.values() if isinstance(t, torch.optim.lr_scheduler.LRScheduler)]
        for thing in protected.values():
            if isinstance(thing, torch.optim.Optimizer):
                own = [s for s in schedulers if s.optimizer is thing]
                scale_lr(thing, factor, self._batch_changed, *own)


Rule = Literal["linear", "sqrt"]


def scale_lr(
    optimizer: torch.optim.Optimizer, factor: float, rule: Rule = "linear", *schedulers: Any
) -> float:
    """Adapts the learning rate of every parameter group to a global batch that became `factor` times as large.

    Args:
        factor: new global batch over old one.
        rule: "linear" for SGD (Goyal et al. 2017), "sqrt" for Adam and its relatives (Malladi et al. 2022, who adapt
            betas and eps too; that is left to the script).
        schedulers: those of this optimizer. They compute from base rates of their own, which are multiplied too.

    Returns:
        What the learning rates were multiplied by. For AdaScale call this with `adascale_gain(...)` and "linear".

    Raises:
        UsageError: an unknown rule, or a factor that is not positive.
    """
    if rule not in get_args(Rule):
        raise UsageError(f"scale_lr(rule={rule!r}); choose one of {', '.join(map(repr, get_args(Rule)))}")
    if not (factor > 0 and math.isfinite(factor)):
        raise UsageError(
            f"scale_lr(factor={factor}): factor must be the new global batch divided by the old one, for example 2.0"
        )
    multiplier = factor if rule == "linear" else math.sqrt(factor)
    for group in optimizer.param_groups:
        # A scheduler computes from `initial_lr`. With `lr` alone its next step would undo the scaling.
        for key in ("lr", "initial_lr"):
            # In place: a compiled or captured optimizer holds this very tensor.
            if isinstance(group.get(key), torch.Tensor):
                group[key].mul_(multiplier)
            elif key in group:
                group[key] *= multiplier
    for scheduler in schedulers:
        _scale_base(scheduler, multiplier)
    return multiplier


def adascale_gain(factor: float, variance: float, square: float) -> float:
    """AdaScale's gain (Johnson et al. 2020): between 1, where the gradient is all signal, and `factor`, all noise.

    Args:
        factor: new global batch over old one.
        variance: of the gradient of one old global batch, summed over the parameters.
        square: squared norm of the true gradient.

    Raises:
        UsageError: numbers that are no variance and no square.
    """
    if not (factor > 0 and variance >= 0 and square >= 0 and 0 < variance + square < math.inf):
        raise UsageError(
            f"adascale_gain(factor={factor}, variance={variance}, square={square}): factor must be positive, and the "
            "other two must not be negative and not both be 0"
        )
    return (variance + square) / (variance / factor + square)


def _scale_base(scheduler: Any, multiplier: float) -> None:
    for key in ("base_lrs", "_last_lr", "eta_min"):
        if hasattr(scheduler, key):
            old = getattr(scheduler, key)
            setattr(
                scheduler, key, [lr * multiplier for lr in old] if isinstance(old, list) else old * multiplier
            )
    for inner in getattr(scheduler, "_schedulers", ()):
        _scale_base(inner, multiplier)
