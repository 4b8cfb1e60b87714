"""A character model with a training loop of its own: DDP, accumulation, a cosine schedule, the best checkpoint, resume."""

import argparse
import hashlib
import math
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--out-dir", default="out")
parser.add_argument("--max-iters", type=int, default=16)
parser.add_argument("--init-from", choices=["scratch", "resume"], default="scratch")
args = parser.parse_args()

block_size, batch_size, accumulation = 16, 4, 4
eval_interval, eval_iters = 5, 3
learning_rate, min_lr, warmup = 3e-3, 3e-4, 4

dist.init_process_group("gloo")
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
master = rank == 0
assert accumulation % world == 0
accumulation //= world
if master:
    os.makedirs(args.out_dir, exist_ok=True)
torch.manual_seed(1337 + rank)  # other batches and other dropout on each rank

text = "the quick brown fox jumps over the lazy dog. " * 40
chars = sorted(set(text))
stoi = {c: i for i, c in enumerate(chars)}
data = torch.tensor([stoi[c] for c in text])
splits = {"train": data[: len(data) * 9 // 10], "val": data[len(data) * 9 // 10 :]}


def get_batch(split):
    source = splits[split]
    ix = torch.randint(len(source) - block_size - 1, (batch_size,))
    x = torch.stack([source[i : i + block_size] for i in ix])
    y = torch.stack([source[i + 1 : i + block_size + 1] for i in ix])
    return x, y


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


def get_lr(it):
    if it < warmup:
        return learning_rate * (it + 1) / warmup
    done = min(1.0, (it - warmup) / (args.max_iters - warmup))
    return min_lr + 0.5 * (1 + math.cos(math.pi * done)) * (learning_rate - min_lr)


raw_model = CharModel(len(chars))
optimizer = torch.optim.AdamW(raw_model.parameters(), lr=learning_rate, weight_decay=0.1)
iter_num, best_val_loss = 0, 1e9
if args.init_from == "resume":
    checkpoint = torch.load(os.path.join(args.out_dir, "ckpt.pt"))
    raw_model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    iter_num, best_val_loss = checkpoint["iter_num"], checkpoint["best_val_loss"]
model = DDP(raw_model)


@torch.no_grad()
def estimate_loss():
    raw_model.eval()
    out = {s: sum(raw_model(*get_batch(s)).item() for _ in range(eval_iters)) / eval_iters for s in splits}
    raw_model.train()
    return out


X, Y = get_batch("train")
while True:
    lr = get_lr(iter_num)
    for group in optimizer.param_groups:
        group["lr"] = lr
    if iter_num % eval_interval == 0 and master:
        losses = estimate_loss()
        print(f"[{rank}] step {iter_num}: train {losses['train']:.9f}, val {losses['val']:.9f}", flush=True)
        if losses["val"] < best_val_loss and iter_num > 0:
            best_val_loss = losses["val"]
            torch.save(
                {
                    "model": raw_model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "iter_num": iter_num,
                    "best_val_loss": best_val_loss,
                },
                os.path.join(args.out_dir, "ckpt.pt"),
            )
    if iter_num >= args.max_iters:
        break
    for micro_step in range(accumulation):
        model.require_backward_grad_sync = micro_step == accumulation - 1
        loss = model(X, Y) / accumulation
        X, Y = get_batch("train")
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print(f"[{rank}] iter {iter_num}: loss {loss.item() * accumulation:.9f}, lr {lr:.9f}", flush=True)
    iter_num += 1

digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in raw_model.parameters())).hexdigest()
print(f"[{rank}] done, weights {digest}", flush=True)
dist.destroy_process_group()
