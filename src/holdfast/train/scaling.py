"""The learning rate when the global batch changes. Never applied unless the script says so."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch

from holdfast.errors import UsageError

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
