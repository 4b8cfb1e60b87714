"""A small transformer in the style of Llama: RMSNorm, rotary positions, SwiGLU, tied embeddings.

Shapes: B sequences, T tokens, D = dim, H heads of K = D / H channels, V = vocab.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class ModelConfig:
    """The model's sizes.

    Attributes:
        vocab: number of different tokens.
        dim: channels of the residual stream, a multiple of 2 * heads.
        layers: transformer blocks.
        heads: attention heads.
        seq_len: the longest sequence, in tokens.
        mlp_ratio: hidden channels of the SwiGLU block per channel of the stream.
        rope_base: rotary positions turn with wavelengths from 2 pi to 2 pi * rope_base tokens.
        norm_eps: added to the mean square in RMSNorm.

    Raises:
        ValueError: a size is below 1, or the heads do not divide the channels into even parts.
    """

    vocab: int = 256
    dim: int = 192
    layers: int = 4
    heads: int = 6
    seq_len: int = 128
    mlp_ratio: int = 4
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("vocab", "dim", "layers", "heads", "seq_len", "mlp_ratio"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.dim % (2 * self.heads):
            raise ValueError(
                f"dim {self.dim} is not a multiple of 2 * heads = {2 * self.heads}; rotary positions need an "
                "even number of channels per head"
            )


class Transformer(nn.Module):
    """Predicts the next token at every position.

    The weights are drawn from torch's global generator, always in the same order: seed it first and the
    model is the same to the bit.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        cos, sin = rotary_tables(config)
        # Not persistent: they follow from the config, so they are no part of the state.
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.initialize()

    @torch.no_grad()
    def initialize(self) -> None:
        """Normal weights of deviation 0.02; smaller for the 2 projections per layer that feed the stream."""
        into_stream = 0.02 / (2 * self.config.layers) ** 0.5
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=into_stream if name.endswith("out.weight") else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Token numbers [B, T], T at most `seq_len`, to logits [B, T, V]; position t sees tokens 0 to t."""
        length = tokens.shape[1]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos[:length], self.sin[:length])
        return F.linear(self.norm(x), self.embedding.weight)


class Block(nn.Module):
    """Attention, then SwiGLU, each reading a normalized stream and adding to it. [B, T, D] to [B, T, D]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Attention(nn.Module):
    """Causal multi-head attention with rotary positions. [B, T, D] to [B, T, D]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # [B, T, 3D] -> three of [B, H, T, K]
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """The gated MLP of N. Shazeer, "GLU variants improve transformer" (2020). [B, T, D] to [B, T, D]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden = config.mlp_ratio * config.dim
        self.gate = nn.Linear(config.dim, hidden, bias=False)
        self.up = nn.Linear(config.dim, hidden, bias=False)
        self.out = nn.Linear(hidden, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.silu(self.gate(x)) * self.up(x))


def rotary_tables(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angles, each [seq_len, K / 2]; J. Su et al., "RoFormer" (2021)."""
    pairs = config.dim // config.heads // 2
    frequencies = config.rope_base ** -(torch.arange(pairs, dtype=torch.float32) / pairs)
    angles = torch.outer(torch.arange(config.seq_len, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns channel pairs (i, i + K / 2) of [B, H, T, K] by their position's angles."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
