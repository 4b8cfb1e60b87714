"""Megatron-Bridge on a machine without a GPU and without Transformer Engine, which it imports whether it is used or not.

Import it before Megatron-Bridge; `stand_for_a_gpu()` comes before training. What asks for a GPU then gets memory of the
processor. Everything else is Megatron's own: model, data, distributed optimizer, schedule, checkpoints, and the loop.
"""

from __future__ import annotations

import contextlib
import os
import sys
import types
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # small functions, which take minutes to compile

# megatron.core looks whether Transformer Engine is there, and then uses it; Bridge imports it without looking.
import megatron.core.datasets.utils
import megatron.core.dist_checkpointing.tensor_aware_state_dict
import megatron.core.models.gpt.gpt_layer_specs
import megatron.core.optimizer
import megatron.core.optimizer.distrib_optimizer as distributed
import megatron.core.tensor_parallel.random as generators
import torch
from torch.overrides import TorchFunctionMode


class _Missing(type):
    """A class of a module that is not here: it can be named and inherited from."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(name, (), {})


class _Module(types.ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(name, (), {})


_engine, _pytorch = _Module("transformer_engine"), _Module("transformer_engine.pytorch")
_engine.pytorch = _pytorch
sys.modules |= {"transformer_engine": _engine, "transformer_engine.pytorch": _pytorch}


class FusedAdam(torch.optim.Optimizer):
    """As Transformer Engine's, with which Megatron trains on GPUs: the step is one of a group. Megatron 0.16 can save an optimizer
    of torch's, and loads it with step 0."""

    def __init__(
        self, params: Any, lr: float, betas: tuple, eps: float, weight_decay: float, adam_w_mode: bool
    ) -> None:
        assert adam_w_mode
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                for name in ("exp_avg", "exp_avg_sq"):
                    state.setdefault(name, torch.zeros_like(parameter))
                (beta1, beta2), step = group["betas"], group["step"]
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                state["exp_avg"].lerp_(parameter.grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)
                size = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt_().add_(group["eps"])
                parameter.addcdiv_(state["exp_avg"], size, value=-group["lr"] / (1 - beta1**step))


class _OnCpu(TorchFunctionMode):
    """Tensors that are asked for on a GPU are made on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)  # Megatron has names of types on GPUs only
        args = tuple("cpu" if _is_gpu(a) else a for a in args)
        return func(*args, **{k: "cpu" if _is_gpu(v) else v for k, v in (kwargs or {}).items()})


def _is_gpu(value: Any) -> bool:
    name = value.type if isinstance(value, torch.device) else value
    return isinstance(name, str) and name.startswith("cuda")


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What a GPU would have to wait for, or give back."""


# They are in the wheel, compiled.
megatron.core.datasets.utils.compile_helpers = _nothing


class _Stream:
    def wait_stream(self, other: Any) -> None:
        """There is one."""


def stand_for_a_gpu() -> None:
    """For all of this process, until it ends."""
    here = {
        "is_available": lambda: True,
        "current_device": lambda: "cpu",
        "device_count": lambda: 1,
        # The processor's generator stands for the GPU's.
        "get_rng_state": lambda *a, **k: torch.get_rng_state(),
        "set_rng_state": lambda state, *a, **k: torch.set_rng_state(state),
        "manual_seed": torch.manual_seed,
        "stream": lambda stream: contextlib.nullcontext(),
        "Stream": _Stream,
        "current_stream": _Stream,
        "get_device_capability": lambda *a: (8, 0),
    }
    for name in ("empty_cache", "synchronize", "set_device", "reset_peak_memory_stats"):
        here[name] = _nothing
    for name, value in here.items():
        setattr(torch.cuda, name, value)
    generators._get_cuda_rng_state = lambda *a, **k: torch.get_rng_state()
    generators._set_cuda_rng_state = lambda state, *a, **k: torch.set_rng_state(state)
    megatron.core.optimizer.Adam = distributed.Adam = FusedAdam
    megatron.core.optimizer.USING_PYTORCH_OPTIMIZER = False
    distributed.HAVE_APEX_OR_TE = distributed.USING_TE_OPTIMIZER = True
    _OnCpu().__enter__()
