"""A small mixture of experts over sequences, which lies on meshes of the script's own, by `--layout`: expert parallel beside FSDP2,
context parallel, a replica in the replica, tensor parallel with sums that autograd leaves open, and several of these at once.
`one`: not sharded at all."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_gather_tensor_autograd, all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy

import holdfast as hf

WIDTH, HIDDEN, LENGTH, EXPERTS, CLASSES = 8, 12, 6, 4, 5

DEGREES = {
    "one": {},
    "fsdp": {"shard": 2},
    "experts": {"shard": 2},
    "experts-fsdp": {"shard": 4},
    "replicas": {"shard": 4},
    "context": {"context": 2},
    "tensor": {"tensor": 2},
    "nameless": {"tensor": 2},
    "twice": {"tensor": 4},
    "experts-tensor": {"shard": 2, "tensor": 2},
    "context-tensor": {"context": 2, "tensor": 2},
}


@dataclass
class Meshes:
    """Where a layout has what: None, where it has no such thing.

    Attributes:
        over: FSDP2's, for all but the experts.
        experts: `ep`, and `etp` where each expert is split over the workers of the tensor dimension.
        efsdp: FSDP2's for the experts.
        context: those who share a sample.
        tensor: the layers' beside FSDP2.
        every: all parameters are DTensors of it, without FSDP2.
    """

    over: DeviceMesh | None = None
    experts: DeviceMesh | None = None
    efsdp: DeviceMesh | None = None
    context: DeviceMesh | None = None
    tensor: DeviceMesh | None = None
    every: DeviceMesh | None = None


def meshes(layout: str, mesh: DeviceMesh) -> Meshes:
    def own(*shape: int, names: tuple[str, ...]) -> DeviceMesh:
        return init_device_mesh("cpu", shape, mesh_dim_names=names)

    if layout == "tensor":
        return Meshes(every=mesh["tensor"])
    if layout == "nameless":
        return Meshes(every=DeviceMesh("cpu", [0, 1]))
    if layout == "twice":
        return Meshes(every=DeviceMesh("cpu", [[0, 1], [2, 3]]))
    if layout == "replicas":
        return Meshes(over=own(2, 2, names=("dp_replicate", "dp_shard")))
    if layout == "context":
        return Meshes(over=own(2, names=("data",)), context=mesh["context"])
    if layout == "context-tensor":
        both = own(2, 2, names=("data", "tensor"))
        return Meshes(over=both["data"], context=mesh["context"], tensor=both["tensor"])
    if layout == "experts-tensor":
        return Meshes(over=mesh["shard"], tensor=mesh["tensor"], experts=own(2, 2, names=("ep", "etp")))
    if layout == "fsdp":
        return Meshes(over=mesh["shard"])
    both = own(mesh["shard"].size() // 2, 2, names=("efsdp", "ep"))
    return Meshes(over=mesh["shard"], experts=both["ep"], efsdp=both["efsdp"])


class Enter(torch.autograd.Function):
    """What follows is computed in parts by several workers, so the gradient of what they got is the sum of all."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Leave(torch.autograd.Function):
    """The sum of the parts."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class Experts(torch.nn.Module):
    """Every token goes to one of them. `mesh`: they lie on several workers, and tokens travel."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.up = torch.nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 3)
        self.down = torch.nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 3)
        self.mesh = self.parts = None
        if mesh is not None:
            self.mesh = mesh["ep"]
            self.parts = mesh["etp"].get_group() if mesh.ndim == 2 else None
            for name, split in (("up", 2), ("down", 1)):  # the hidden channels
                whole, kinds = getattr(self, name).detach(), (Shard(0), Shard(split))
                spread = distribute_tensor(whole, mesh, kinds[: mesh.ndim], src_data_rank=None)
                setattr(self, name, torch.nn.Parameter(spread))

    def forward(self, tokens: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        order = torch.argsort(chosen, stable=True)
        counts = torch.bincount(chosen, minlength=EXPERTS)
        out = self._travel(tokens[order], counts)
        return torch.empty_like(out).index_copy(0, order, out)

    def _travel(self, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        if self.mesh is None:
            return self._compute(tokens, counts[None], self.up, self.down)
        group, workers = self.mesh.get_group(), self.mesh.size()
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=group)
        sent = counts.view(workers, -1).sum(1).tolist()
        come = theirs.view(workers, -1).sum(1).tolist()
        here = all_to_all_single_autograd(tokens, come, sent, group)
        if self.parts is not None:
            here = Enter.apply(here, self.parts)
        out = self._compute(here, theirs.view(workers, -1), self.up.to_local(), self.down.to_local())
        if self.parts is not None:
            out = Leave.apply(out, self.parts)
        return all_to_all_single_autograd(out, sent, come, group)

    @staticmethod
    def _compute(
        tokens: torch.Tensor, counts: torch.Tensor, up: torch.Tensor, down: torch.Tensor
    ) -> torch.Tensor:
        """counts: of tokens, by the worker that sent them, and by expert."""
        parts = torch.split(tokens, counts.flatten().tolist())
        experts = counts.shape[1]
        return torch.cat(
            [torch.tanh(part @ up[i % experts]) @ down[i % experts] for i, part in enumerate(parts)]
        )


class Block(torch.nn.Module):
    def __init__(self, experts: DeviceMesh | None, context: DeviceMesh | None, mixed: bool) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, 2 * WIDTH)
        self.down = torch.nn.Linear(2 * WIDTH, WIDTH)
        self.context, self.mixed = context, mixed
        if mixed:
            self.router = torch.nn.Linear(WIDTH, EXPERTS)
            self.experts = Experts(experts)
            self.register_buffer("loads", torch.zeros(EXPERTS, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, DTensor):  # sequence parallel: the norm's gradient is a sum that is left open
            whole = [Replicate()] * x.device_mesh.ndim
            x = self.norm(x.redistribute(placements=[Shard(1), *whole[1:]])).redistribute(placements=whole)
        else:
            x = self.norm(x)
        x = x + self.down(torch.tanh(self.up(x)))
        seen = x if self.context is None else all_gather_tensor_autograd(x.contiguous(), 1, self.context)
        x = x + torch.tanh(seen.sum(1, keepdim=True) / LENGTH)
        if not self.mixed:
            return x
        tokens = x.flatten(0, 1)
        chosen = self.router(tokens).softmax(-1)
        gate, index = chosen.max(-1)
        self.loads += torch.bincount(index, minlength=EXPERTS)
        return x + (self.experts(tokens, index) * gate[:, None]).view_as(x)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int)
    parser.add_argument("--layout", choices=DEGREES, default="experts")
    parser.add_argument("--reduction", default="exact")
    parser.add_argument("--dense", action="store_true", help="without experts")
    parser.add_argument("--pipeline", action="store_true", help="sends between workers, as stages do")
    return parser.parse_args()


