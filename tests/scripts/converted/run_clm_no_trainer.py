"""run_clm_no_trainer.py with holdfast.accelerate: the loop is over steps, and checkpoints are the job's."""

import argparse
import hashlib
import os

import torch
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, default_data_collator, get_scheduler

from holdfast.accelerate import Accelerator

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", default="clm")
parser.add_argument("--rows", type=int, default=60)
parser.add_argument("--max_train_steps", type=int, default=6)
parser.add_argument("--reduction", default="fast")
args = parser.parse_args()

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
set_seed(4)
os.makedirs(args.output_dir, exist_ok=True)
tokens = torch.randint(0, 50, (args.rows + 10, 8), generator=torch.Generator().manual_seed(3))
rows = [{"input_ids": row, "labels": row} for row in tokens]
train = DataLoader(rows[:-10], shuffle=True, collate_fn=default_data_collator, batch_size=4)
held_out = DataLoader(rows[-10:], collate_fn=default_data_collator, batch_size=4)
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=50, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = get_scheduler("cosine", optimizer, 1, args.max_train_steps)
model, optimizer, train, held_out, schedule = accelerator.prepare(model, optimizer, train, held_out, schedule)


def evaluate():
    model.eval()
    losses = []
    for batch in held_out:
        with torch.no_grad():
            loss = model(**batch).loss
        losses.append(accelerator.gather_for_metrics(loss.repeat(len(batch["input_ids"]))))
    model.train()
    return torch.cat(losses)


run = accelerator.run
per_epoch = args.rows // (4 * accelerator.gradient_accumulation_steps * run.full_world_size)
model.train()
for step in accelerator.steps(train, until=args.max_train_steps, seed=4, reduction=args.reduction):
    said, rate = [], schedule.get_last_lr()[0]
    with step:
        for batch in step:
            loss = model(**batch).loss
            accelerator.backward(loss)
            said.append(loss.item())
        step.apply(optimizer, max_grad_norm=1.0, scheduler=schedule)
    if not step.committed:
        continue
    run = accelerator.run
    rank, completed = run.rank, step.index + 1
    rates = [rate] * (len(said) - 1) + [schedule.get_last_lr()[0]]
    for each, rate in zip(said, rates, strict=True):
        print(f"[{rank}] {step.index} loss {each:.9f} lr {rate:.9f}", flush=True)
    if completed % per_epoch == 0 or completed == args.max_train_steps:
        with run.relaxed_watchdog():
            found = evaluate()
        print(
            f"[{rank}] epoch {step.index // per_epoch} held out {found.mean().item():.9f} of {len(found)}",
            flush=True,
        )
unwrapped = accelerator.unwrap_model(model)
if accelerator.is_main_process:
    unwrapped.save_pretrained(args.output_dir)
state = b"".join(p.detach().numpy().tobytes() for p in unwrapped.parameters())
print(f"[{run.rank}] done {hashlib.sha256(state).hexdigest()}", flush=True)
accelerator.end_training()
