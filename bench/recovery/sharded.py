"""The sharded training job, the same for every system: model, precision, placement of the parameters, state.

A multi-layer perceptron under FSDP2: the hidden layers are sharded one by one, parameters and gradients travel in
bfloat16, parameters and AdamW's moments are kept in float32. Built on the meta device, so that a worker that receives
its state computes no initial values of the whole model. The size "moe" is a mixture of experts instead, see `mixture`, in
float32: gloo sends no tokens in bfloat16.

Imported by workers of every system, inside each peer's own environment: torch and the standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from bench.recovery import mixture
from bench.recovery.model import CLASSES, HIDDEN_LAYERS, INPUTS, LEARNING_RATE

WIDTHS = {"100m": 5504, "10m": 1536, "tiny": 64}
"""Hidden width of each model size: 100.8 million, 9.8 million, and 128 thousand parameters."""
BATCH = 8
"""Samples of one worker in one step. Small: two cores are to spend a step's time on less than the collectives."""
PRECISION = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)


class Network(nn.Module):
    """`blocks`, one after the other; each is a unit of sharding."""

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = [INPUTS, *[width] * (HIDDEN_LAYERS + 1)]
        hidden = (nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in pairwise(sizes))
        self.blocks = nn.ModuleList([*hidden, nn.Linear(width, CLASSES)])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return inputs


Model = Network | mixture.Mixture


def build(size: str) -> Model:
    """The model on the meta device."""
    with torch.device("meta"):
        return mixture.Mixture() if size == "moe" else Network(WIDTHS[size])


def shard(model: Model, mesh: DeviceMesh) -> None:
    """Place the parameters over `mesh`: (replicate, shard) for HSDP and for a mixture, else (shard)."""
    if isinstance(model, mixture.Mixture):
        mixture.shard(model, mesh)
        return
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=PRECISION, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=PRECISION, reshard_after_forward=False)


def materialize(model: Model, shard_rank: int) -> None:
    """Give a sharded model memory and its first values: the same for one shard in every replica."""
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(shard_rank)
    with torch.no_grad():
        for parameter in model.parameters():
            bound = parameter.shape[-1] ** -0.5
            local(parameter).uniform_(-bound, bound, generator=generator)


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with its moments in place: a state can be put into it before the first step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.zeros(()),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Every tensor of the state by name, live: parameters and moments are DTensors."""
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        tensors[name] = parameter.detach()
        for kind, value in optimizer.state[parameter].items():
            tensors[f"{kind}.{name}"] = value
    return tensors


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This worker's part of `tensor`, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_state(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """This worker's part of every tensor of a state, sharing their memory."""
    return {name: local(tensor).detach() for name, tensor in tensors.items()}


def put(into: Mapping[str, torch.Tensor], received: Mapping[str, torch.Tensor]) -> None:
    """Copy a received state into the live one of the same names and shapes."""
    with torch.no_grad():
        for name, tensor in into.items():
            tensor.copy_(received[name])


def nbytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Bytes that this worker holds of a state."""
    return sum(local(tensor).nbytes for tensor in tensors.values())
