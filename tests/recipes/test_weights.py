"""Weights of a checkpoint folder into a sharded model, and out again, bit by bit."""

import json

import pytest
import torch

pytest.importorskip("transformers", reason="needs pip install 'holdfast-train[recipes]'")

import torch.distributed as dist
from ranks_on_tiers import save_flats
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM

from holdfast.checkpoint.archive import Archive
from holdfast.tensors.dtensor_shards import forget_meshes, local_of
from holdfast.tools.conversion.convert import export_safetensors
from holdfast.train.state_image import capture


@pytest.fixture(scope="module")
def tiny(recipes, tmp_path_factory):
    """A checkpoint folder with several files."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    recipes.make_tiny.make_model("mistral", folder, 300)
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


def loaded(recipes, folder, mesh, precision="fp32", attention="sdpa"):
    """What `train.py` does, up to the first step."""
    model = recipes.model.empty_model(folder, attention, checkpoint_activations=True)
    with recipes.weights.Weights(folder) as weights:
        weights.check(model)
        recipes.model.shard(model, mesh, recipes.config.Parallel(precision=precision))
        recipes.model.give_memory(model, torch.device("cpu"))
        weights.load(model)
    return model


def tensors_in(folder):
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def test_every_worker_gets_its_own_slices(recipes, tiny, worker_of):
    stored = tensors_in(tiny)
    pieces = {name: [] for name in stored}
    for rank in range(3):  # which divides hardly any of the shapes
        for name, p in loaded(recipes, tiny, worker_of(rank, 3)).named_parameters():
            pieces[name].append(local_of(p))
    assert all(torch.equal(torch.cat(parts), stored[name]) for name, parts in pieces.items())
    assert any(len(parts[2]) < len(parts[0]) for parts in pieces.values())


@pytest.mark.parametrize("tied", [False, True])
def test_the_model_computes_what_that_of_transformers_computes(recipes, tmp_path, worker_of, tied):
    recipes.make_tiny.make_model("mistral", tmp_path / "model", 300, tied=tied)
    tokens = torch.randint(0, 300, (2, 50), generator=torch.Generator().manual_seed(1))
    model = loaded(recipes, tmp_path / "model", worker_of(0, 1))
    logits = model(input_ids=tokens, use_cache=False).logits
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).train()
    assert torch.equal(logits, theirs(input_ids=tokens, use_cache=False).logits)
    assert len(list(model.parameters())) == len(list(theirs.parameters()))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    logits.square().mean().backward()  # also through the blocks that are computed again
    assert all(p.grad is not None for p in model.parameters())


def test_trained_weights_come_back_through_transformers(recipes, tiny, tmp_path, worker_of):
    archive, trained, images = Archive(f"file://{tmp_path}/tier"), {}, []
    for rank in range(2):
        model = loaded(recipes, tiny, worker_of(rank, 2))
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


def test_bf16_computes_in_bf16_and_keeps_fp32(recipes, tiny, worker_of):
    model = loaded(recipes, tiny, worker_of(0, 1), "bf16")
    logits = model(input_ids=torch.zeros(1, 8, dtype=torch.int64), use_cache=False).logits
    assert logits.dtype == torch.bfloat16
    logits.float().sum().backward()
    assert {p.dtype for p in model.parameters()} | {p.grad.dtype for p in model.parameters()} == {
        torch.float32
    }


def test_what_does_not_fit_is_all_named(recipes, tiny, tmp_path):
    stored = tensors_in(tiny)
    del stored["model.layers.3.mlp.up_proj.weight"]
    stored["model.layers.4.mlp.up_proj.weight"] = torch.zeros(2, 3)
    stored["lm_head.weight"] = torch.zeros(301, 64)
    stored["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)  # old folders have it
    (tmp_path / "config.json").write_text((tiny / "config.json").read_text())
    save_file(stored, tmp_path / "model.safetensors")
    model = recipes.model.empty_model(tmp_path, "sdpa", checkpoint_activations=False)
    with recipes.weights.Weights(tmp_path) as weights, pytest.raises(ValueError) as refused:
        weights.check(model)
    assert str(refused.value).splitlines()[1:] == [
        "  missing: model.layers.3.mlp.up_proj.weight [176, 64]",
        "  unexpected: model.layers.4.mlp.up_proj.weight [2, 3]",
        "  lm_head.weight is [301, 64], the model's is [300, 64]",
    ]


def test_a_folder_that_is_not_whole_is_refused(recipes, tiny, tmp_path):
    with pytest.raises(ValueError, match="has neither model"):
        recipes.weights.Weights(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x.safetensors"}}))
    with pytest.raises(ValueError, match=r"names x\.safetensors, not there"):
        recipes.weights.Weights(tmp_path)


@pytest.fixture(scope="module", params=["qwen3_moe", "gpt_oss", "deepseek_v3"])
def mixture(request, recipes, tmp_path_factory):
    """A checkpoint folder of a mixture of experts."""
    folder = tmp_path_factory.mktemp(request.param) / "model"
    recipes.make_tiny.make_model(request.param, folder, 300)
    return folder


def test_experts_are_read_from_folders_that_have_each_by_itself_and_from_those_that_have_not(
    recipes, mixture, worker_of
):
    """Three workers, which divide hardly any of the shapes."""
    theirs = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32).state_dict()
    pieces = {name: [] for name in theirs}
    for rank in range(3):
        model = loaded(recipes, mixture, worker_of(rank, 3), attention="eager")
        for name, tensor in model.state_dict().items():
            pieces[name].append(local_of(tensor))
    for name, parts in pieces.items():
        whole = parts[0] if len(parts[0]) == len(theirs[name]) else torch.cat(parts)
        assert torch.equal(whole, theirs[name]), name


def test_an_expert_that_is_missing_is_named(recipes, tmp_path):
    recipes.make_tiny.make_model("qwen3_moe", tmp_path, 300)
    stored = tensors_in(tmp_path)
    for file in tmp_path.glob("*.safetensors*"):
        file.unlink()
    del stored["model.layers.1.mlp.experts.2.up_proj.weight"]
    save_file(stored, tmp_path / "model.safetensors")
    model = recipes.model.empty_model(tmp_path, "eager", checkpoint_activations=False)
    with recipes.weights.Weights(tmp_path) as weights, pytest.raises(ValueError) as refused:
        weights.check(model)
    assert str(refused.value).splitlines()[1:] == [
        "  missing: model.layers.1.mlp.experts.2.up_proj.weight [48, 64]"
    ]


def test_spread_experts_compute_what_those_of_transformers_compute(recipes, mixture, one_worker):
    """With one worker, for the order of tokens and experts; jobs have several."""
    config = AutoConfig.from_pretrained(mixture)
    theirs = AutoModelForCausalLM.from_pretrained(
        mixture, dtype=torch.float32, experts_implementation="eager"
    )
    ours = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32)
    recipes.experts.spread(ours, one_worker["ep"])
    tokens = torch.randint(0, 300, (2, 20), generator=torch.Generator().manual_seed(1))
    outs = [model(input_ids=tokens, use_cache=False).logits for model in (ours, theirs)]
    torch.testing.assert_close(*outs, rtol=1e-4, atol=1e-5)
    for out in outs:
        out.square().mean().backward()
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            torch.testing.assert_close(local_of(a.grad), b.grad, rtol=1e-3, atol=1e-6, msg=name)
    assert config.num_experts_per_tok == 2


@pytest.fixture
def one_worker():
    """A mesh of this process alone, whose messages go through gloo."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
    dist.destroy_process_group()
    forget_meshes()


def test_tokens_of_a_block_that_is_computed_again_are_counted_once(recipes, tmp_path):
    recipes.make_tiny.make_model("deepseek_v3", tmp_path, 300)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).train()
    model.activation_checkpointing_enable({"use_reentrant": False})
    loads = recipes.routers.Loads(model, 4, 2, torch.device("cpu"))
    tokens = torch.randint(0, 300, (2, 20), generator=torch.Generator().manual_seed(1))
    model(input_ids=tokens, use_cache=False).logits.square().mean().backward()
    assert (
        loads.tokens.sum(1).tolist() == [2 * 20 * 2] * 2
    )  # two layers with experts, two of which each token gets
    assert not list(loads.parameters())

    counted = loads.tokens.clone()
    loads.update(0.5)
    assert loads.tokens.sum() == 0
    for layer, router in zip(counted, loads.routers.found, strict=True):
        wanted = [0.5 if n < 20 else -0.5 if n > 20 else 0.0 for n in layer.tolist()]
        assert router.e_score_correction_bias.tolist() == wanted
