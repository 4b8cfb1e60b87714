"""A model and an average of its weights, both sharded by FSDP2 (`sharded`), or both whole in a job of one (`whole`)."""

import sys

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import holdfast


def main(run):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)).requires_grad_(False)
    if sys.argv[1] == "sharded":
        mesh = run.mesh(shard=2)["shard"]
        for network in (model, average.module):
            fully_shard(network[0], mesh=mesh)
            fully_shard(network[2], mesh=mesh)
            fully_shard(network, mesh=mesh)
            run.replicate(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    run.protect(model=model, optimizer=optimizer, average=average)
    data = torch.utils.data.TensorDataset(torch.randn(40, 8, generator=torch.Generator().manual_seed(0)))
    for step in run.steps(data, global_batch=8, micro_batch=2, until=20):
        with step:
            for (x,) in step:
                step.backward(model(x).square().sum(), weight=len(x))
            step.apply(optimizer, also=lambda: average.update_parameters(model))
    sums = [p.full_tensor() if isinstance(p, DTensor) else p for p in average.parameters()]
    print("average", int(average.n_averaged), *(float(p.double().norm()) for p in sums), flush=True)


holdfast.start(main)
