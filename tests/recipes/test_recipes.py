"""Every recipe's tiny size trains through a kill and the loss of a node, to the bits of an undisturbed run."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import xxhash
from harness import end_leftovers, end_started, finish, start

RECIPES = Path(__file__).parents[2] / "recipes"
FAMILIES = ("llama", "qwen3_moe", "gpt_oss", "deepseek_v3", "mistral")
MODELS = ",".join(f"transformers.models.{name}.modeling_{name}" for name in FAMILIES)
PRELOAD = f"torch,torch.distributed.fsdp,transformers.models.auto.modeling_auto,{MODELS}"
"""Imported once for all of these jobs."""
STEPS = 9
STRUCK = ("--nnodes", "2:4", "--fault", "kill-worker:rank=1,step=3", "--fault", "kill-node:rank=0,step=6")
"""One replica loses a worker. Later the job shrinks to one replica, since nobody takes the lost node's place."""

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def nothing_left(tmp_path):
    yield
    end_started()
    for home in (tmp_path, tmp_path / "calm", tmp_path / "struck"):
        end_leftovers(home)


@pytest.fixture(scope="module")
def made(recipes, tmp_path_factory):
    """The folder of a tiny model, made once for each family."""
    folders = {}

    def make(family):
        if family not in folders:
            folders[family] = tmp_path_factory.mktemp(family)
            recipes.make_tiny.make(family, folders[family], exercises=300)
        return folders[family]

    return make


def told(folder, file, *changes):
    """The command of a script with the data of a folder."""
    data = f"data.pairs={folder}/pairs.jsonl"
    if file.parent.name in ("llama3-8b-pretrain", "mathstral-7b"):
        data = f"data.tokens={folder}/tokens"
        if not (folder / "tokens.build.json").exists():
            build = ["data", "build", folder / "text", "--out", folder / "tokens"]
            holdfast(*build, "--tokenizer", folder / "model/tokenizer.json", "--eod", "</s>")
    return [
        RECIPES / "train.py",
        file,
        f"model.folder={folder}/model",
        data,
        f"train.steps={STEPS}",
        "data.seq_len=32",
        *changes,
    ]


def holdfast(*args):
    """A command that must do its work."""
    command = [sys.executable, "-m", "holdfast.cli", *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


def both(tmp_path, command):
    """The undisturbed run and the struck one, side by side."""
    # Each has a home of its own: whoever ends first must leave nothing that runs, and the other one still does.
    homes = {job: tmp_path / job for job in ("calm", "struck")}
    for home in homes.values():
        home.mkdir()
    started = {
        "calm": start(homes["calm"], "--nnodes", 2, *command, job="calm", preload=PRELOAD),
        "struck": start(homes["struck"], *STRUCK, *command, job="struck", preload=PRELOAD),
    }
    calm, struck = (finish(process, homes[job], job, timeout=200) for job, process in started.items())
    assert (calm.code, struck.code) == (0, 0), calm.output[-2000:] + struck.output[-3000:]
    assert len(struck.report["incidents"]) == 2
    assert calm.report["incidents"] == []
    return calm, struck


@pytest.mark.parametrize(
    ("file", "family"),
    [
        ("llama3-8b-pretrain/tiny.toml", "llama"),
        pytest.param("qwen3-30b-a3b-sft/tiny.toml", "qwen3_moe", marks=pytest.mark.nightly),
        pytest.param("qwen3-30b-a3b-sft/tiny-deepseek.toml", "deepseek_v3", marks=pytest.mark.nightly),
        pytest.param("gpt-oss-20b-finetune/tiny.toml", "gpt_oss", marks=pytest.mark.nightly),
        pytest.param("gpt-oss-20b-finetune/tiny-lora.toml", "gpt_oss", marks=pytest.mark.nightly),
        pytest.param("mathstral-7b/tiny.toml", "mistral", marks=pytest.mark.nightly),
    ],
)
def test_a_kill_and_a_lost_node_change_no_bit_and_what_was_trained_comes_out(
    tmp_path, monkeypatch, made, recipes, file, family
):
    transformers = pytest.importorskip("transformers")
    config = recipes.config.read(RECIPES / file)
    if config.lora.rank:
        pytest.importorskip("peft")
    folder = made(family)
    calm, struck = both(tmp_path, told(folder, RECIPES / file))
    assert struck.losses() == calm.losses()
    assert len(calm.losses()) == STEPS
    # Parameters, moments, and of routers counts and biases.
    for name in ("params_xxh3", "state_xxh3", "covered"):
        assert struck.report["final"][name] == calm.report["final"][name]
    assert struck.report["final"]["replicas_equal"] is True
    assert ("loads" in calm.report["final"]["covered"]) == (config.experts.bias_rate > 0)

    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "struck"))
    out = tmp_path / "out"
    told_both = recipes.config.read(RECIPES / file, [f"model.folder={folder}/model"])
    recipes.export.export(told_both, out, "struck", step=None)
    if config.lora.rank:
        assert {path.name for path in out.glob("adapter*")} == {
            "adapter_config.json",
            "adapter_model.safetensors",
        }
        return
    model, found = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(found.values()), found
    if family in ("llama", "mistral"):
        assert digests(model, 2) == calm.report["final"]["params_xxh3"]
    if family == "deepseek_v3":
        biases = [b for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")]
        # Nine updates of a thousandth each way, of which not all were undone by others.
        assert all(0 < float(bias.abs().max()) <= 0.009 + 1e-6 for bias in biases)


def digests(model, shards):
    """Of the pieces that the workers of a replica have of a model's parameters, as reports have them."""
    rows = [xxhash.xxh3_64() for _ in range(shards)]
    for p in model.parameters():
        for row, piece in zip(rows, p.detach().chunk(shards), strict=True):
            row.update(piece.contiguous().numpy().tobytes())
    return ":".join(row.hexdigest() for row in rows)


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_experts_learn_the_same_on_two_workers_as_on_one(tmp_path, made, family):
    file = RECIPES / "qwen3-30b-a3b-sft/tiny.toml"
    attention = ("model.attention=eager",) if family == "gpt_oss" else ()
    loss = ("experts.loss=0",) if family == "deepseek_v3" else ()
    losses = []
    for experts in (1, 2):
        command = told(made(family), file, f"parallel.experts={experts}", *attention, *loss)
        job = f"e{experts}"
        ran = finish(start(tmp_path, "--nnodes", 2, *command, job=job, preload=PRELOAD), tmp_path, job, 200)
        assert ran.code == 0, ran.output[-3000:]
        losses.append(ran.losses())
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.nightly
def test_the_fast_reduction_learns_the_same_but_for_the_last_bits(tmp_path, made):
    command = told(made("llama"), RECIPES / "llama3-8b-pretrain/tiny.toml", "train.reduction=fast")
    calm, struck = both(tmp_path, command)
    assert struck.losses() == pytest.approx(calm.losses(), rel=1e-4)
    assert torch.isfinite(torch.tensor(calm.losses())).all()
