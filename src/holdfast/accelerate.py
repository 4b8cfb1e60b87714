"""Accelerate at level 2: the Accelerator stays, and the loop is one over the steps of a job:

    from holdfast.accelerate import Accelerator      # was: from accelerate import Accelerator

Importing this hides torchrun's variables; `Accelerator.steps` makes the process a member of its job. Other names of `accelerate`,
`accelerate.utils` and `accelerate.logging` can be imported from here, too. See docs/accelerate.md for what stays and what changes.
"""

from __future__ import annotations

from typing import Any

from holdfast.adapters import world

world.enter()  # before Accelerate looks at the environment

import accelerate  # noqa: E402
import accelerate.logging  # noqa: E402
import accelerate.utils  # noqa: E402

from holdfast.adapters.accelerate import backend  # noqa: E402
from holdfast.adapters.accelerate.accelerator import REFUSED as METHODS  # noqa: E402
from holdfast.adapters.accelerate.accelerator import Accelerator  # noqa: E402
from holdfast.errors import UsageError  # noqa: E402

backend.leave_out()

__all__ = ["Accelerator"]


_STARTS = "it would start processes itself; start the script with `holdfast run`, which starts the workers"
_SPLITS = (
    "with this Accelerator a replica is one process; to shard, use holdfast.start(main) and run.mesh() "
    "(docs/sharded.md)"
)
REFUSED = {
    "notebook_launcher": _STARTS,
    "debug_launcher": _STARTS,
    "PrepareForLaunch": _STARTS,
    "DeepSpeedPlugin": _SPLITS,
    "FullyShardedDataParallelPlugin": _SPLITS,
    "MegatronLMPlugin": _SPLITS,
    "TorchTensorParallelPlugin": _SPLITS,
    "ParallelismConfig": _SPLITS,
    "prepare_pippy": _SPLITS,
    "skip_first_batches": METHODS["skip_first_batches"],
}
"""Names of Accelerate's that cannot work at level 2: the reason, and what to write."""


def __getattr__(name: str) -> Any:
    """What Accelerate has under this name: in `accelerate`, `accelerate.utils` or `accelerate.logging`.

    Raises:
        AttributeError: none of them has it.
        UsageError: it cannot work in a job.
    """
    # Those with underscores are asked for by the import system, not by scripts; Accelerate has its own.
    if not name.startswith("__"):
        for module in (accelerate, accelerate.utils, accelerate.logging):
            if hasattr(module, name):
                if name in REFUSED:
                    raise UsageError(f"from holdfast.accelerate import {name}: {REFUSED[name]}")
                return getattr(module, name)
    raise AttributeError(f"module 'holdfast.accelerate' has no attribute {name!r}, nor has Accelerate")
