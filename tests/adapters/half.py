"""fp16 on a CPU, which Accelerate and Lightning set up on GPUs only: torch has both the autocast and the scaler."""

from __future__ import annotations

from typing import Any

import torch
import where


def scaler() -> torch.amp.GradScaler:
    """Its scale is too large at first, and again after each few steps."""
    return torch.amp.GradScaler(
        where.TYPE, init_scale=2.0**20, growth_factor=2.0**10, backoff_factor=2.0**-8, growth_interval=3
    )


def set_up(accelerator: Any) -> None:
    """As `Accelerator(mixed_precision="fp16")` does on a GPU; before anything is prepared."""
    assert accelerator.mixed_precision == "fp16"
    accelerator.native_amp, accelerator.scaler = True, scaler()
