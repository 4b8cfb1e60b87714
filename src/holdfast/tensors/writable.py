"""Which tensors can be saved and written to again, and the writing itself.

What is saved are the bytes of a dense tensor. An expanded tensor has fewer bytes than elements: it is written where its
elements lie. Anything whose bytes are not those of its elements is refused by name, before it is relied upon.
"""

from __future__ import annotations

import torch

from holdfast.errors import StateError, UsageError
from holdfast.tensors.wrappers import is_wrapper

MOST_COUNTED = 1 << 22
"""Elements of a tensor of unusual strides whose places are counted one by one. A larger one is taken to overlap itself."""


def check(path: str, tensor: torch.Tensor) -> None:
    """Sees that a tensor is one whose bytes can be read and written.

    Args:
        tensor: of a DTensor, the piece that is here.

    Raises:
        UsageError: it has no bytes of its own, none that can be read as its elements, or elements that share memory in
            another way than by `expand`.
    """
    kind = type(tensor).__name__
    if tensor.is_nested or tensor.layout is not torch.strided or tensor.is_quantized:
        what = "nested tensor" if tensor.is_nested else f"{tensor.layout} {tensor.dtype} tensor"
        raise UsageError(f"{path}: a {what} cannot be saved; save a dense tensor or a DTensor")
    if hasattr(tensor, "local_shards"):
        raise UsageError(f"{path}: a {kind} cannot be saved; save a dense tensor or a DTensor")
    if tensor.device.type == "meta":
        raise UsageError(
            f"{path}: a tensor on meta cannot be saved: it has no data yet (it is on the meta device); call to_empty() and "
            "initialize it"
        )
    if is_wrapper(tensor) or (tensor.numel() and not _address(tensor)):
        raise UsageError(
            f"{path}: a {kind} cannot be saved: it does not have its own memory, and does not define "
            "__tensor_flatten__ and __tensor_unflatten__, which would return its inner tensors; keep a plain tensor "
            "in the state"
        )
    if overlaps(tensor):
        raise UsageError(
            f"{path}: elements of this tensor share memory (shape {tuple(tensor.shape)}, strides {tensor.stride()}), so it "
            "could not be restored; keep tensor.clone() in the state"
        )


def is_ordinary(tensor: torch.Tensor) -> bool:
    """Whether it is surely no wrapper, whatever its class says of itself."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) or not tensor.numel() or has_bytes(tensor)


def has_bytes(tensor: torch.Tensor) -> bool:
    """Whether it has elements whose bytes can be read where it lies."""
    plain = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested
    return plain and tensor.numel() > 0 and bool(_address(tensor))


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # of a class that has none
        return 0


def is_expanded(tensor: torch.Tensor) -> bool:
    """Whether elements along a dimension are one and the same place in memory, as `expand` makes them."""
    return not tensor.is_contiguous() and any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    )


def overlaps(tensor: torch.Tensor) -> bool:
    """Whether elements share memory in another way than by `expand`, such as windows that `as_strided` or `unfold` made."""
    if tensor.is_contiguous() or tensor.numel() < 2:
        return False
    lines = sorted(
        (stride, size)
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        if stride and size > 1
    )
    reach, apart = 0, True
    for stride, size in lines:
        apart = apart and stride > reach
        reach += stride * (size - 1)
    if apart:
        return False
    places = torch.zeros(1, dtype=torch.int64)
    for stride, size in lines:
        if len(places) * size > MOST_COUNTED:
            return True
        places = (places[:, None] + torch.arange(size)[None] * stride).reshape(-1)
    return len(torch.unique(places)) < len(places)


def check_source(path: str, target: torch.Tensor, source: torch.Tensor) -> None:
    """Sees that `overwrite` can be done. Nothing is written.

    Raises:
        StateError: another shape, or the target is expanded, and the values differ where it has one place for them.
    """
    if target.shape != source.shape:
        raise StateError(f"{path}: {tuple(source.shape)} cannot be written into {tuple(target.shape)}")
    if is_expanded(target):
        once = _once(target, source)
        if not torch.equal(_bits(once.expand(source.shape)), _bits(source)):
            raise StateError(
                f"{path} is an expanded tensor here, and was saved with different values along the expanded dimensions: "
                "register tensor.clone() instead"
            )


def overwrite(target: torch.Tensor, source: torch.Tensor) -> None:
    """Writes the values of a tensor into one that `check` has accepted; of an expanded one, where its elements lie."""
    with torch.no_grad():
        _once(target, target).copy_(_once(target, source))


def _once(target: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Of `tensor` what there is of `target` in memory: of an expanded dimension its first element."""
    tensor = tensor.detach()
    for dim, (stride, size) in enumerate(zip(target.stride(), target.shape, strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.contiguous()  # of one element, with any stride
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)
