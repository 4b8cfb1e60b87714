"""What a run is told: a TOML file, typed. A name that nobody knows, or a value out of range, is refused."""

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from holdfast.data.build import describe

Positive = Annotated[int, Meta(ge=1)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Attributes:
    folder: config.json and safetensors, as `save_pretrained` of `transformers` writes them.
    attention: how `transformers` computes it; the flash ones need the package of that name.
    """

    folder: str
    attention: Literal["sdpa", "eager", "flash_attention_2", "flash_attention_3"] = "sdpa"


class Data(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Attributes:
    tokens: what `holdfast data build` wrote, one name or several.
    seq_len: tokens of a sample.
    """

    tokens: str | list[str]
    seq_len: Positive


class Parallel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Attributes:
    shard: workers of a replica. Each holds this part of parameters, gradients and moments.
    precision: "bf16": forward and backward pass compute in it. Sums of gradients, moments and the parameters
        themselves are fp32 in any case.
    checkpoint_activations: keep only the blocks' inputs, and compute the rest again in the backward pass.
    """

    shard: Positive = 1
    precision: Literal["bf16", "fp32"] = "bf16"
    checkpoint_activations: bool = False


class Train(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Attributes:
    global_batch, micro_batch: samples per step over all workers, and per forward pass.
    lr: the highest learning rate. It is reached after warmup_share of all samples, and falls on a half cosine to
        lr * final_share.
    max_grad_norm: None does not clip.
    """

    steps: Positive
    global_batch: Positive
    micro_batch: Positive
    lr: Annotated[float, Meta(gt=0)]
    warmup_share: Share = 0.02
    final_share: Share = 0.1
    weight_decay: Annotated[float, Meta(ge=0)] = 0.1
    betas: tuple[Share, Share] = (0.9, 0.95)
    max_grad_norm: Annotated[float, Meta(gt=0)] | None = 1.0
    reduction: Literal["fast", "exact"] = "fast"
    seed: int = 0


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of it: a table of the file for each."""

    model: Model
    data: Data
    train: Train
    parallel: Parallel = Parallel()


def read(path: Path, changes: Iterable[str] = ()) -> Config:
    """The file, with changes such as "train.steps=20".

    Raises:
        ValueError: a name or a value that does not fit, and where.
    """
    tables = tomllib.loads(path.read_text())
    for change in changes:
        name, equals, value = change.partition("=")
        table, _, key = name.partition(".")
        if not equals or not key:
            raise ValueError(f"{change!r} is no change of the config: write it as train.steps=20")
        tables.setdefault(table, {})[key] = _value(value)
    try:
        return msgspec.convert(tables, Config)
    except msgspec.ValidationError as error:
        raise ValueError(f"{path}: {error}") from None


def check_data(data: Data, vocabulary: int, positions: int) -> None:
    """Raises ValueError for samples that a model of so many tokens and positions cannot take."""
    if data.seq_len > positions:
        raise ValueError(
            f"data.seq_len is {data.seq_len}, and the model's config.json allows {positions} positions"
        )
    for tokens in [data.tokens] if isinstance(data.tokens, str) else data.tokens:
        built = describe(Path(tokens))
        if built is not None and built.vocabulary > vocabulary:
            raise ValueError(
                f"{tokens} has tokens up to {built.vocabulary - 1}, and the model {vocabulary} in all: build it with the "
                "model's own tokenizer.json"
            )


def _value(text: str) -> object:
    """As TOML has it; what is none is text without quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
