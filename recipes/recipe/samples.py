"""Prompts with completions, of which the completions are learned; and preferences."""

import json
from pathlib import Path
from typing import Any

import torch

from recipe.errors import Refused

IGNORED = -100
"""As `cross_entropy` and `transformers` have it: a label that is not learned."""


def rows(path: Path, *keys: str) -> list[dict[str, str]]:
    """The objects of a JSONL file.

    Raises:
        Refused: no such file; a line that is none, or lacks one of the keys; an empty file.
    """
    if not path.is_file():
        raise Refused(f"data.pairs is {path}, and there is no such file")
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise Refused(f"{path}:{number}: no JSON object: {error}") from None
        if not isinstance(row, dict) or any(not isinstance(row.get(key), str) for key in keys):
            raise Refused(f"{path}:{number}: every line needs the texts {', '.join(keys)}")
        found.append(row)
    if not found:
        raise Refused(f"{path} is empty")
    return found


class Pairs:
    """Samples (tokens, labels) of one length: what is left of it is filled, and labels of prompts and fillings are ignored."""

    def __init__(self, path: Path, tokenizer: Any, seq_len: int) -> None:
        """tokenizer: of `transformers`, with an end of sequence. Raises Refused for a file that is none."""
        self.rows = rows(path, "prompt", "completion")
        self.tokenizer, self.seq_len = tokenizer, seq_len

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        row, end = self.rows[index], self.tokenizer.eos_token_id
        asked = self.tokenizer(row["prompt"])["input_ids"]
        answer = [*self.tokenizer(row["completion"], add_special_tokens=False)["input_ids"], end]
        tokens = [*asked, *answer][: self.seq_len + 1]
        labels = [*[IGNORED] * len(asked), *answer][: self.seq_len + 1]
        room = self.seq_len + 1 - len(tokens)
        return (
            torch.tensor([*tokens, *[end] * room])[:-1],
            torch.tensor([*labels, *[IGNORED] * room])[1:],
        )
