"""Holdfast keeps PyTorch training running through failures and changes of capacity.

What a training script needs, and nothing else; importing this is cheap, torch comes in with the first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from holdfast.distribution import warn_of_stranger

if TYPE_CHECKING:
    from holdfast import checkpoint, data
    from holdfast.errors import JobStopped
    from holdfast.protocol.notices import Notice
    from holdfast.train.data_cursor import adascale_gain, scale_lr
    from holdfast.train.link import notice
    from holdfast.train.run import Run, start
    from holdfast.train.step import Step

__all__ = [
    "JobStopped",
    "Notice",
    "Run",
    "Step",
    "adascale_gain",
    "checkpoint",
    "data",
    "notice",
    "scale_lr",
    "start",
]
__version__ = "0.1.0"

_HOMES = {
    "JobStopped": "holdfast.errors",
    "Notice": "holdfast.protocol.notices",
    "notice": "holdfast.train.link",
    "Run": "holdfast.train.run",
    "start": "holdfast.train.run",
    "Step": "holdfast.train.step",
    "adascale_gain": "holdfast.train.data_cursor",
    "scale_lr": "holdfast.train.data_cursor",
}


warn_of_stranger(__file__)


def __getattr__(name: str) -> object:
    if name in ("checkpoint", "data"):
        return import_module(f"holdfast.{name}")
    # Torch takes seconds to import. The command line and scripts that only read a checkpoint import this
    # package too.
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
