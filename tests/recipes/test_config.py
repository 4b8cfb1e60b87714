"""What a recipe is told, and what is refused before anything starts."""

import json
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from holdfast.errors import UsageError
from holdfast.tools.corpora.build import build
from holdfast.tools.corpora.options import BuildOptions

RECIPES = Path(__file__).parents[2] / "recipes"
TINY = RECIPES / "qwen3-30b-a3b-sft" / "tiny.toml"
FILES = sorted(RECIPES.glob("*/*.toml"))
REAL = [file for file in FILES if not file.stem.startswith("tiny")]


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_every_file_is_read_and_says_whether_it_was_run(recipes, file):
    config = recipes.config.read(file)
    assert config.train.global_batch % (config.train.micro_batch * config.parallel.shard) == 0
    assert ("Not run here" in file.read_text()) == (file in REAL)
    assert file in REAL or config.train.reduction == "exact"


def test_a_change_is_that_of_the_key_alone(recipes):
    changes = ["train.steps=7", "model.folder=a/b", "train.lr=1e-4", "parallel.experts=1"]
    config, plain = recipes.config.read(TINY, changes), recipes.config.read(TINY)
    assert (config.train.steps, config.model.folder, config.train.lr) == (7, "a/b", 1e-4)
    assert config.train.global_batch == plain.train.global_batch


def test_yaml_has_the_same_keys_and_what_is_printed_can_be_read(recipes, tmp_path):
    config = recipes.config.read(TINY)
    written = tmp_path / "recipe.yaml"
    written.write_text(recipes.config.resolved(config))
    assert recipes.config.read(written) == config
    assert recipes.config.read(written, ["train.steps=9"]).train.steps == 9


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("train.stpes=7", r"no train\.stpes; did you mean train\.steps\?"),
        ("train.learning=7", r"no train\.learning; there are train\.betas, .*train\.lr"),
        ("trian.steps=7", r"no table 'trian'; did you mean train\?"),
        ("train.steps=0", r">= 1.*\$\.train\.steps"),
        ("train.lr=fast", r"Expected `float`.*\$\.train\.lr"),
        ("parallel.precision=fp8", "Invalid enum value 'fp8'"),
        ("steps=7", "write it as train.steps=20"),
    ],
)
def test_what_nobody_knows_is_refused_with_the_nearest_right_one(recipes, change, why):
    with pytest.raises(ValueError, match=why):
        recipes.config.read(TINY, [change])


@pytest.mark.parametrize("text", ["[model", "model: [", "- 1", "7"])
def test_a_file_that_is_none_is_refused_by_its_name(recipes, tmp_path, text):
    for name in ("a.toml", "a.yaml"):
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=name):
            recipes.config.read(tmp_path / name)


MODEL = SimpleNamespace(model_type="qwen3_moe", num_experts=4, vocab_size=300, max_position_embeddings=1024)
QUANTIZED = SimpleNamespace(**vars(MODEL), quantization_config={"quant_method": "mxfp4"})
DENSE = SimpleNamespace(model_type="llama", vocab_size=300, max_position_embeddings=1024)


@pytest.mark.parametrize(
    ("changes", "model", "why"),
    [
        (["parallel.experts=4"], MODEL, r"lies within one replica, so give a divisor of 2"),
        (["parallel.shard=3", "parallel.experts=3"], MODEL, "the model has 4 experts in a layer"),
        ([], DENSE, r"parallel\.experts is 2, and a llama has no experts"),
        (["parallel.experts=1"], DENSE, r"experts\.loss is given, and a llama has no experts"),
        (["lora.rank=4"], MODEL, r"parallel\.experts and lora\.rank together"),
        (["data.seq_len=2048"], MODEL, "allows 1024 positions"),
        (["data.tokens=a"], MODEL, r"one of data\.tokens .* and data\.pairs"),
        (["train.global_batch=18"], MODEL, r"train\.global_batch is 18, .* takes a multiple of 4"),
        ([], QUANTIZED, r"quantized by mxfp4, which cannot be trained: write them in bfloat16 first"),
    ],
)
def test_what_a_model_or_a_replica_cannot_take_is_refused(recipes, changes, model, why):
    with pytest.raises(ValueError, match=why):
        recipes.checks.check(recipes.config.read(TINY, changes), model)


def test_data_and_a_tokenizer_of_another_vocabulary_are_refused(recipes, tmp_path):
    recipes.make_tiny.make_text(tmp_path / "text", 10, seed=0)
    build(BuildOptions(inputs=(str(tmp_path / "text"),), prefix=tmp_path / "tokens"))
    data = recipes.config.Data(tokens=str(tmp_path / "tokens"), seq_len=64)
    recipes.checks.check_data(data, vocabulary=256, positions=64)
    with pytest.raises(ValueError, match="has tokens up to 255, and the model 200 in all"):
        recipes.checks.check_data(data, vocabulary=200, positions=64)
    recipes.checks.check_data(data, vocabulary=300, positions=64, tokenizer=256)
    # Its numbers fit the model, and stand for other words.
    with pytest.raises(ValueError, match="by a tokenizer of 256 tokens, and that of the model has 300"):
        recipes.checks.check_data(data, vocabulary=300, positions=64, tokenizer=300)
    recipes.checks.check_tokenizer(tmp_path, 256, 256)
    with pytest.raises(ValueError, match=r"has 257 tokens, and the model's config\.json 256"):
        recipes.checks.check_tokenizer(tmp_path, 257, 256)


