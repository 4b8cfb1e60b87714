"""Accelerate at level 2: the Accelerator stays, and the loop is one over the steps of a job:

    from holdfast.accelerate import Accelerator      # was: from accelerate import Accelerator

Importing this hides torchrun's variables; `Accelerator.steps` makes the process a member of its job. See docs/accelerate.md for
what stays and what changes.
"""

from __future__ import annotations

from holdfast.adapters import world

world.enter()  # before Accelerate looks at the environment

from holdfast.adapters.accelerate.accelerator import Accelerator  # noqa: E402

__all__ = ["Accelerator"]
