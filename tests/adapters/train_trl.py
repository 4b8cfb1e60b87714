"""TRL's SFTTrainer or DPOTrainer: train_trl.py FOLDER DIE_AT|level-2 sft|dpo|dpo-reference ACCUMULATE

With a LoRA adapter of PEFT's; `dpo-reference` trains the whole model beside a reference model. With a step to die at, or 0, it
is a script of level 1.
"""

import copy
import json
import os
import sys
from pathlib import Path

FOLDER, LEVEL, KIND, ACCUMULATE = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
DIE_AT = None if LEVEL == "level-2" else int(LEVEL)
if DIE_AT is None:
    import holdfast.transformers  # before TRL

import torch  # noqa: E402
import transformers  # noqa: E402
import trl  # noqa: E402
import where  # noqa: E402
from datasets import Dataset  # noqa: E402
from peft import LoraConfig  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402

WORDS = 60


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    names = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(WORDS))]
    model = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def sequence(start: int, length: int) -> str:
    return " ".join(f"w{(start + i) % WORDS}" for i in range(length))


class Dies(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **more):
        if state.global_step == DIE_AT:
            from holdfast import checkpoint

            checkpoint.flush()
            os._exit(9)


def adapted(kind: type) -> type:
    """The class as a script of this level uses it."""
    return holdfast.transformers.wrap(kind, reduction="exact") if DIE_AT is None else kind


def train(trainer: transformers.Trainer) -> transformers.trainer_utils.TrainOutput:
    where.check(trainer.model)
    if DIE_AT is None:
        return trainer.train()
    from holdfast.adapters.huggingface.snapshots import Snapshots

    trainer.add_callback(Dies())
    return trainer.train(resume_from_checkpoint=Snapshots(trainer, every=2).newest())


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
    trainer = adapted(kind)(
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
            use_cpu=not where.GPU,
            bf16=False,
        ),
        train_dataset=Dataset.from_dict(data),
        processing_class=tokenizer(),
        **more,
    )
    out = train(trainer)
    assert torch.equal(before, fixed(trainer).detach().cpu())
    trained = sum(p.nbytes for p in trainer.model.parameters() if p.requires_grad)
    end = {
        "parameters": where.digest(trainer.model.parameters()),
        "steps": out.global_step,
        "loss": out.training_loss,
        "trained_bytes": trained,
        "num_tokens": [logs["num_tokens"] for logs in trainer.state.log_history if "num_tokens" in logs][-1],
    }
    (FOLDER / f"end-{os.getpid()}.json").write_text(json.dumps(end))


main()
