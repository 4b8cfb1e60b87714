"""A tiny level-2 job for the page: it logs metrics, prints a progress line now and then, and once a line that a rule of
`rules.toml` beside it finds.

train_seen.py STEPS [SECONDS of every forward pass] [STEP of that line]
"""

import sys
import time

import torch

import holdfast as hf

WIDTH = 64
WARNED_AT = int(sys.argv[3]) if len(sys.argv) > 3 else 20


class Blobs:
    deterministic = True

    def __len__(self) -> int:
        return 100_000

    def batch(self, ids):
        rng = torch.Generator().manual_seed(int(ids[0]))
        labels = torch.randint(0, 8, (len(ids),), generator=rng)
        return torch.randn(len(ids), WIDTH, generator=rng) + labels[:, None], labels


def main(run: hf.Run) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 8)).to(
        run.device
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.protect(model=model, optimizer=optimizer)
    device_s = float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
    for step in run.steps(Blobs(), global_batch=48, micro_batch=4, until=int(sys.argv[1])):
        right = count = 0
        with step:
            for inputs, labels in step:
                time.sleep(device_s)
                found = model(inputs)
                step.backward(
                    torch.nn.functional.cross_entropy(found, labels, reduction="sum"), weight=len(inputs)
                )
                right, count = right + int((found.argmax(1) == labels).sum()), count + len(inputs)
            step.apply(optimizer, max_grad_norm=1.0)
        run.log(
            accuracy=right / max(1, count), weights=sum(float(p.detach().norm()) for p in model.parameters())
        )
        if step.index % 10 == 0:
            print(f"\x1b[32mstep {step.index}\x1b[0m: loss {float(step.loss):.4f}", flush=True)
        if step.index == WARNED_AT:
            # And what would clear a terminal's line.
            print("GPU 0: row remapping is pending after an ECC error\n\x1b[2Kcleared", flush=True)


hf.start(main)
