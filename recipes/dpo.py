"""Direct preference optimisation with TRL's trainer, as a member of a job.

holdfast run --nnodes 2 --spares 1 recipes/dpo.py recipes/llama3-8b-dpo/tiny.toml train.steps=20
"""

import argparse
import os
from pathlib import Path
from typing import Any

import holdfast.transformers  # before TRL, whose classes it wraps

import torch  # isort: skip
from recipe import lora  # isort: skip
from recipe.checks import refuse_for_preferences  # isort: skip
from recipe.config import Config, read, resolved  # isort: skip
from recipe.errors import Refused  # isort: skip
from recipe.model import read_folder  # isort: skip
from recipe.samples import rows  # isort: skip
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed  # isort: skip


def main(config: Config) -> None:
    from datasets import Dataset
    from peft import LoraConfig
    from trl import DPOTrainer

    set_seed(config.train.seed)  # every worker builds the same model, with the same adapters
    dtype = torch.bfloat16 if config.parallel.precision == "bf16" else torch.float32
    # The files are mapped, and read tensor by tensor.
    model = AutoModelForCausalLM.from_pretrained(
        config.model.folder, dtype=dtype, attn_implementation=config.model.attention, local_files_only=True
    )
    adapters = {"peft_config": lora.peft_config(config.lora, LoraConfig)} if config.lora.rank else {}
    found = rows(Path(str(config.data.pairs)), "prompt", "chosen", "rejected")
    trainer = holdfast.transformers.wrap(DPOTrainer, reduction=config.train.reduction)(
        model=model,
        args=arguments(config),
        train_dataset=Dataset.from_list(found),
        processing_class=AutoTokenizer.from_pretrained(config.model.folder, local_files_only=True),
        **adapters,
    )
    trainer.train()
    if args.out is not None and trainer.is_world_process_zero():
        trainer.save_model(str(args.out))


def arguments(config: Config) -> Any:
    """TRL's, of what the file says."""
    from trl import DPOConfig

    train = config.train
    workers = int(os.environ.get("HOLDFAST_TARGET", "1"))  # of the job at full strength
    if train.global_batch % (train.micro_batch * workers):
        parser.error(
            f"train.global_batch is {train.global_batch}, and {workers} workers of train.micro_batch {train.micro_batch} take "
            f"a multiple of {train.micro_batch * workers}"
        )
    return DPOConfig(
        output_dir=str(args.trainer_folder),
        per_device_train_batch_size=train.micro_batch,
        gradient_accumulation_steps=train.global_batch // (train.micro_batch * workers),
        max_steps=train.steps,
        max_length=config.data.seq_len,
        learning_rate=train.lr,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": train.final_share},
        warmup_steps=int(train.warmup_share * train.steps),
        weight_decay=train.weight_decay,
        adam_beta1=train.betas[0],
        adam_beta2=train.betas[1],
        max_grad_norm=train.max_grad_norm or 0.0,
        beta=config.preference.beta,
        bf16=config.parallel.precision == "bf16",
        gradient_checkpointing=config.parallel.checkpoint_activations,
        seed=train.seed,
        logging_steps=1,
        save_strategy="no",  # the job saves: `holdfast run --snapshot-every, --checkpoint`
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Optimise preferences with a recipe.")
    parser.add_argument("config", type=Path, help="a TOML or YAML file, such as a recipe's tiny.toml")
    parser.add_argument(
        "changes", nargs="*", metavar="TABLE.NAME=VALUE", help="instead of what is in the file"
    )
    parser.add_argument("--check", action="store_true", help="say what the run would be told, and end")
    parser.add_argument("--out", type=Path, help="where the trained model, or its adapters, are saved")
    parser.add_argument(
        "--trainer-folder", type=Path, default=Path("out/trainer"), help="where the trainer writes"
    )
    args = parser.parse_args()
    try:
        config = read(args.config, args.changes)
        refuse_for_preferences(config)
        read_folder(config)
        rows(Path(str(config.data.pairs)), "prompt", "chosen", "rejected")
    except (ImportError, OSError, ValueError) as error:
        if args.check:
            parser.error(str(error))
        raise Refused(str(error)) from None  # Holdfast ends the job with it at the first attempt
    if args.check:
        print(resolved(config), end="")
    else:
        main(config)
