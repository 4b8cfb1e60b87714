"""Lightning's Trainer at level 2:

    import holdfast.lightning
    trainer = lightning.Trainer(strategy="holdfast", ...)      # was: strategy="ddp"

Importing this hides torchrun's variables; a call that trains makes the process a member of its job. See docs/lightning.md for what
stays and what changes.
"""

from __future__ import annotations

import os

from holdfast.adapters import world

world.enter()  # before Lightning looks at the environment
# Within an allocation Lightning counts Slurm's tasks, and refuses to train when they are not its own workers.
os.environ.pop("SLURM_NTASKS", None)

from holdfast.adapters.lightning.strategy import HoldfastStrategy, register  # noqa: E402

register()

__all__ = ["HoldfastStrategy"]
