"""A small mixture of experts over sequences, which lies on meshes of the script's own, by `--layout`: expert parallel beside FSDP2,
context parallel, a replica in the replica, tensor parallel with sums that autograd leaves open. `one`: not sharded at all."""

import argparse
from collections.abc import Callable

import torch
from torch.distributed._functional_collectives import all_gather_tensor_autograd, all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
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
}


class Experts(torch.nn.Module):
    """Every token goes to one of them. `mesh`: they lie on several workers, and tokens travel."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.mesh = mesh
        self.up = torch.nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 3)
        self.down = torch.nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 3)
        if mesh is not None:
            for name in ("up", "down"):
                whole = getattr(self, name).detach()
                spread = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
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
        torch.distributed.all_to_all_single(theirs, counts, group=group)
        sent = counts.view(workers, -1).sum(1).tolist()
        come = theirs.view(workers, -1).sum(1).tolist()
        here = all_to_all_single_autograd(tokens, come, sent, group)
        out = self._compute(here, theirs.view(workers, -1), self.up.to_local(), self.down.to_local())
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
            x = x.redistribute(placements=[Shard(1)])
            x = self.norm(x).redistribute(placements=[Replicate()])
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
    layout, degrees = args.layout, DEGREES[args.layout]
    mesh = run.mesh(**degrees) if degrees else None
    experts = context = over = own = None
    if mesh is not None:
        over = (
            init_device_mesh("cpu", (2,), mesh_dim_names=("data",)) if layout == "context" else mesh["shard"]
        )
        context = mesh["context"] if layout == "context" else None
    if layout.startswith("experts"):
        assert mesh is not None
        own = init_device_mesh("cpu", (over.size() // 2, 2), mesh_dim_names=("efsdp", "ep"))
        experts = own["ep"]
    if layout == "replicas":
        over = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    mixed = not args.dense and layout != "tensor"
    model = torch.nn.Sequential(
        Block(experts, context, mixed), Block(experts, context, mixed), torch.nn.Linear(WIDTH, CLASSES)
    )
    if layout == "tensor":
        spread(model, mesh["tensor"])
        run.replicate(model)
        return model, lambda x, y: (DTensor.from_local(x, mesh["tensor"], [Replicate()], run_check=False), y)
    if over is not None:
        for block in model[:2]:
            if own is not None:
                fully_shard(block.experts, mesh=own["efsdp"])
            fully_shard(block, mesh=over)
        fully_shard(model, mesh=over)
        run.replicate(model)
    if context is None:
        return model, lambda x, y: (x, y)
    at = context.get_local_rank()
    return model, lambda x, y: (x.chunk(2, 1)[at], y.chunk(2, 1)[at])


def spread(model: torch.nn.Module, mesh: DeviceMesh) -> None:
    """Tensor parallel without FSDP2: every parameter is a DTensor."""
    kinds = {"up.weight": Shard(0), "up.bias": Shard(0), "down.weight": Shard(1)}
    for at, module in model.named_modules():
        for name, p in list(module.named_parameters(recurse=False)):
            kind = kinds.get(f"{at.split('.')[-1]}.{name}", Replicate())
            lies = distribute_tensor(p.detach(), mesh, [kind], src_data_rank=None)
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
                    torch.distributed.send(torch.zeros(1), 1 - torch.distributed.get_rank())
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
