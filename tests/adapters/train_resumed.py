"""Hugging Face's usual lines around `train()`: the newest checkpoint of the output folder, if there is one."""

import os

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from holdfast.transformers import Trainer

set_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
)
tokens = [(torch.arange(16) * (i % 5 + 1) + i) % 64 for i in range(64)]
out = os.environ["OUT"]
arguments = TrainingArguments(
    output_dir=out,
    per_device_train_batch_size=4,
    max_steps=24,
    save_steps=6,
    report_to="none",
    use_cpu=True,
    disable_tqdm=True,
)
last = get_last_checkpoint(out) if os.path.isdir(out) else None
trainer = Trainer(model=model, args=arguments, train_dataset=[{"input_ids": t, "labels": t} for t in tokens])
trainer.train(resume_from_checkpoint=last)
print("trained", trainer.state.global_step, flush=True)
