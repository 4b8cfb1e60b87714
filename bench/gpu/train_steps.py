"""The job of `bench.gpu --parts steps`: one worker with a GPU of its own trains a transformer under plain DDP and under Holdfast,
in alternating blocks of steps of one process.

Runs under `holdfast run`. A block ends when the GPU is done with it.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import holdfast as hf
from bench.gpu.copies import wait
from bench.overhead.analyse import PLAIN_AFTER, PLAIN_BEFORE, PROTECTED, Block

WARM_UP = 10
LEARNING_RATE = 1e-4
MAX_GRAD_NORM = 1.0
SAMPLES = 4096
HEAD = 64


class Layer(nn.Module):
    """One layer of a decoder."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.before(x)).view(batch, length, 3, width // HEAD, HEAD).permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.narrow(nn.functional.gelu(self.wide(self.between(x))))


class Decoder(nn.Module):
    """A causal transformer: tokens (batch, length) to logits (batch, length, vocabulary)."""

    def __init__(self, width: int, layers: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.last(x))


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--length", type=int, required=True, help="tokens of a sample")
    parser.add_argument("--vocabulary", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True, help="samples of a step")
    parser.add_argument("--reduction", choices=("fast", "exact"), required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True, help="of a block")
    parser.add_argument("--output", required=True, help="the blocks are appended to this file")
    return parser.parse_args()


class Plain:
    """The twin under DistributedDataParallel: the same model, optimizer and batches. It never waits for the GPU."""

    def __init__(self, chosen: argparse.Namespace, data: torch.Tensor, device: torch.device) -> None:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=60)
        )
        self._model = nn.parallel.DistributedDataParallel(build(chosen).to(device))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LEARNING_RATE)
        self._data, self._device, self._batch, self._step = data, device, chosen.batch, 0

    def run(self, steps: int) -> float:
        """Seconds of one step in a block of so many."""
        wait(self._device)
        began_s = time.perf_counter()
        for _ in range(steps):
            first = self._step * self._batch
            rows = [self._data[i % SAMPLES] for i in range(first, first + self._batch)]
            tokens = torch.stack(rows).to(self._device)
            self._optimizer.zero_grad()
            with precision(self._device):
                logits = self._model(tokens[:, :-1])
            cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
            nn.utils.clip_grad_norm_(self._model.parameters(), MAX_GRAD_NORM)
            self._optimizer.step()
            self._step += 1
        wait(self._device)
        return (time.perf_counter() - began_s) / steps


def build(chosen: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    return Decoder(chosen.width, chosen.layers, chosen.length, chosen.vocabulary)


def precision(device: torch.device) -> AbstractContextManager[object]:
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


def main(run: hf.Run) -> None:
    chosen = options()
    if chosen.reduction == "exact":
        torch.use_deterministic_algorithms(True)
    network = build(chosen).to(run.device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE)
    run.protect(model=network, optimizer=optimizer)
    drawn = torch.Generator().manual_seed(1)
    data = torch.randint(chosen.vocabulary, (SAMPLES, chosen.length + 1), generator=drawn)
    output = os.open(chosen.output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(kind: str, number: int, step_s: float) -> None:
        block = Block(kind=kind, round=number, rank=0, wall_s=[step_s], cpu_s=[0.0])
        os.write(output, (json.dumps(asdict(block)) + "\n").encode())

    plain: Plain | None = None
    number, began_s = 0, 0.0
    until = WARM_UP + chosen.rounds * chosen.steps
    steps = run.steps(
        data,
        global_batch=chosen.batch,
        micro_batch=chosen.batch,
        until=until,
        reduction=chosen.reduction,
    )
    for step in steps:
        with step:
            for tokens in step:
                with precision(run.device):
                    logits = network(tokens[:, :-1])
                loss = cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="sum")
                step.backward(loss, weight=tokens[:, 1:].numel())
            step.apply(optimizer, max_grad_norm=MAX_GRAD_NORM)
        done = step.index + 1 - WARM_UP
        if done < 0 or done % chosen.steps:
            continue
        wait(run.device)
        if plain is None:
            plain = Plain(chosen, data, run.device)
            plain.run(WARM_UP)
        else:
            write(PROTECTED, number, (time.perf_counter() - began_s) / chosen.steps)
            write(PLAIN_AFTER, number, plain.run(chosen.steps))
            number += 1
        if number < chosen.rounds:
            write(PLAIN_BEFORE, number, plain.run(chosen.steps))
            began_s = time.perf_counter()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    hf.start(main)
