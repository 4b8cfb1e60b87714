"""Accelerate at level 2: the Accelerator stays, and the loop is one over the steps of a job:

    from holdfast.accelerate import Accelerator      # was: from accelerate import Accelerator

Importing this hides torchrun's variables; `Accelerator.steps` makes the process a member of its job. Other names of `accelerate`,
`accelerate.utils` and `accelerate.logging` can be imported from here, too. See docs/accelerate.md for what stays and what changes.
"""

from __future__ import annotations

from typing import Any

from holdfast.adapters import world

world.enter()  # before Accelerate looks at the environment

from holdfast.adapters.accelerate import backend, names  # noqa: E402
from holdfast.adapters.accelerate.accelerator import Accelerator  # noqa: E402

backend.leave_out()

__all__ = ["Accelerator"]


def __getattr__(name: str) -> Any:
    return names.found(name)
