"""The training data of a worker: the order of the samples, and the files from which they are read.

The names load on first use, because `import holdfast` must stay cheap and `TokenDataset` needs torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.data.cache import local
    from holdfast.data.fingerprint import check_fingerprint
    from holdfast.data.mapstyle import shuffled
    from holdfast.data.mixture import Mixture
    from holdfast.data.order import SampleOrder
    from holdfast.data.tokens import TokenDataset

_HOMES = {
    "Mixture": "holdfast.data.mixture",
    "SampleOrder": "holdfast.data.order",
    "TokenDataset": "holdfast.data.tokens",
    "check_fingerprint": "holdfast.data.fingerprint",
    "local": "holdfast.data.cache",
    "shuffled": "holdfast.data.mapstyle",
}

__all__ = ["Mixture", "SampleOrder", "TokenDataset", "check_fingerprint", "local", "shuffled"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
