"""A mixture of experts whose experts lie on the workers of a replica (expert parallel), the rest under FSDP2.

Each token goes to one expert, so tokens travel to the worker that has it, and back. The same for every system.

Imported by workers of every system, inside each peer's own environment: torch and the standard library only.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from bench.recovery.model import CLASSES, INPUTS

WIDTH, HIDDEN, EXPERTS, LAYERS = 512, 1024, 4, 2
"""9.8 million parameters: 8.4 of them are those of experts."""


class Experts(nn.Module):
    """Linear layers of all experts. After `spread` each worker of the mesh has its share of them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(EXPERTS, WIDTH, HIDDEN))
        self.down = nn.Parameter(torch.empty(EXPERTS, HIDDEN, WIDTH))
        self.mesh: DeviceMesh | None = None

    def spread(self, mesh: DeviceMesh) -> None:
        """Without communication: nothing has values yet."""
        self.mesh = mesh
        for name in ("up", "down"):
            lies = distribute_tensor(getattr(self, name).detach(), mesh, [Shard(0)], src_data_rank=None)
            setattr(self, name, nn.Parameter(lies))

    def forward(self, tokens: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """tokens: [tokens, WIDTH]; chosen: the expert of each."""
        assert self.mesh is not None
        order = torch.argsort(chosen, stable=True)
        counts = torch.bincount(chosen, minlength=EXPERTS)
        group, workers = self.mesh.get_group(), self.mesh.size()
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=group)
        sent = counts.view(workers, -1).sum(1).tolist()
        come = theirs.view(workers, -1).sum(1).tolist()
        here = all_to_all_single_autograd(tokens[order], come, sent, group)
        out = self._compute(here, theirs.flatten().tolist())
        back = all_to_all_single_autograd(out, sent, come, group)
        return torch.empty_like(back).index_copy(0, order, back)

    def _compute(self, tokens: torch.Tensor, counts: list[int]) -> torch.Tensor:
        up, down = (p.to_local() if isinstance(p, DTensor) else p for p in (self.up, self.down))
        parts = torch.split(tokens, counts)
        return torch.cat([torch.relu(x @ up[i % len(up)]) @ down[i % len(up)] for i, x in enumerate(parts)])


class Block(nn.Module):
    """A router and its experts, beside a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, chosen = self.router(x).softmax(-1).max(-1)
        return x + self.experts(x, chosen) * gate[:, None]


class Mixture(nn.Module):
    """`blocks`, one after the other; each is a unit of sharding."""

    def __init__(self) -> None:
        super().__init__()
        mixed = (Block() for _ in range(LAYERS))
        self.blocks = nn.ModuleList([nn.Linear(INPUTS, WIDTH), *mixed, nn.Linear(WIDTH, CLASSES)])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return inputs


def shard(model: Mixture, mesh: DeviceMesh) -> None:
    """Places the parameters over a mesh of two dimensions, (replicate, shard): experts over the second one, and each of them
    over the first one by FSDP2; the rest by HSDP."""
    for block in model.blocks:
        if isinstance(block, Block):
            block.experts.spread(mesh["shard"])
            fully_shard(block.experts, mesh=mesh["replicate"], reshard_after_forward=False)
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
