"""The Mistral example: weights of a checkpoint folder into a sharded model, and out again, bit by bit."""

import json
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs pip install 'holdfast-train[mathstral]'")

import torch.distributed as dist
from ranks_on_tiers import save_flats
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, AutoTokenizer

from holdfast.checkpoint.archive import Archive
from holdfast.checkpoint.convert import export_safetensors
from holdfast.data.build import build
from holdfast.data.options import BuildOptions
from holdfast.tensors.dtensor_shards import forget_meshes, local_of
from holdfast.train.state_image import capture

EXAMPLE = Path(__file__).parents[2] / "examples" / "mathstral"


@pytest.fixture(scope="module")
def example():
    """The modules of the example, which import each other by their plain names."""
    names = ("config", "mistral", "weights", "make_tiny", "train")
    before = {name: sys.modules.pop(name, None) for name in names}
    sys.path.insert(0, str(EXAMPLE))
    try:
        yield type("Example", (), {name: __import__(name) for name in names})
    finally:
        sys.path.remove(str(EXAMPLE))
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


@pytest.fixture(scope="module")
def tiny(example, tmp_path_factory):
    """A checkpoint folder with several files."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    example.make_tiny.make_model(folder, 300)
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.fixture
def worker_of():
    """Stands in the place of one worker of a replica: a mesh whose other members are not there."""

    def stand(rank, size):
        leave()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        return init_device_mesh("cpu", (size,), mesh_dim_names=("shard",))

    def leave():
        if dist.is_initialized():
            dist.destroy_process_group()
        forget_meshes()

    yield stand
    leave()


def loaded(example, folder, mesh, precision="fp32"):
    """What `train.py` does, up to the first step."""
    model = example.mistral.empty_model(folder, "sdpa", checkpoint_activations=True)
    with example.weights.Weights(folder) as weights:
        weights.check(model)
        example.mistral.shard(model, mesh, precision)
        example.mistral.give_memory(model, torch.device("cpu"))
        weights.load(model)
    return model


def tensors_in(folder):
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def test_every_worker_gets_its_own_slices(example, tiny, worker_of):
    stored = tensors_in(tiny)
    pieces = {name: [] for name in stored}
    for rank in range(3):  # which divides hardly any of the shapes
        for name, p in loaded(example, tiny, worker_of(rank, 3)).named_parameters():
            pieces[name].append(local_of(p))
    assert all(torch.equal(torch.cat(parts), stored[name]) for name, parts in pieces.items())
    assert any(len(parts[2]) < len(parts[0]) for parts in pieces.values())


@pytest.mark.parametrize("tied", [False, True])
def test_the_model_computes_what_that_of_transformers_computes(example, tmp_path, worker_of, tied):
    example.make_tiny.make_model(tmp_path / "model", 300, tied=tied)
    tokens = torch.randint(0, 300, (2, 50), generator=torch.Generator().manual_seed(1))
    model = loaded(example, tmp_path / "model", worker_of(0, 1))
    logits = model(input_ids=tokens, use_cache=False).logits
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).train()
    assert torch.equal(logits, theirs(input_ids=tokens, use_cache=False).logits)
    assert len(list(model.parameters())) == len(list(theirs.parameters()))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    logits.square().mean().backward()  # also through the blocks that are computed again
    assert all(p.grad is not None for p in model.parameters())


def test_trained_weights_come_back_through_transformers(example, tiny, tmp_path, worker_of):
    archive, trained, images = Archive(f"file://{tmp_path}/tier"), {}, []
    for rank in range(2):
        model = loaded(example, tiny, worker_of(rank, 2))
        for number, (name, p) in enumerate(model.named_parameters()):
            drawn = torch.randn(p.shape, generator=torch.Generator().manual_seed(number))
            trained[name] = drawn
            local_of(p).copy_(drawn.chunk(2)[rank])  # with fully_shard's cut along the first dimension
        images.append(capture({"model": model}, 3))
    save_flats(archive, 3, images)
    export_safetensors(archive, 3, tmp_path / "out", "model.", 300_000, strip=True)
    (tmp_path / "out/config.json").write_text((tiny / "config.json").read_text())
    model, found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(found.values()), found
    state = model.state_dict()
    assert state.keys() == trained.keys()
    assert all(torch.equal(state[name], t) for name, t in trained.items())


def test_bf16_computes_in_bf16_and_keeps_fp32(example, tiny, worker_of):
    model = loaded(example, tiny, worker_of(0, 1), "bf16")
    logits = model(input_ids=torch.zeros(1, 8, dtype=torch.int64), use_cache=False).logits
    assert logits.dtype == torch.bfloat16
    logits.float().sum().backward()
    assert {p.dtype for p in model.parameters()} | {p.grad.dtype for p in model.parameters()} == {
        torch.float32
    }


def test_what_does_not_fit_is_all_named(example, tiny, tmp_path):
    stored = tensors_in(tiny)
    del stored["model.layers.3.mlp.up_proj.weight"]
    stored["model.layers.4.mlp.up_proj.weight"] = torch.zeros(2, 3)
    stored["lm_head.weight"] = torch.zeros(301, 64)
    stored["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)  # old folders have it
    (tmp_path / "config.json").write_text((tiny / "config.json").read_text())
    save_file(stored, tmp_path / "model.safetensors")
    model = example.mistral.empty_model(tmp_path, "sdpa", checkpoint_activations=False)
    with example.weights.Weights(tmp_path) as weights, pytest.raises(ValueError) as refused:
        weights.check(model)
    assert str(refused.value).splitlines()[1:] == [
        "  missing: model.layers.3.mlp.up_proj.weight [176, 64]",
        "  unexpected: model.layers.4.mlp.up_proj.weight [2, 3]",
        "  lm_head.weight is [301, 64], the model's is [300, 64]",
    ]


def test_a_folder_that_is_not_whole_is_refused(example, tiny, tmp_path):
    with pytest.raises(ValueError, match="has neither model"):
        example.weights.Weights(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x.safetensors"}}))
    with pytest.raises(ValueError, match=r"names x\.safetensors, not there"):
        example.weights.Weights(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ValueError, match="is of a llama"):
        example.mistral.empty_model(tmp_path, "sdpa", checkpoint_activations=False)


def test_the_configs_are_read_and_changed(example):
    config = example.config.read(EXAMPLE / "tiny.toml", ["train.steps=7", "data.tokens=a/b", "train.lr=1e-4"])
    assert (config.train.steps, config.data.tokens, config.train.lr) == (7, "a/b", 1e-4)
    large = example.config.read(EXAMPLE / "7b.toml")
    for gpus in (64, 128, 256):
        assert large.train.global_batch % (large.train.micro_batch * gpus) == 0


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("train.stpes=7", "unknown field `stpes`"),
        ("trian.steps=7", "unknown field `trian`"),
        ("train.steps=0", r">= 1.*\$\.train\.steps"),
        ("train.lr=fast", r"Expected `float`.*\$\.train\.lr"),
        ("parallel.precision=fp8", "Invalid enum value 'fp8'"),
        ("steps=7", "write it as train.steps=20"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(example, change, why):
    with pytest.raises(ValueError, match=why):
        example.config.read(EXAMPLE / "tiny.toml", [change])


def test_data_of_another_tokenizer_is_refused(example, tmp_path):
    example.make_tiny.make_text(tmp_path / "text", 10, seed=0)
    build(BuildOptions(inputs=(str(tmp_path / "text"),), prefix=tmp_path / "tokens"))
    data = example.config.Data(str(tmp_path / "tokens"), 64)
    example.config.check_data(data, vocabulary=256, positions=64)
    with pytest.raises(ValueError, match="has tokens up to 255, and the model 200 in all"):
        example.config.check_data(data, vocabulary=200, positions=64)
    with pytest.raises(ValueError, match="allows 32 positions"):
        example.config.check_data(data, vocabulary=256, positions=32)


def test_the_learning_rate_rises_and_falls(example):
    config = example.config.read(EXAMPLE / "tiny.toml", ["train.steps=100", "train.warmup_share=0.1"])
    batch = config.train.global_batch
    shares = [example.train.share_of_lr(config, step * batch) for step in range(101)]
    assert shares[0] == pytest.approx(0.1)
    assert max(shares) == shares[10] == 1.0
    assert shares[:11] == sorted(shares[:11])
    assert shares[10:] == sorted(shares[10:], reverse=True)
    assert shares[100] == pytest.approx(config.train.final_share)


def test_text_and_tokenizer_are_made_alike_again(example, tmp_path):
    for name in ("one", "two"):
        example.make_tiny.make(tmp_path / name, exercises=50)
    one, two = (sorted(p for p in (tmp_path / n).rglob("*") if p.is_file()) for n in ("one", "two"))
    assert [p.read_bytes() for p in one] == [p.read_bytes() for p in two]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "one/model")
    text = (tmp_path / "one/text/exercises-000.txt").read_text()
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
