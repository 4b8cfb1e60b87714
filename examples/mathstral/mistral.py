"""The model: built without memory, dealt to the workers of a replica, then given memory."""

from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, MistralForCausalLM


def empty_model(folder: Path, attention: str, checkpoint_activations: bool) -> MistralForCausalLM:
    """The model that a folder's config.json describes, on the meta device: shapes without data.

    Raises:
        ValueError: it describes a model of another architecture.
    """
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    if config.model_type != "mistral":
        raise ValueError(f"{folder}/config.json is of a {config.model_type}, and this example trains mistral")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    if checkpoint_activations:
        model.activation_checkpointing_enable({"use_reentrant": False})
    return model.train()


def shard(model: MistralForCausalLM, mesh: DeviceMesh, precision: str) -> None:
    """Deals the parameters to the workers of a replica. A block is whole only while it computes."""
    policy = MixedPrecisionPolicy()
    if precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def give_memory(model: MistralForCausalLM, device: torch.device) -> None:
    """Memory for what is here of every parameter; its content comes from `weights.load`.

    Buffers are in no checkpoint: the frequencies of the rotary positions follow from the config.
    """
    model.to_empty(device=device)
    model.tie_weights()  # a tied weight is two parameters after to_empty
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(model.config).to(device)
    loose = [n for n, _ in model.named_buffers() if not n.startswith("model.rotary_emb.")]
    if loose:
        raise ValueError(
            f"nothing fills the buffers {', '.join(loose)}: this version of transformers has more"
        )
