"""What scripts say of process groups to Accelerate, in a process that no launcher of torch's has started."""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection
from typing import Any

from accelerate.state import PartialState

_log = logging.getLogger(__name__)


def ignore(given: Collection[str]) -> None:
    """Says so of what a script has given for DDP and its process group, if anything."""
    if given:
        _log.warning(
            "%s: ignored, because these settings are for DistributedDataParallel and its process group, and Holdfast "
            "sums the gradients itself",
            ", ".join(given),
        )


def leave_out() -> None:
    """From here on Accelerate's state takes no backend for a process group: no worker has one. Scripts name one for torchrun
    (`ddp_backend` in TrainingArguments, `InitProcessGroupKwargs`), and Accelerate, which finds no launcher, would then ask torch for a
    group that nobody has made, and end with an error. Here and not in a trainer: TrainingArguments are made before there is one.
    """
    own = PartialState.__init__
    if hasattr(own, "_holdfast"):
        return

    @functools.wraps(own)
    def without(self: Any, *args: Any, backend: str | None = None, **more: Any) -> None:
        own(self, *args, **more)

    without._holdfast = True  # type: ignore[attr-defined]
    PartialState.__init__ = without
