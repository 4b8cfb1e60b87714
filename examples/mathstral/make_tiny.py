"""Makes what the small demonstration needs, without a download: a random Mistral model, a tokenizer, and text.

python examples/mathstral/make_tiny.py out/mathstral

Writes OUT/model (config.json, safetensors in several files with an index, a tokenizer) and OUT/text (text files with
exercises in arithmetic and algebra, solved).
"""

import argparse
import math
import random
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast

BEGIN, END = "<s>", "</s>"


def make(out: Path, exercises: int = 20_000, seed: int = 0) -> None:
    """Model and text; the same for the same seed."""
    make_text(out / "text", exercises, seed)
    tokenizer = make_tokenizer(sorted((out / "text").iterdir()))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BEGIN, eos_token=END).save_pretrained(
        out / "model"
    )
    make_model(out / "model", tokenizer.get_vocab_size(), seed)


def make_model(folder: Path, vocabulary: int, seed: int = 0, tied: bool = False) -> None:
    """Random weights, in several files as those of large models are."""
    config = MistralConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        sliding_window=None,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(seed)
    MistralForCausalLM(config).save_pretrained(folder, max_shard_size="300KB")


def make_tokenizer(files: list[Path]) -> Tokenizer:
    """Byte pairs, learned from the text; any text can be encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<unk>", BEGIN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(file) for file in files], trainer)
    return tokenizer


def make_text(folder: Path, exercises: int, seed: int) -> None:
    """Text files of a thousand exercises each."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    for number, first in enumerate(range(0, exercises, 1000)):
        count = min(1000, exercises - first)
        text = "\n\n".join(rng.choice(EXERCISES)(rng) for _ in range(count))
        (folder / f"exercises-{number:03}.txt").write_text(text + "\n")


def addition(rng: random.Random) -> str:
    a, b = rng.randrange(1000), rng.randrange(1000)
    return (
        f"Exercise. Add ${a} + {b}$.\nSolution. ${a} + {b} = {a + b}$, and $ {a + b} - {b} = {a}$ checks it."
    )


def product(rng: random.Random) -> str:
    a, b = rng.randrange(11, 100), rng.randrange(2, 20)
    tens, ones = a // 10 * 10, a % 10
    return (
        f"Exercise. Compute ${a} \\cdot {b}$.\nSolution. ${a} \\cdot {b} = {tens} \\cdot {b} + {ones} \\cdot {b} = "
        f"{tens * b} + {ones * b} = {a * b}$."
    )


def divisor(rng: random.Random) -> str:
    common = rng.randrange(2, 12)
    a, b = common * rng.randrange(2, 40), common * rng.randrange(2, 40)
    lines, low, high = [], min(a, b), max(a, b)
    while low:
        lines.append(f"{high} = {high // low} \\cdot {low} + {high % low}")
        high, low = low, high % low
    return (
        f"Exercise. Find $\\gcd({a}, {b})$.\nSolution. ${'$, $'.join(lines)}$. So it is ${math.gcd(a, b)}$."
    )


def roots(rng: random.Random) -> str:
    p, q = rng.randrange(-9, 10), rng.randrange(-9, 10)
    return (
        f"Exercise. Solve $x^2 {-(p + q):+} x {p * q:+} = 0$.\nSolution. It is $(x {-p:+})(x {-q:+}) = 0$, so "
        f"$x = {p}$ or $x = {q}$."
    )


def derivative(rng: random.Random) -> str:
    a, n, b = rng.randrange(2, 10), rng.randrange(2, 7), rng.randrange(1, 10)
    return (
        f"Exercise. Let $f(x) = {a} x^{n} + {b} x$. Find $f'(x)$.\nSolution. By the power rule "
        f"$f'(x) = {a * n} x^{n - 1} + {b}$."
    )


EXERCISES: list[Callable[[random.Random], str]] = [addition, product, divisor, roots, derivative]

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make a tiny random Mistral model, a tokenizer and text.")
    parser.add_argument("out", type=Path, help="folder; what is in it is written over")
    parser.add_argument("--exercises", type=int, default=20_000, help="how many, of 100 bytes each")
    args = parser.parse_args()
    make(args.out, args.exercises)
