from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import holdfast


def main(run: holdfast.Run) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(256, 64), torch.nn.Linear(64, 256)).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    text = torch.tensor(list(Path(__file__).read_bytes())).unfold(0, 33, 1)
    data = TensorDataset(text[:, :-1], text[:, 1:])
    run.protect(model=model, optimizer=optimizer)
    for step in run.steps(data, global_batch=64, micro_batch=4, until=20):
        with step:
            for tokens, labels in step:
                loss = cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
                step.backward(loss, weight=labels.numel())
            step.apply(optimizer, max_grad_norm=1.0)
        run.log(loss=step.loss)
        if run.rank == 0 and step.index % 10 == 0:
            print(f"step {step.index}: loss {step.loss:.3f}", flush=True)


holdfast.start(main)
