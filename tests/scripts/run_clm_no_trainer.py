"""Hugging Face's model in a loop with Accelerate: accumulate, gather_for_metrics, checkpoints every n steps, resume."""

import argparse
import hashlib
import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, default_data_collator, get_scheduler

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", default="clm")
parser.add_argument("--rows", type=int, default=60)
parser.add_argument("--checkpointing_steps", type=int, default=3)
parser.add_argument("--resume_from_checkpoint")
parser.add_argument("--max_train_steps", type=int, default=6)
args = parser.parse_args()

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
rank = accelerator.process_index
set_seed(4)
if accelerator.is_main_process:
    os.makedirs(args.output_dir, exist_ok=True)
accelerator.wait_for_everyone()
tokens = torch.randint(0, 50, (args.rows + 10, 8), generator=torch.Generator().manual_seed(3))
rows = [{"input_ids": row, "labels": row} for row in tokens]
train = DataLoader(rows[:-10], shuffle=True, collate_fn=default_data_collator, batch_size=4)
held_out = DataLoader(rows[-10:], collate_fn=default_data_collator, batch_size=4)
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=50, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
processes = accelerator.num_processes
schedule = get_scheduler("cosine", optimizer, processes, args.max_train_steps * processes)
model, optimizer, train, held_out, schedule = accelerator.prepare(model, optimizer, train, held_out, schedule)

completed, first = 0, 0
batches = train
if args.resume_from_checkpoint:
    accelerator.load_state(args.resume_from_checkpoint)
    completed = int(args.resume_from_checkpoint.rsplit("_", 1)[1])
    batches = accelerator.skip_first_batches(train, completed * 2 % len(train))
    first = completed * 2 // len(train)
for epoch in range(first, 100):
    model.train()
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        print(f"[{rank}] {completed} loss {loss.item():.9f} lr {schedule.get_last_lr()[0]:.9f}", flush=True)
        if accelerator.sync_gradients:
            completed += 1
            if completed % args.checkpointing_steps == 0:
                accelerator.save_state(os.path.join(args.output_dir, f"step_{completed}"))
        if completed >= args.max_train_steps:
            break
    batches = train
    model.eval()
    losses = []
    for batch in held_out:
        with torch.no_grad():
            loss = model(**batch).loss
        losses.append(accelerator.gather_for_metrics(loss.repeat(len(batch["input_ids"]))))
    mean = torch.cat(losses).mean().item()
    print(f"[{rank}] epoch {epoch} held out {mean:.9f} of {len(torch.cat(losses))}", flush=True)
    if completed >= args.max_train_steps:
        break
unwrapped = accelerator.unwrap_model(model)
unwrapped.save_pretrained(args.output_dir, is_main_process=accelerator.is_main_process)
state = b"".join(p.detach().numpy().tobytes() for p in unwrapped.parameters())
print(f"[{rank}] done {hashlib.sha256(state).hexdigest()}", flush=True)
accelerator.end_training()
