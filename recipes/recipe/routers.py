"""What a mixture of experts changes beside its parameters: counts of tokens, and biases that follow from them.

Both belong to the step's commit. The counts are a buffer that `run.buffers("sum", ...)` adds up over all micro-batches of the
global batch, whoever computed them, and puts back where a step is dropped. The biases change in `step.apply(also=)`.
"""

from typing import Any

import torch

from recipe.model import BIAS


class Loads(torch.nn.Module):
    """How many tokens each expert got, by layer. Protected beside the model: what `transformers` loads has no such buffer.

    Attributes:
        routers: of each layer with experts, in order.
        tokens: [layers, experts], since the last update of the biases.
    """

    tokens: torch.Tensor

    def __init__(self, model: torch.nn.Module, experts: int, top: int, device: torch.device) -> None:
        super().__init__()
        self.routers = _Hidden([part for part in model.modules() if hasattr(part, BIAS)])
        self.top = top
        self.register_buffer(
            "tokens", torch.zeros(len(self.routers.found), experts, dtype=torch.int64, device=device)
        )
        for number, router in enumerate(self.routers.found):
            router.register_forward_hook(lambda module, given, out, at=number: self._count(at, out))

    def _count(self, layer: int, out: tuple[torch.Tensor, ...]) -> None:
        # Activation checkpointing runs a block again inside of the backward pass: those are the same tokens.
        if torch._C._current_graph_task_id() != -1:
            return
        chosen = out[2].reshape(-1)
        assert chosen.numel() % self.top == 0
        self.tokens[layer] += torch.bincount(chosen, minlength=self.tokens.shape[1])

    @torch.no_grad()
    def update(self, rate: float) -> None:
        """Section 2.1.2 of the report on DeepSeek V3 (2024): an expert with fewer tokens than the mean becomes easier to
        choose by `rate`, one with more harder. The counts begin anew."""
        loads = self.tokens.double()
        toward = torch.sign(loads.mean(1, keepdim=True) - loads)
        for router, signs in zip(self.routers.found, toward, strict=True):
            bias = getattr(router, BIAS)
            bias += rate * signs.to(bias.dtype)
        self.tokens.zero_()


class _Hidden:
    """Modules of the model: as attributes of another module they would be protected twice."""

    def __init__(self, found: list[Any]) -> None:
        self.found = found
