"""An update that fails on one worker, when it has changed the parameters already: the state there is of no step."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch


def break_update(optimizer: torch.optim.Optimizer, step: int, is_here: Callable[[], bool]) -> None:
    """Breaks the update that is this process's `step`th one."""
    calls = itertools.count(1)

    def fail(*args: object) -> None:
        if next(calls) == step and is_here():
            raise RuntimeError("the update broke")

    optimizer.register_step_post_hook(fail)
