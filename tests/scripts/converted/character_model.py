"""character_model.py at level 2: the same model, samples, rates, evaluations and best checkpoint."""

import argparse
import hashlib
import math
import os

import torch
from torch import nn
from torch.nn import functional as F

import holdfast

parser = argparse.ArgumentParser()
parser.add_argument("--out-dir", default="out")
parser.add_argument("--max-iters", type=int, default=16)
parser.add_argument("--reduction", default="fast")
args = parser.parse_args()

block_size, batch_size, accumulation = 16, 4, 4
eval_interval, eval_iters = 5, 3
learning_rate, min_lr, warmup = 3e-3, 3e-4, 4

text = "the quick brown fox jumps over the lazy dog. " * 40
chars = sorted(set(text))
stoi = {c: i for i, c in enumerate(chars)}
data = torch.tensor([stoi[c] for c in text])
splits = {"train": data[: len(data) * 9 // 10], "val": data[len(data) * 9 // 10 :]}


class Blocks(torch.utils.data.Dataset):
    """Anywhere from the text, whatever number is asked for."""

    def __init__(self, split):
        self.source = splits[split]

    def __len__(self):
        return len(self.source) - block_size - 1

    def __getitem__(self, _):
        i = torch.randint(len(self), ())
        return self.source[i : i + block_size], self.source[i + 1 : i + block_size + 1]


class CharModel(nn.Module):
    def __init__(self, vocabulary, width=32):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(block_size, width)
        self.block = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.1, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.1)
        self.head.weight = self.tokens.weight  # tied

    def forward(self, x, y):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        logits = self.head(self.block(h, src_mask=mask, is_causal=True))
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


class Best:
    """What every worker finds in the evaluations; a newcomer takes it over."""

    changes_between_steps = True
    val_loss = 1e9

    def state_dict(self):
        return {"val_loss": self.val_loss}

    def load_state_dict(self, state):
        self.val_loss = state["val_loss"]


def get_lr(it):
    if it < warmup:
        return learning_rate * (it + 1) / warmup
    done = min(1.0, (it - warmup) / (args.max_iters - warmup))
    return min_lr + 0.5 * (1 + math.cos(math.pi * done)) * (learning_rate - min_lr)


def main(run):
    os.makedirs(args.out_dir, exist_ok=True)
    torch.manual_seed(1337)
    model = CharModel(len(chars))
    optimizer = torch.optim.AdamW(model.parameters(), lr=get_lr(0), weight_decay=0.1)
    best = Best()
    run.protect(model=model, optimizer=optimizer, best=best)

    def set_lr(it):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(it)

    @torch.no_grad()
    def estimate_loss(it):
        torch.manual_seed(it)  # the same on each worker
        model.eval()
        out = {}
        for split in splits:
            blocks = Blocks(split)
            batches = [[blocks[0] for _ in range(batch_size)] for _ in range(eval_iters)]
            batches = [torch.utils.data.default_collate(batch) for batch in batches]
            out[split] = sum(model(x, y).item() for x, y in batches) / eval_iters
        model.train()
        return out

    steps = run.steps(
        Blocks("train"),
        global_batch=accumulation * batch_size,
        micro_batch=batch_size,
        until=args.max_iters,
        seed=1337,
        reduction=args.reduction,
    )
    for step in steps:
        it = step.index
        if it % eval_interval == 0:
            with run.relaxed_watchdog():
                losses = estimate_loss(it)
                said = f"step {it}: train {losses['train']:.9f}, val {losses['val']:.9f}"
                if run.rank == 0:
                    print(f"[0] {said}", flush=True)
                if losses["val"] < best.val_loss and it > 0:
                    best.val_loss = losses["val"]
                    if run.rank == 0:
                        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                        state |= {"iter_num": it, "best_val_loss": best.val_loss}
                        torch.save(state, os.path.join(args.out_dir, "ckpt.pt"))
        lr = optimizer.param_groups[0]["lr"]
        with step:
            for x, y in step:
                loss = model(x, y)
                step.backward(loss * len(x), weight=len(x))
            step.apply(optimizer, max_grad_norm=1.0, also=lambda: set_lr(it + 1))  # noqa: B023
        if step.committed:
            print(f"[{run.rank}] iter {it}: loss {loss.item():.9f}, lr {lr:.9f}", flush=True)
    print(f"[{run.rank}] best {best.val_loss:.9f}", flush=True)
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    print(f"[{run.rank}] done, weights {hashlib.sha256(weights).hexdigest()}", flush=True)


holdfast.start(main)