def build(run: hf.Run, args: argparse.Namespace) -> tuple[torch.nn.Module, Callable]:
    """The model, and what makes this worker's part of a micro-batch."""
    torch.manual_seed(0)
    degrees = DEGREES[args.layout]
    at = meshes(args.layout, run.mesh(**degrees)) if degrees else Meshes()
    mixed = not args.dense and at.every is None
    model = torch.nn.Sequential(
        Block(at.experts, at.context, mixed),
        Block(at.experts, at.context, mixed),
        torch.nn.Linear(WIDTH, CLASSES),
    )
    if degrees:
        lay_out(model, at)
        run.replicate(model)
    if at.every is not None:
        whole = [Replicate()] * at.every.ndim
        return model, lambda x, y: (DTensor.from_local(x, at.every, whole, run_check=False), y)
    if at.context is None:
        return model, lambda x, y: (x, y)
    mine = at.context.get_local_rank()
    return model, lambda x, y: (x.chunk(2, 1)[mine], y.chunk(2, 1)[mine])


def lay_out(model: torch.nn.Sequential, at: Meshes) -> None:
    if at.every is not None:
        spread(model, at.every)
        return
    apart = set()
    for block in model[:2]:
        if at.tensor is not None:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, at.tensor, plan, src_data_rank=None)
        if at.efsdp is not None:
            fully_shard(block.experts, mesh=at.efsdp)
        elif at.experts is not None:
            apart |= set(block.experts.parameters())
        fully_shard(block, mesh=at.over, ignored_params=apart)
    fully_shard(model, mesh=at.over, ignored_params=apart)


def spread(model: torch.nn.Module, mesh: DeviceMesh) -> None:
    """Tensor parallel without FSDP2: every parameter is a DTensor. On a mesh of two dimensions what is split is split twice."""
    kinds = {"up.weight": Shard(0), "up.bias": Shard(0), "down.weight": Shard(1)}
    for at, module in model.named_modules():
        for name, p in list(module.named_parameters(recurse=False)):
            kind = kinds.get(f"{at.split('.')[-1]}.{name}", Replicate())
            lies = distribute_tensor(p.detach(), mesh, [kind] * mesh.ndim, src_data_rank=None)
            setattr(module, name, torch.nn.Parameter(lies))


def main(run: hf.Run) -> None:
    args = arguments()
    model, part = build(run, args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    run.protect(model=model, optimizer=optimizer)
    if any(True for _ in model.buffers()):
        run.buffers("sum", "*.loads")
    drawn = torch.Generator().manual_seed(3)
    inputs = torch.randn(128, LENGTH, WIDTH, generator=drawn)
    targets = torch.randint(0, CLASSES, (128, LENGTH), generator=drawn)
    data = torch.utils.data.TensorDataset(inputs, targets)
    for step in run.steps(data, global_batch=16, micro_batch=2, until=args.steps, reduction=args.reduction):
        with step:
            for batch in step:
                if args.pipeline:
                    dist.send(torch.zeros(1), 1 - dist.get_rank())
                x, y = part(*batch)
                out = model(x)
                out = out.full_tensor() if isinstance(out, DTensor) else out
                loss = cross_entropy(out.flatten(0, 1), y.flatten(), reduction="sum")
                step.backward(loss, weight=y.numel())
            step.apply(optimizer, max_grad_norm=0.5)
        if step.committed:
            print(f"norm: {step.index} {step.grad_norm!r} {step.loss!r}", flush=True)
    for name, buffer in model.named_buffers():
        print(f"buffer: {name} {buffer.tolist()}", flush=True)


if __name__ == "__main__":
    hf.start(main)
