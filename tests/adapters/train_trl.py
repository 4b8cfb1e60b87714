"""TRL's SFTTrainer or DPOTrainer: train_trl.py sft|dpo|dpo-reference FOLDER ACCUMULATE

With a LoRA adapter of PEFT's; `dpo-reference` trains the whole model beside a reference model.
"""

import copy
import json
import os
import sys
from pathlib import Path

import holdfast.transformers

import torch  # isort: skip
import transformers  # isort: skip
import trl  # isort: skip
import xxhash  # isort: skip
from datasets import Dataset  # isort: skip
from peft import LoraConfig  # isort: skip
from tokenizers import Tokenizer, models, pre_tokenizers  # isort: skip

WORDS = 60
KIND, FOLDER, ACCUMULATE = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    names = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(WORDS))]
    model = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def sequence(start: int, length: int) -> str:
    return " ".join(f"w{(start + i) % WORDS}" for i in range(length))


def main() -> None:
    if KIND == "sft":
        kind, config = trl.SFTTrainer, trl.SFTConfig
        data = {"text": [sequence(i, 5 + i % 7) for i in range(64)]}
    else:
        kind, config = trl.DPOTrainer, trl.DPOConfig
        data = {
            "prompt": [sequence(i, 3) for i in range(64)],
            "chosen": [sequence(i + 3, 2 + i % 3) for i in range(64)],
            "rejected": [sequence(i + 30, 2 + i % 4) for i in range(64)],
        }
    transformers.set_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=WORDS + 3,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
    )
    if KIND == "dpo-reference":
        more, fixed = {"ref_model": copy.deepcopy(model)}, lambda trainer: trainer.ref_model.lm_head.weight
    else:
        more = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")}
        fixed = lambda trainer: model.lm_head.weight  # noqa: E731
    before = model.lm_head.weight.detach().clone()
    trainer = holdfast.transformers.wrap(kind, reduction="exact")(
        model=model,
        args=config(
            output_dir=str(FOLDER),
            per_device_train_batch_size=4,
            gradient_accumulation_steps=ACCUMULATE,
            num_train_epochs=2,
            max_length=32,
            learning_rate=1e-2,
            logging_steps=2,
            report_to="none",
            use_cpu=True,
            bf16=False,
        ),
        train_dataset=Dataset.from_dict(data),
        processing_class=tokenizer(),
        **more,
    )
    out = trainer.train()
    assert torch.equal(before, fixed(trainer))
    digest = xxhash.xxh3_64()
    for parameter in trainer.model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    trained = sum(p.nbytes for p in trainer.model.parameters() if p.requires_grad)
    end = {
        "parameters": digest.hexdigest(),
        "steps": out.global_step,
        "loss": out.training_loss,
        "trained_bytes": trained,
    }
    (FOLDER / f"end-{os.getpid()}.json").write_text(json.dumps(end))


main()