def test_preferences_have_a_complete_model_on_every_worker(recipes):
    file = RECIPES / "llama3-8b-dpo" / "tiny.toml"
    recipes.checks.refuse_for_preferences(recipes.config.read(file))
    for change, why in (("parallel.shard=2", r"parallel\.shard is 2"), ("experts.loss=0.1", "is not used")):
        with pytest.raises(ValueError, match=why):
            recipes.checks.refuse_for_preferences(recipes.config.read(file, [change]))


def test_biases_of_routers_that_nobody_would_load_again_are_refused(recipes, tmp_path):
    recipes.make_tiny.make("qwen3_moe", tmp_path, exercises=20)
    told = [f"model.folder={tmp_path}/model", "experts.bias_rate=0.1"]
    with pytest.raises(ValueError, match="a qwen3_moe has no e_score_correction_bias"):
        recipes.model.read_folder(recipes.config.read(TINY, told))
    recipes.model.read_folder(recipes.config.read(TINY, told[:1]))


def test_adapters_of_layers_that_are_not_there_are_refused(recipes, tmp_path):
    pytest.importorskip("peft")
    recipes.make_tiny.make("llama", tmp_path, exercises=20)
    told = [f"model.folder={tmp_path}/model", "lora.rank=2", "parallel.experts=1", "experts.loss=0"]
    recipes.model.read_folder(recipes.config.read(TINY, told))
    with pytest.raises(ValueError, match="nowhere_proj"):
        recipes.model.read_folder(recipes.config.read(TINY, [*told, 'lora.targets=["nowhere_proj"]']))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (["train.stpes=7"], "did you mean train.steps?"),
        (["model.folder=nowhere"], "model.folder is nowhere, and there is no config.json in it"),
        (
            ["model.folder={}/model", "data.pairs=nowhere.jsonl"],
            "data.pairs is nowhere.jsonl, and there is no such file",
        ),
    ],
)
def test_the_script_names_what_does_not_fit_and_starts_nothing(
    recipes, monkeypatch, capsys, tmp_path, changes, why
):
    recipes.make_tiny.make("qwen3_moe", tmp_path, exercises=20)
    told = ["train.py", str(TINY), *(change.format(tmp_path) for change in changes)]
    monkeypatch.setattr(sys, "argv", [*told, "--check"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(RECIPES / "train.py"), run_name="__main__")
    assert ended.value.code == 2
    assert why in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", told)
    # As a worker raises it, so that the job ends with it.
    with pytest.raises(UsageError, match=re.escape(why)):
        runpy.run_path(str(RECIPES / "train.py"), run_name="__main__")


def test_completions_alone_are_learned(recipes, tmp_path):
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": "ab", "completion": "cde"}) + "\n")
    words = SimpleNamespace(eos_token_id=0)
    tokenizer = type(
        "Letters", (), {"eos_token_id": 0, "__call__": lambda self, text, **more: letters(text)}
    )()
    tokens, labels = recipes.samples.Pairs(file, tokenizer, 8)[0]
    assert tokens.tolist() == [97, 98, 99, 100, 101, 0, 0, 0]
    assert labels.tolist() == [-100, 99, 100, 101, 0, -100, -100, -100]
    short, _ = recipes.samples.Pairs(file, tokenizer, 3)[0]
    assert short.tolist() == [97, 98, 99]
    assert words.eos_token_id == 0


def letters(text):
    return {"input_ids": [ord(letter) for letter in text]}


@pytest.mark.parametrize("line", ["{", "[]", '{"prompt": "a"}', '{"prompt": 1, "completion": "b"}'])
def test_a_line_that_is_no_sample_is_named_by_its_number(recipes, tmp_path, line):
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": "a", "completion": "b"}) + f"\n{line}\n")
    with pytest.raises(ValueError, match=r"pairs\.jsonl:2: "):
        recipes.samples.rows(file, "prompt", "completion")


def test_the_learning_rate_rises_and_falls(recipes):
    config = recipes.config.read(TINY, ["train.steps=100", "train.warmup_share=0.1"])
    batch = config.train.global_batch
    shares = [recipes.train.share_of_lr(config, step * batch) for step in range(101)]
    assert shares[0] == pytest.approx(0.1)
    assert max(shares) == shares[10] == 1.0
    assert shares[:11] == sorted(shares[:11])
    assert shares[10:] == sorted(shares[10:], reverse=True)
    assert shares[100] == pytest.approx(config.train.final_share)


def test_text_and_tokenizer_are_made_alike_again(recipes, tmp_path):
    from transformers import AutoTokenizer

    for name in ("one", "two"):
        recipes.make_tiny.make("llama", tmp_path / name, exercises=50)
    one, two = (sorted(p for p in (tmp_path / n).rglob("*") if p.is_file()) for n in ("one", "two"))
    assert [p.read_bytes() for p in one] == [p.read_bytes() for p in two]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "one/model")
    text = (tmp_path / "one/text/exercises-000.txt").read_text()
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert msgspec.json.decode((tmp_path / "one/model/config.json").read_bytes())["model_type"] == "llama"
