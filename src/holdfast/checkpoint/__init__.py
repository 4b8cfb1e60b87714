"""Checkpoints in tiers: own memory, a buddy's memory, disk, object store.

For scripts: `save`, `load` and `flush` for a plain state dict; `TieredWriter` and `TieredReader` for
torch.distributed.checkpoint. They bring torch in with the first use; the rest of the package needs none.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.checkpoint.api import flush, load, save
    from holdfast.checkpoint.dcp import TieredReader, TieredWriter

__all__ = ["TieredReader", "TieredWriter", "flush", "load", "save"]

_HOMES = {
    "save": "holdfast.checkpoint.api",
    "load": "holdfast.checkpoint.api",
    "flush": "holdfast.checkpoint.api",
    "TieredWriter": "holdfast.checkpoint.dcp",
    "TieredReader": "holdfast.checkpoint.dcp",
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'holdfast.checkpoint' has no attribute {name!r}")
