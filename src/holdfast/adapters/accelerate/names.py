"""What scripts import from Accelerate beside the Accelerator."""

from __future__ import annotations

from typing import Any

import accelerate
import accelerate.logging
import accelerate.utils

from holdfast.adapters.accelerate.accelerator import REFUSED as METHODS
from holdfast.errors import UsageError

_STARTS = "it starts processes of its own; start the script with `holdfast run`, which does"
_SPLITS = "a replica is one process here; shard with holdfast.start(main) and run.mesh() (docs/sharded.md)"
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


def found(name: str) -> Any:
    """What Accelerate has under this name: in `accelerate`, `accelerate.utils` or `accelerate.logging`.

    Raises:
        AttributeError: none of them has it.
        UsageError: it cannot work in a job.
    """
    # Asked by the import system, not by scripts; Accelerate has its own.
    if not name.startswith("__"):
        for module in (accelerate, accelerate.utils, accelerate.logging):
            if hasattr(module, name):
                if name in REFUSED:
                    raise UsageError(f"from holdfast.accelerate import {name}: {REFUSED[name]}")
                return getattr(module, name)
    raise AttributeError(f"module 'holdfast.accelerate' has no attribute {name!r}, nor has Accelerate")
