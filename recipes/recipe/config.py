"""What a recipe is told: a TOML or YAML file, typed. A name that nobody knows, or a value out of range, is refused."""

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
from msgspec import Meta

from recipe.errors import Refused

Positive = Annotated[int, Meta(ge=1)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
NotNegative = Annotated[float, Meta(ge=0)]


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What all tables of a file are."""


class Model(Table, frozen=True, kw_only=True):
    """Attributes:
    folder: config.json and safetensors, as `save_pretrained` of `transformers` writes them.
    attention: how `transformers` computes it; the flash ones need the package of that name.
    """

    folder: str
    attention: Literal["sdpa", "eager", "flash_attention_2", "flash_attention_3"] = "sdpa"


class Data(Table, frozen=True, kw_only=True):
    """Exactly one of `tokens` and `pairs`.

    Attributes:
        tokens: what `holdfast data build` wrote, one name or several: every token is learned.
        pairs: a file with a JSON object on each line, `prompt` and `completion`: the completion alone is learned. For a
            recipe that learns preferences, `prompt`, `chosen` and `rejected`.
        seq_len: tokens of a sample.
    """

    seq_len: Positive
    tokens: str | list[str] | None = None
    pairs: str | None = None


class Parallel(Table, frozen=True, kw_only=True):
    """Attributes:
    shard: workers of a replica. Each holds this part of parameters, gradients and moments.
    experts: so many of them share the experts of a layer: each computes its own for the tokens of all.
    precision: "bf16": forward and backward pass compute in it. Sums of gradients, moments and the trained parameters
        themselves are fp32 in any case.
    checkpoint_activations: keep only the blocks' inputs, and compute the rest again in the backward pass.
    """

    shard: Positive = 1
    experts: Positive = 1
    precision: Literal["bf16", "fp32"] = "bf16"
    checkpoint_activations: bool = False


class Train(Table, frozen=True, kw_only=True):
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
    weight_decay: NotNegative = 0.1
    betas: tuple[Share, Share] = (0.9, 0.95)
    max_grad_norm: Annotated[float, Meta(gt=0)] | None = 1.0
    reduction: Literal["fast", "exact"] = "fast"
    seed: int = 0


class Lora(Table, frozen=True, kw_only=True):
    """Low-rank adapters of PEFT's; the rest of the model is frozen, and in no snapshot.

    Attributes:
        rank: of the adapters; 0: there are none, and everything is trained.
        alpha: their scale is alpha / rank.
        targets: the names of the linear layers that get one.
    """

    rank: Annotated[int, Meta(ge=0)] = 0
    alpha: NotNegative = 16.0
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")


class Experts(Table, frozen=True, kw_only=True):
    """How the tokens are spread over the experts.

    Attributes:
        loss: what the router's balancing loss counts, for each token, beside the loss of the text; 0: it is not computed.
        bias_rate: by so much the bias of an expert that had fewer tokens than the mean rises after each step, and that
            of others falls, as in DeepSeek V3; 0: it stays. For models with such a bias.
    """

    loss: NotNegative = 0.0
    bias_rate: NotNegative = 0.0


class Preference(Table, frozen=True, kw_only=True):
    """Direct preference optimisation.

    Attributes:
        beta: how strongly the reference model holds the trained one.
    """

    beta: Annotated[float, Meta(gt=0)] = 0.1


class Config(Table, frozen=True, kw_only=True):
    """All of it: a table of the file for each."""

    model: Model
    data: Data
    train: Train
    parallel: Parallel = Parallel()
    lora: Lora = Lora()
    experts: Experts = Experts()
    preference: Preference = Preference()


def read(path: Path, changes: Iterable[str] = ()) -> Config:
    """The file, with changes such as "train.steps=20".

    Raises:
        Refused: a name or a value that does not fit, and where.
    """
    tables = _tables(path)
    for change in changes:
        name, equals, value = change.partition("=")
        table, _, key = name.partition(".")
        if not equals or not key:
            raise Refused(f"{change!r} is no change of the config: write it as train.steps=20")
        if not isinstance(tables.setdefault(table, {}), dict):
            raise Refused(f"{path}: {table} is no table, so {change!r} changes nothing")
        tables[table][key] = _value(value)
    _refuse_unknown(path, tables)
    try:
        return msgspec.convert(tables, Config)
    except msgspec.ValidationError as error:
        raise Refused(f"{path}: {error}") from None


def resolved(config: Config) -> str:
    """All of it with what was left out, as YAML: what a run was told, to be kept with it."""
    return msgspec.yaml.encode(config).decode()


def _tables(path: Path) -> dict[str, Any]:
    try:
        if path.suffix in (".yaml", ".yml"):
            found = msgspec.yaml.decode(path.read_bytes())
        else:
            found = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refused(f"{path}: {error}") from None
    if not isinstance(found, dict):
        raise Refused(f"{path}: it has no tables such as model, data and train")
    return found


def _refuse_unknown(path: Path, tables: Mapping[str, Any]) -> None:
    """msgspec says which name it does not know, and not which one was meant."""
    kinds = get_type_hints(Config)
    for table, keys in tables.items():
        if table not in kinds:
            raise Refused(f"{path}: there is no table {table!r}{_nearest(table, kinds)}")
        known = {field.name for field in msgspec.structs.fields(kinds[table])}
        for key in keys if isinstance(keys, dict) else ():
            if key not in known:
                raise Refused(f"{path}: there is no {table}.{key}{_nearest(key, known, table + '.')}")


def _nearest(name: object, known: Iterable[str], prefix: str = "") -> str:
    among = sorted(known)
    close = difflib.get_close_matches(str(name), among, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {prefix}{close[0]}?"
    return f"; there are {', '.join(prefix + one for one in among)}"


def _value(text: str) -> object:
    """As TOML has it; what is none is text without quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
