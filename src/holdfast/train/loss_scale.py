"""The scale of the loss for fp16, as `torch.amp.GradScaler` has it: what becomes of it in a commit.

The scaler's own `step` and `update` cannot be used: they decide by the gradients that are here, and of a sharded model other
workers have others. The decision is made from the gradient that all have agreed on, so every replica gets the same scale.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch


class Scaler(Protocol):
    """What is used of a `torch.amp.GradScaler`."""

    def is_enabled(self) -> bool:
        """Whether it does anything."""
        ...

    def get_scale(self) -> float:
        """By what losses are multiplied now."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Scale, factors, and how many steps in a row were finite."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what `state_dict` gave."""
        ...


def scale_of(scaler: Scaler | None) -> float:
    """By what the losses of this step were multiplied."""
    return float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else 1.0


def advance(scaler: Scaler, finite: bool) -> None:
    """A step was committed. finite: its gradients were, and the update was made.

    The rule and its rounding are those of torch's `_amp_update_scale_` (aten/src/ATen/native/cuda/AmpKernels.cu).
    """
    if not scaler.is_enabled():
        return
    state = scaler.state_dict()
    if not finite:
        scale, tracker = _rounded(state["scale"] * state["backoff_factor"]), 0
    else:
        scale, tracker = state["scale"], state["_growth_tracker"] + 1
        if tracker == state["growth_interval"]:
            grown = _rounded(scale * state["growth_factor"])
            scale, tracker = (grown if math.isfinite(grown) else scale), 0
    scaler.load_state_dict({**state, "scale": scale, "_growth_tracker": tracker})


def _rounded(scale: float) -> float:
    """To single precision, in which the scaler keeps it."""
    return float(torch.tensor(scale, dtype=torch.float32))
