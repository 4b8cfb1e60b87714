"""A tiny level-2 job whose samples are decoded by processes, with augmentation, and recorded: STEPS LEDGER WORKERS."""

import sys

import torch

import holdfast as hf

WIDTH = 16


class Pictures(torch.utils.data.Dataset):
    """An epoch ends in the middle of a step, and of a micro-batch."""

    def __len__(self) -> int:
        return 410

    def __getitem__(self, i):
        label = i % 8
        return torch.eye(WIDTH)[label] + 0.1 * torch.randn(WIDTH), label


def main(run: hf.Run) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.Dropout(0.1), torch.nn.Linear(WIDTH, 8)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.protect(model=model, optimizer=optimizer)
    data = hf.data.shuffled(Pictures(), workers=int(sys.argv[3]))
    steps = run.steps(data, global_batch=48, micro_batch=4, until=int(sys.argv[1]), ledger=sys.argv[2])
    for step in steps:
        with step:
            for inputs, labels in step:
                loss = torch.nn.functional.cross_entropy(model(inputs), labels, reduction="sum")
                step.backward(loss, weight=len(inputs))
            step.apply(optimizer)


hf.start(main)
