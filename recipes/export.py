"""Writes what a job trained as a folder of `transformers`, or of PEFT where adapters were trained.

python recipes/export.py recipes/llama3-8b-pretrain/tiny.toml out/llama3-8b/trained --job llama
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file

from recipe import lora
from recipe.config import Config, read

BESIDE = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def export(config: Config, out: Path, job: str, step: int | None) -> None:
    """out: a folder that does not exist yet: an export replaces nothing. Raises CalledProcessError where the command does not."""
    chosen = [] if step is None else ["--step", str(step)]
    # The command, and not what it calls: it knows where a job's checkpoints are.
    command = ["checkpoint", "export", out, "--job", job, "--only", "model.", "--strip", *chosen]
    subprocess.run([sys.executable, "-m", "holdfast.cli", *map(str, command)], check=True)
    if config.lora.rank:
        as_adapters(config, out)
        return
    for name in BESIDE:
        if (Path(config.model.folder) / name).is_file():
            shutil.copy(Path(config.model.folder) / name, out)


def as_adapters(config: Config, out: Path) -> None:
    """The base is in no checkpoint, so what was written are the adapters, by the names that they had in the model."""
    from peft import LoraConfig

    found = {}
    for file in sorted(out.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            # PEFT calls adapters "default" until they are saved, and puts the model into another one.
            found[f"base_model.model.{name.replace('.default.', '.')}"] = tensor
        file.unlink()
    (out / "model.safetensors.index.json").unlink(missing_ok=True)
    save_file(found, out / "adapter_model.safetensors")
    told = lora.peft_config(config.lora, LoraConfig)
    told.base_model_name_or_path = config.model.folder
    told.save_pretrained(str(out))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write what a job trained.")
    parser.add_argument("config", type=Path, help="the file that the job was told")
    parser.add_argument("out", type=Path, help="folder that does not exist yet")
    parser.add_argument("changes", nargs="*", metavar="TABLE.NAME=VALUE", help="those that the job was told")
    parser.add_argument("--job", required=True, help="the job's name")
    parser.add_argument("--step", type=int, help="of a checkpoint; without it the newest")
    args = parser.parse_intermixed_args()  # changes may stand behind the options
    try:
        config = read(args.config, args.changes)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    try:
        export(config, args.out, args.job, args.step)
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)  # the command has said why
