"""What a worker trains on: the order of the samples, and the files they are read from.

The names load on first use, because `import holdfast` must stay cheap and `TokenDataset` needs torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.data.order import SampleOrder
    from holdfast.data.tokens import TokenDataset

__all__ = ["SampleOrder", "TokenDataset"]


def __getattr__(name: str) -> Any:
    if name == "SampleOrder":
        from holdfast.data.order import SampleOrder

        return SampleOrder
    if name == "TokenDataset":
        from holdfast.data.tokens import TokenDataset

        return TokenDataset
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
