"""A tiny job with the exact reduction: uneven numbers of tokens, dropout, clipping, a schedule in samples.

Arguments: number of steps, [global batch, what becomes of the learning rate when it has changed].
"""

import sys

import torch

import holdfast as hf
from holdfast.train.state_image import parameters_digest

WIDTH = 48


class Sentences:
    def __len__(self) -> int:
        return 10_000

    def batch(self, ids):
        rng = torch.Generator().manual_seed(int(ids[0]))
        tokens = torch.randint(1, 9, (len(ids), 6), generator=rng)
        lengths = torch.randint(1, 7, (len(ids), 1), generator=rng)
        return tokens, torch.where(torch.arange(6) < lengths, tokens % 7, -100)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(9, WIDTH)
        self.mix = torch.nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.drop = torch.nn.Dropout(0.2)
        self.head = torch.nn.Linear(WIDTH, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mixed = self.mix(self.embed(tokens).transpose(1, 2)).transpose(1, 2)
        return self.head(self.drop(torch.relu(self.norm(mixed))))


def main(run: hf.Run) -> None:
    steps, batch, changed = (*sys.argv[1:], *("22", "refuse")[len(sys.argv) - 2 :])
    torch.manual_seed(0)
    model = Net().to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: min(1.0, (run.samples + 64) / 512))
    run.protect(model=model, optimizer=optimizer, schedule=schedule)
    for step in run.steps(
        Sentences(),
        global_batch=int(batch),
        micro_batch=2,
        until=int(steps),
        seed=5,
        reduction="exact",
        batch_changed=changed,
    ):
        with step:
            for tokens, labels in step:
                out = model(tokens)
                loss = torch.nn.functional.cross_entropy(out.flatten(0, 1), labels.flatten(), reduction="sum")
                step.backward(loss, weight=int((labels >= 0).sum()))
            step.apply(optimizer, max_grad_norm=0.5, scheduler=schedule)
        if run.world_size == 1 and step.committed:
            print(f"LOSS {step.index} {step.loss.hex()}", flush=True)
    print(
        f"RATE {optimizer.param_groups[0]['lr']} SAMPLES {run.samples} PARAMS {parameters_digest({'m': model})}"
    )


hf.start(main)
