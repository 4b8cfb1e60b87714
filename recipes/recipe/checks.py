"""What does not fit together is refused by name, before anything starts."""

from pathlib import Path
from typing import Any

from holdfast.tools.corpora.build import describe
from recipe.config import Config, Data
from recipe.errors import Refused


def check(config: Config, model: Any, tokenizer: int | None = None) -> None:
    """model: the configuration of `transformers` that the folder has. tokenizer: how many tokens that of the folder has; None: there
    is none.

    Raises:
        Refused: what of the file the model, the data or the replica cannot take.
    """
    check_precision(config, model)
    check_parallel(config, model)
    check_experts(config, model)
    check_batch(config)
    check_data(config.data, model.vocab_size, getattr(model, "max_position_embeddings", None), tokenizer)


def check_precision(config: Config, model: Any) -> None:
    """Raises Refused for weights that are quantized: the sums of gradients and moments have no such kind."""
    quantized = getattr(model, "quantization_config", None)
    if quantized:
        method = quantized.get("quant_method", "some method") if isinstance(quantized, dict) else quantized
        raise Refused(
            f"{config.model.folder} has weights that are quantized by {method}, which cannot be trained: write them in bfloat16 "
            "first (recipes/gpt-oss-20b-finetune/README.md shows how), and give that folder"
        )


def check_parallel(config: Config, model: Any) -> None:
    """Raises Refused for a mesh that leaves the replica, and for experts that it cannot hold."""
    shard, group = config.parallel.shard, config.parallel.experts
    if group == 1:
        return
    experts = experts_of(model)
    if experts is None:
        raise Refused(
            f"parallel.experts is {group}, and a {model.model_type} has no experts: leave it out, or take another model"
        )
    if shard % group:
        raise Refused(
            f"parallel.experts is {group}, and a replica has {shard} workers (parallel.shard): a mesh of experts lies within "
            f"one replica, so give a divisor of {shard}, or a parallel.shard that is a multiple of {group}"
        )
    if experts % group:
        raise Refused(
            f"parallel.experts is {group}, and the model has {experts} experts in a layer: every worker holds as many as "
            f"the others, so give a divisor of {experts}"
        )
    if config.lora.rank:
        raise Refused("parallel.experts and lora.rank together are not supported: leave one of them out")


def check_experts(config: Config, model: Any) -> None:
    """Raises Refused for what is asked of experts that a model does not have."""
    wanted = [name for name in ("loss", "bias_rate") if getattr(config.experts, name)]
    if wanted and experts_of(model) is None:
        raise Refused(f"experts.{wanted[0]} is given, and a {model.model_type} has no experts: leave it out")


def check_batch(config: Config) -> None:
    """Raises Refused for a batch that the workers of a replica cannot share evenly."""
    train, shard = config.train, config.parallel.shard
    if train.global_batch % (train.micro_batch * shard):
        raise Refused(
            f"train.global_batch is {train.global_batch}, and a replica of {shard} workers (parallel.shard) with "
            f"train.micro_batch {train.micro_batch} takes a multiple of {train.micro_batch * shard}"
        )


def check_data(data: Data, vocabulary: int, positions: int | None, tokenizer: int | None = None) -> None:
    """Raises Refused for samples that a model of so many tokens and positions cannot take, or that another tokenizer made."""
    if (data.tokens is None) == (data.pairs is None):
        raise Refused(
            "give one of data.tokens (what `holdfast data build` wrote) and data.pairs (a JSONL file)"
        )
    if positions is not None and data.seq_len > positions:
        raise Refused(
            f"data.seq_len is {data.seq_len}, and the model's config.json allows {positions} positions"
        )
    for tokens in [data.tokens] if isinstance(data.tokens, str) else data.tokens or ():
        built = describe(Path(tokens))
        if built is not None and built.vocabulary > vocabulary:
            raise Refused(
                f"{tokens} has tokens up to {built.vocabulary - 1}, and the model {vocabulary} in all: build it with the "
                "model's own tokenizer.json"
            )
        # Fewer tokens fit the model, and mean other words to it: its loss would be that of noise, and nothing would fail.
        if built is not None and tokenizer is not None and built.vocabulary != tokenizer:
            raise Refused(
                f"{tokens} was built by a tokenizer of {built.vocabulary} tokens, and that of the model has {tokenizer}: build it "
                "with the model's own tokenizer.json"
            )


def refuse_for_preferences(config: Config) -> None:
    """Raises Refused for what TRL's trainer does not do here."""
    if config.data.pairs is None:
        raise Refused("data.pairs is missing: a JSONL file with prompt, chosen and rejected on each line")
    if config.parallel.shard > 1 or config.parallel.experts > 1:
        raise Refused(
            f"parallel.shard is {config.parallel.shard}: here every worker has a complete model. Leave it out, and give "
            "lora.rank where a model with its moments is too large for one device"
        )
    for name in ("loss", "bias_rate"):
        if getattr(config.experts, name):
            raise Refused(f"experts.{name} is not used when preferences are learned: leave it out")


def check_tokenizer(folder: Path, size: int, vocabulary: int) -> None:
    """Raises Refused for a tokenizer of a folder that makes tokens which its model does not know."""
    if size > vocabulary:
        raise Refused(
            f"{folder}/tokenizer.json has {size} tokens, and the model's config.json {vocabulary}: it is the tokenizer of "
            "another model"
        )


def experts_of(model: Any) -> int | None:
    """In a layer; None: the model has none."""
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        found = getattr(model, name, None)
        if found:
            return int(found)
    return None
