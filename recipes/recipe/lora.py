"""Low-rank adapters by PEFT: what is trained is small, and what is frozen never travels."""

import math

import torch

from holdfast.tensors.dtensor_shards import piece_of
from recipe.config import Lora
from recipe.errors import Refused


def add(model: torch.nn.Module, options: Lora) -> None:
    """Puts an adapter beside every linear layer that is named, and freezes everything else.

    Raises:
        Refused: PEFT is not there, or the model has no layer of these names.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise Refused("lora.rank needs PEFT: pip install 'holdfast-train[recipes]'") from None
    model.requires_grad_(False)
    inject_adapter_in_model(peft_config(options, LoraConfig), model)


def peft_config(options: Lora, kind: type) -> object:
    """As PEFT has it; `export.py` writes the same beside the adapters."""
    return kind(
        r=options.rank,
        lora_alpha=options.alpha,
        target_modules=list(options.targets),
        task_type="CAUSAL_LM",
    )


def freeze_in(model: torch.nn.Module, precision: str) -> None:
    """What is frozen is kept in the precision in which it computes: half of the memory for the same results."""
    if precision != "bf16":
        return
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16)


@torch.no_grad()
def fill(model: torch.nn.Module, seed: int) -> None:
    """Begins every adapter as PEFT does: A at random, B zero. The same on every worker, and at any number of them."""
    for number, (name, parameter) in enumerate(model.named_parameters()):
        if not parameter.requires_grad:
            continue
        drawn = torch.zeros(parameter.shape)
        if ".lora_A." in name:
            torch.nn.init.kaiming_uniform_(
                drawn, a=math.sqrt(5), generator=torch.Generator().manual_seed(seed * 100_003 + number)
            )
        piece = piece_of(name, parameter)
        box = tuple(
            slice(low, low + length) for low, length in zip(piece.start, piece.local.shape, strict=False)
        )
        piece.local.copy_(drawn[box])
