"""Tensors that are made of other tensors, as libraries make them, and an optimizer that keeps such."""

from __future__ import annotations

import enum
from typing import NamedTuple

import torch
from torch.utils._pytree import tree_map


class Rounding(enum.Enum):
    NEAREST = "nearest"


class Block(NamedTuple):
    size: int
    rounding: Rounding


class Quantized(torch.Tensor):
    """One code a number, and a scale: whatever copies into it quantizes anew, as torchao's do. `inner` may be wrappers again."""

    @staticmethod
    def __new__(cls, codes, scale, shape, block=None):
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes, scale, shape, block=None):
        self.codes, self.scale = codes, scale
        self.block = block or Block(int(codes.numel()), Rounding.NEAREST)

    def __tensor_flatten__(self):
        return ["codes", "scale"], {"shape": self.shape, "block": self.block, "dtype": torch.float32}

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size=None, stride=None):
        return cls(inner["codes"], inner["scale"], context["shape"], context["block"])

    def dequantize(self):
        codes = self.codes.dequantize() if isinstance(self.codes, Quantized) else self.codes
        return (codes.float() * self.scale).reshape(self.shape)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.view.default) and args[1:] in (
            (),
            (list(args[0].shape),),
        ):
            own = args[0]
            return cls(own.codes, own.scale, own.shape, own.block)
        if func is torch.ops.aten.copy_.default and isinstance(args[0], Quantized):
            target, source = args[0], args[1]
            source = source.dequantize() if isinstance(source, Quantized) else source
            target.scale.fill_(source.abs().max() / 100 + 1e-12)
            target.codes.copy_((source / target.scale).round().clamp(-127, 127).reshape(target.codes.shape))
            return target

        def plain(value):
            return value.dequantize() if isinstance(value, Quantized) else value

        return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))


def quantized(shape, seed=0):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    scale = values.abs().max() / 127
    return Quantized((values / scale).round().to(torch.int8), scale.clone(), torch.Size(shape))


class MomentumIn8Bits(torch.optim.Optimizer):
    """SGD with momentum that is kept in 8 bits."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    codes = torch.zeros(p.shape, dtype=torch.int8)
                    state["momentum"] = Quantized(codes, torch.tensor(1.0), p.shape)
                momentum = state["momentum"].dequantize() * 0.9 + p.grad
                state["momentum"].copy_(momentum)
                p.add_(momentum, alpha=-group["lr"])


class Opaque(torch.Tensor):
    """Its memory is elsewhere, and it does not say where."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def plain(value):
            return value.inner if isinstance(value, Opaque) else value

        return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))


def bits(tensor):
    """Of every tensor with memory of which a tensor is made: its path, dtype, shape and bytes, found without Holdfast."""
    if isinstance(tensor, torch.distributed.tensor.DTensor):
        tensor = tensor._local_tensor
    if hasattr(tensor, "__tensor_flatten__") and type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        names, context = tensor.__tensor_flatten__()
        return {"class": type(tensor), "context": context} | {n: bits(getattr(tensor, n)) for n in names}
    whole = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    # One element may have any stride.
    flat = whole.as_strided((whole.numel(),), (1,))
    raw = flat.view(torch.uint8).numpy() if whole.numel() else b""
    return str(whole.dtype), tuple(whole.shape), bytes(raw)
