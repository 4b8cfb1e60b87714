"""The model: built without memory, dealt to the workers of a replica, then given memory.

Hugging Face's modelling code as it is, of any architecture whose blocks are in `model.layers`.
"""

from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import holdfast
from recipe import experts, lora
from recipe.checks import check, check_tokenizer
from recipe.config import Config, Parallel
from recipe.errors import Refused
from recipe.weights import Weights

BIAS = "e_score_correction_bias"
"""The bias of DeepSeek's routers: the only buffer that a checkpoint has."""


def read_folder(config: Config) -> Any:
    """The configuration of `transformers` in the model's folder, which fits what is asked.

    Raises:
        Refused: something of the model, the file or the weights does not fit the others.
    """
    folder = Path(config.model.folder)
    if not (folder / "config.json").is_file():
        raise Refused(f"model.folder is {folder}, and there is no config.json in it")
    found = AutoConfig.from_pretrained(folder, local_files_only=True)
    tokens = tokens_of(folder)
    check(config, found, tokens)
    if tokens is not None:
        check_tokenizer(folder, tokens, found.vocab_size)
    model = empty_model(folder, config.model.attention, checkpoint_activations=False)
    if config.experts.bias_rate and not any(name.endswith(BIAS) for name, _ in model.named_buffers()):
        raise Refused(
            f"experts.bias_rate is given, and a {found.model_type} has no {BIAS}: what `transformers` loads of it would "
            "choose other experts than were trained. Leave it out, and give experts.loss"
        )
    with Weights(folder) as weights:
        weights.check(model)
    if config.lora.rank:
        lora.add(model, config.lora)  # which refuses names of layers that the model has not
    return found


def tokens_of(folder: Path) -> int | None:
    """One more than the largest number that the tokenizer of a folder makes; None: there is none."""
    if not (folder / "tokenizer.json").is_file():
        return None
    from tokenizers import Tokenizer

    words = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab(with_added_tokens=True)
    return max(words.values(), default=-1) + 1


def empty_model(folder: Path, attention: str, checkpoint_activations: bool) -> PreTrainedModel:
    """The model that a folder's config.json describes, on the meta device: shapes without data."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    if checkpoint_activations:
        model.activation_checkpointing_enable({"use_reentrant": False})
    return model.train()


def build(run: holdfast.Run, config: Config) -> PreTrainedModel:
    """The model of the folder, of which this worker holds one shard."""
    folder, parallel = Path(config.model.folder), config.parallel
    model = empty_model(folder, config.model.attention, parallel.checkpoint_activations)
    if config.lora.rank:
        lora.add(model, config.lora)
        lora.freeze_in(model, parallel.precision)
    with Weights(folder) as weights:
        shard(model, run.mesh(shard=parallel.shard)["shard"], parallel)
        run.replicate(model)
        give_memory(model, run.device)
        weights.load(model)
    if config.lora.rank:
        lora.fill(model, config.train.seed)
    return model


def shard(model: PreTrainedModel, mesh: DeviceMesh, parallel: Parallel) -> None:
    """Deals the parameters to the workers of a replica. A block is complete only while it computes, and its experts are
    never: those lie on a mesh of their own."""
    policy = MixedPrecisionPolicy()
    if parallel.precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    own = None
    if parallel.experts > 1:
        shape = (parallel.shard // parallel.experts, parallel.experts)
        own = init_device_mesh(mesh.device_type, shape, mesh_dim_names=("efsdp", "ep"))
        experts.spread(model, own["ep"])
    for block in model.model.layers:
        if own is not None:
            for layer in experts.layers_in(block):
                fully_shard(layer, mesh=own["efsdp"], mp_policy=policy)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def give_memory(model: PreTrainedModel, device: torch.device) -> None:
    """Memory for what is here of every parameter; its content comes from `Weights.load`.

    Buffers are in no checkpoint, but for the biases of routers: the frequencies of the rotary positions follow from the
    config.
    """
    model.to_empty(device=device)
    model.tie_weights()  # a tied weight is two parameters after to_empty
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(model.config).to(device)
    loose = [
        n for n, _ in model.named_buffers() if not n.startswith("model.rotary_emb.") and not n.endswith(BIAS)
    ]
    if loose:
        raise Refused(f"nothing fills the buffers {', '.join(loose)}: this version of transformers has more")
