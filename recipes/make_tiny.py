"""Makes what a recipe's tiny size needs, without a download: a random model, a tokenizer, text, questions and preferences.

python recipes/make_tiny.py llama out/llama3-8b

Writes OUT/model (config.json, safetensors in several files with an index, a tokenizer), OUT/text (text files with exercises in
arithmetic and algebra, solved), OUT/pairs.jsonl (their questions with their solutions) and OUT/preferences.jsonl (each with
a wrong one).
"""

import argparse
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

BEGIN, END = "<s>", "</s>"
ALL = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
"""What all are: a few hundred thousand parameters."""
EXPERTS = {
    "num_hidden_layers": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "head_dim": 16,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen3_moe": EXPERTS,
    "gpt_oss": {
        **EXPERTS,
        "num_local_experts": 4,
        "intermediate_size": 48,
        "sliding_window": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
    },
    "deepseek_v3": {
        **EXPERTS,
        "n_routed_experts": 4,
        "num_key_value_heads": 4,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_hidden_layers": 3,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "head_dim": 8,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
}
"""By the name that `transformers` has for an architecture."""


def make(family: str, out: Path, exercises: int = 20_000, seed: int = 0) -> None:
    """Model, text, questions and preferences; the same for the same seed."""
    make_text(out / "text", exercises, seed)
    make_pairs(out, exercises // 5, seed)
    tokenizer = make_tokenizer(sorted((out / "text").iterdir()))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BEGIN, eos_token=END, pad_token=END
    ).save_pretrained(out / "model")
    make_model(family, out / "model", tokenizer.get_vocab_size(), seed)


def make_model(family: str, folder: Path, vocabulary: int, seed: int = 0, tied: bool = False) -> None:
    """Random weights, in several files as those of large models are."""
    sizes = ALL | FAMILIES[family] | {"vocab_size": vocabulary, "tie_word_embeddings": tied}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
    model.save_pretrained(folder, max_shard_size="300KB")


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


def make_pairs(out: Path, count: int, seed: int) -> None:
    """Questions with their solutions, and with the solution of another question that is worse."""
    rng = random.Random(seed + 1)
    pairs, preferences = [], []
    for _ in range(count):
        kind = rng.choice(EXERCISES)
        (asked, good), (_, bad) = (kind(rng).split("Solution.") for _ in range(2))
        pairs.append({"prompt": asked + "Solution.", "completion": good})
        preferences.append({"prompt": asked + "Solution.", "chosen": good, "rejected": bad})
    for name, rows in (("pairs", pairs), ("preferences", preferences)):
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


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
    parser = argparse.ArgumentParser(description="Make a tiny random model, a tokenizer, text and questions.")
    parser.add_argument("family", choices=FAMILIES, help="the architecture, by its name in transformers")
    parser.add_argument("out", type=Path, help="folder; what is in it is written over")
    parser.add_argument("--exercises", type=int, default=20_000, help="how many, of 100 bytes each")
    args = parser.parse_args()
    make(args.family, args.out, args.exercises)
