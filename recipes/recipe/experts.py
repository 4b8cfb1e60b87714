"""Experts that lie on several workers: each computes its own, for the tokens of all.

`transformers` lets an implementation of a layer's experts be registered by name. This one sends every token to the worker that has
its expert, has the experts there computed as `transformers` computes them, and gets the results back.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

NAME = "spread"


def layers_in(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The modules that hold all experts of a layer, each weight in one tensor [experts, ...]."""
    for part in module.modules():
        if hasattr(part, "gate_up_proj") and hasattr(part, "num_experts"):
            yield part


def spread(model: Any, mesh: DeviceMesh) -> None:
    """Each worker of the mesh gets its part of the experts of every layer; the model may be on the meta device."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, _forward)
    model.config._experts_implementation = NAME
    for layer in layers_in(model):
        for name, weight in list(layer.named_parameters(recurse=False)):
            # Without communication: what lies here is loaded later, from this worker's slices of the files.
            lies = distribute_tensor(weight.detach(), mesh, [Shard(0)], src_data_rank=None)
            setattr(layer, name, torch.nn.Parameter(lies))
        layer.holdfast_mesh = mesh


class _Local:
    """The experts of a layer that are here, as `transformers` sees them. The rest it asks of the layer."""

    def __init__(self, layer: torch.nn.Module, count: int) -> None:
        self.layer, self.num_experts = layer, count

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.layer, name)
        return found.to_local() if isinstance(found, DTensor) else found


def _forward(layer: Any, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """tokens [T, D]; chosen and weights [T, K]. Returns [T, D]: of each token the weighted sum over its experts."""
    count, each = tokens.shape[0], chosen.shape[1]
    mesh, experts = layer.holdfast_mesh, layer.num_experts
    workers, here = mesh.size(), experts // mesh.size()
    flat = chosen.reshape(-1)
    # Stable: the order in which an expert adds up its tokens must not depend on how the sort was done.
    order = torch.argsort(flat, stable=True)
    loads = torch.bincount(flat, minlength=experts)
    theirs = torch.empty_like(loads)
    torch.distributed.all_to_all_single(theirs, loads, group=mesh.get_group())
    sent = loads.view(workers, here).sum(1).tolist()
    come = theirs.view(workers, here).sum(1).tolist()
    arrived = all_to_all_single_autograd(tokens[order // each], come, sent, mesh.get_group())
    # They come sorted by worker, and of each worker by expert.
    numbers = torch.arange(here, device=flat.device).repeat(workers).repeat_interleave(theirs)
    ones = torch.ones_like(numbers, dtype=tokens.dtype)
    done = grouped_mm_experts_forward(_Local(layer, here), arrived, numbers[:, None], ones[:, None])
    back = all_to_all_single_autograd(done, sent, come, mesh.get_group())
    out = torch.empty_like(back).index_copy(0, order, back)
    return (out.view(count, each, -1) * weights[..., None]).sum(1).to(tokens.dtype)
