"""What torchtitan's mixtures of experts change beside their parameters: counts of tokens, and biases that follow from them.

torchtitan updates the biases in a hook before each update, by collectives over all ranks. A commit may have none, and comes exactly
once on every replica. So the counts are a buffer that the run sums over the global batch, and the biases follow from it
in the commit, by torchtitan's rule.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.tensors.dtensor_shards import local_of

HOOK = "register_moe_load_balancing_hook"
"""The function of torchtitan's that registers it."""


class Loads(torch.nn.Module):
    """How many tokens each expert got since the last update of the biases. Protected beside the model.

    Attributes:
        tokens: [layers with biases, experts].
    """

    tokens: torch.Tensor

    def __init__(self, layers: list[Any]) -> None:
        """layers: torchtitan's mixtures that have biases."""
        super().__init__()
        # In a tuple: as an attribute they would be modules of this one, and protected twice.
        self._layers = (layers,)
        shape = (len(layers), layers[0].expert_bias_E.numel()) if layers else (0, 0)
        device = layers[0].expert_bias_E.device if layers else None
        self.register_buffer("tokens", torch.zeros(shape, dtype=torch.int64, device=device))
        for number, layer in enumerate(layers):
            layer.routed_experts.register_forward_pre_hook(
                lambda module, given, at=number: self._count(at, given[3])
            )

    def __bool__(self) -> bool:
        return bool(self._layers[0])

    def _count(self, layer: int, by_expert: torch.Tensor) -> None:
        # Activation checkpointing runs a block again inside of the backward pass: those are the same tokens.
        if torch._C._current_graph_task_id() != -1:
            return
        # Workers of a tensor dimension may have routed a part of the tokens each. Completed here, all of them have
        # the same count, and one of them says it.
        whole = by_expert.full_tensor() if isinstance(by_expert, DTensor) else by_expert
        self.tokens[layer] += whole.detach().to(self.tokens.dtype)

    @torch.no_grad()
    def update(self) -> None:
        """Part of a commit: each bias goes toward an even load, as torchtitan's hook has it; the counts begin anew."""
        for layer, tokens in zip(self._layers[0], self.tokens.float(), strict=True):
            toward = layer.load_balance_coeff * torch.sign(tokens.mean() - tokens)
            local_of(layer.expert_bias_E).add_(toward - toward.mean())
            # torchtitan's own count has no reader here, and would grow without end.
            local_of(layer.tokens_per_expert_E).zero_()
        self.tokens.zero_()


def with_biases(model_parts: Iterable[torch.nn.Module]) -> list[Any]:
    """The layers whose biases torchtitan's hook updates."""
    return [
        module
        for part in model_parts
        for module in part.modules()
        if getattr(module, "load_balance_coeff", None) is not None and hasattr(module, "routed_experts")
    ]


def take_hook_off(optimizers: Any) -> None:
    """torchtitan's hook for the biases does not run: `Loads` has its place."""
    hooks = optimizers._optimizer_step_pre_hooks
    for key, hook in list(hooks.items()):
        if str(getattr(hook, "__qualname__", "")).startswith(HOOK):
            del hooks[key]
