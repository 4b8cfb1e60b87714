"""torchtitan at level 2: a killed worker and a lost node change no bit.

`tests/adapters/with-version.sh torchtitan==0.3.0` runs these in an environment of their own.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.utils.checkpoint

from holdfast.errors import DataError, UsageError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its own, of this version of torch
    pytest.importorskip("torchtitan")
    from torchtitan.components.optimizer.optimizer import register_moe_load_balancing_hook
    from torchtitan.config import ConfigManager
    from torchtitan.distributed import parallel_dims as titan_dims
    from torchtitan.distributed import pipeline_parallel as titan_pipelines
    from torchtitan.distributed import utils as dist_utils
    from torchtitan.protocols import module as titan_modules
    from torchtitan.trainer import Trainer

    from holdfast import titan
    from holdfast.adapters.torchtitan import checkpoints, refusals, trainer
    from holdfast.adapters.torchtitan.trainer import (
        HoldfastTrainer,
        as_holdfast,
        built_alone,
        numbered_by_shards,
        stages_that_say_their_shapes,
    )

SCRIPT = Path(__file__).parent / "titan_cpu.py"
STEPS = 6
OPTIONS = f"""--training.steps {STEPS} --training.local_batch_size 1 --holdfast.reduction exact
--parallelism.spmd_backend partial_dtensor""".split()
LLAMA = ["--module", "llama3", "--config", "llama3_debugmodel"]
WIDE = [
    "--training.seq_len",
    "64",
    "--training.global_batch_size",
    "4",
    "--parallelism.data_parallel_shard_degree",
    "2",
]
NARROW = ["--training.global_batch_size", "4", "--training.seq_len"]
"""Models of two layers."""
PRECISION = "--training.mixed_precision_param"

pytestmark = [pytest.mark.timeout(600), pytest.mark.framework("torchtitan")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer and a text, in place of those that the debug configurations have in torchtitan's own repository."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = tmp_path_factory.mktemp("titan")
    words = [f"w{i}" for i in range(200)]
    known = ["<unk>", "<s>", "</s>", *words]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(known)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    (made / "tokenizer").mkdir()
    tokenizer.save(str(made / "tokenizer" / "tokenizer.json"))
    (made / "tokenizer" / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})
    )
    (made / "text").mkdir()
    lines = (" ".join(words[(i * 7 + j) % 200] for j in range(50)) for i in range(400))
    (made / "text" / "a.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return made


def job(home, folder, name, *options, given=(*LLAMA, *WIDE), layers=0, **more):
    """What a job with these options of `holdfast run` ended as.

    given: to torchtitan. layers: of the model; 0: all. more: what else `titan_cpu.py` reads.
    """
    environment = (
        os.environ
        | {
            "HOLDFAST_HOME": str(home),
            "HF_HOME": str(home / "hf"),
            "OMP_NUM_THREADS": "1",
            "TITAN_LAYERS": str(layers),
        }
        | more
    )
    command = [sys.executable, "-m", "holdfast", "run", "--no-ui", "--job", name]
    command += ["--report", home / f"{name}.json", *options, SCRIPT, folder, *OPTIONS, *given]
    ran = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True, timeout=1500)
    assert ran.returncode == 0, ran.stdout[-3000:]
    return json.loads((home / f"{name}.json").read_text())


def check(struck, calm, steps, incidents):
    """The faults of one job changed nothing of what another one came to without them."""
    assert len(struck["incidents"]) == incidents
    assert calm["steps"]["committed"] == struck["steps"]["committed"] == steps
    for name in ("loss", "params_xxh3", "state_xxh3"):
        assert struck["final"][name] == calm["final"][name]


@pytest.mark.nightly
@pytest.mark.capability("level 2", "kill", "resize", "sharded")
def test_a_killed_worker_and_a_lost_node_change_no_bit(tmp_path, folder):
    """FSDP2 in two replicas of two workers, and at last in one."""
    calm = job(tmp_path, folder, "calm", "--nnodes", 2)
    faults = ("--fault", "kill-worker:rank=1,step=2", "--fault", "kill-node:rank=0,step=4")
    struck = job(tmp_path, folder, "struck", "--nnodes", "2:4", *faults)
    check(struck, calm, STEPS, incidents=2)


LAYOUTS = {
    "llama-tensor": "llama3 llama3_debugmodel 16 1 --parallelism.tensor_parallel_degree 2",
    "llama-context": "llama3 llama3_debugmodel 256 1 --parallelism.context_parallel_degree 2",
    "qwen3": "qwen3 qwen3_debugmodel 16 2",
    "qwen3-experts": "qwen3 qwen3_moe_debug 16 2 --parallelism.expert_parallel_degree 2",
    "deepseek-experts": "deepseek_v3 deepseek_v3_debugmodel 16 2 --parallelism.expert_parallel_degree 2",
    "gpt-oss-experts": "gpt_oss gpt_oss_debugmodel_flex 16 2 --parallelism.expert_parallel_degree 2",
    "llama-stages": "llama3 llama3_debugmodel 16 1 --parallelism.pipeline_parallel_degree 2"
    " --parallelism.pipeline_parallel_schedule 1F1B --training.local_batch_size 2",
    "llama-stages-fsdp": "llama3 llama3_debugmodel 16 2 --parallelism.pipeline_parallel_degree 2"
    " --parallelism.pipeline_parallel_schedule 1F1B --training.local_batch_size 2 --training.global_batch_size 8",
}
"""Module, configuration, tokens of a sequence (under context parallelism two blocks of attention), shards."""
MORE = {"llama-fsdp": "llama3 llama3_debugmodel 16 2"}
"""A layout of which another test has a kill."""
PHASES = ("forward", "backward", "reduce", "vote", "update", "commit", "backward", "forward")


def options_of(layout):
    """What torchtitan is given for it."""
    module, config, tokens, shards, *more = (LAYOUTS | MORE)[layout].split()
    # A CPU computes faster in float32. The experts of GPT-OSS give out bfloat16 whatever they get.
    kind = "bfloat16" if module == "gpt_oss" else "float32"
    degrees = ("--parallelism.data_parallel_shard_degree", shards, *more, PRECISION, kind)
    return ("--module", module, "--config", config, *NARROW, tokens, *degrees)


@pytest.mark.nightly
@pytest.mark.timeout(3000)
@pytest.mark.capability("level 2")
@pytest.mark.parametrize(("layout", "phase"), list(zip(LAYOUTS, PHASES, strict=True)))
def test_a_worker_that_is_killed_in_any_phase_changes_no_bit_of_any_model(tmp_path, folder, layout, phase):
    """Each model in two replicas of two workers, of which one is killed and replaced: the job shrinks, and grows again."""
    given = options_of(layout)
    replica = 4 if layout == "llama-stages-fsdp" else 2
    calm = job(tmp_path, folder, "calm", "--nnodes", replica, given=given, layers=2)
    kill = f"kill-worker:rank=1,step=3,phase={phase}"
    nodes = f"{replica}:{2 * replica}"
    struck = job(tmp_path, folder, "struck", "--nnodes", nodes, "--fault", kill, given=given, layers=2)
    check(struck, calm, STEPS, incidents=1)


@pytest.mark.nightly
@pytest.mark.timeout(3000)
@pytest.mark.capability("level 2")
@pytest.mark.parametrize("layout", ["qwen3", "qwen3-experts", "deepseek-experts", "gpt-oss-experts"])
def test_a_debug_configuration_with_all_its_layers_and_experts_survives_a_kill(tmp_path, folder, layout):
    """Llama's has all of its layers in the first test above."""
    given = (*options_of(layout), "--training.steps", "3")
    calm = job(tmp_path, folder, "calm", "--nnodes", "2", given=given)
    kill = ("--fault", "kill-worker:rank=1,step=1,phase=backward")
    # Two replicas of 64 experts with their snapshots take more memory than 24 GB. Of one, a lost shard comes back from a snapshot.
    nodes = ("2", "--snapshot-every", "1") if layout == "qwen3-experts" else ("2:4",)
    struck = job(tmp_path, folder, "struck", "--nnodes", *nodes, *kill, given=given)
    check(struck, calm, 3, incidents=1)


SAVE = [
    "--checkpoint.enable",
    "--checkpoint.last_save_in_hf",
    "--checkpoint.last_save_model_only",
    "--checkpoint.interval",
]


def weights(folder):
    """Of all files of Hugging Face's format in a folder."""
    from safetensors.torch import load_file

    return {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}


def model_of(folder):
    """The model's tensors in a checkpoint of torchtitan's."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(folder, folder / "whole.pt")
    whole = torch.load(folder / "whole.pt", weights_only=True)
    return whole, {name: x for name, x in whole.items() if isinstance(x, torch.Tensor) and "." in name}


def same(one, other):
    """Biases of experts follow their loads, and not the learning rate."""
    one, other = (
        {k: x for k, x in found.items() if "expert_bias" not in k and "correction_bias" not in k}
        for found in (one, other)
    )
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.nightly
@pytest.mark.timeout(3000)
@pytest.mark.capability("level 2")
@pytest.mark.parametrize(
    "layout", ["llama-fsdp", "llama-tensor", "qwen3-experts", "deepseek-experts", "gpt-oss-experts"]
)
def test_torchtitans_own_checkpoints_are_written_through_a_kill_and_are_where_another_training_begins(
    tmp_path, folder, layout
):
    given = options_of(layout)
    calm = job(tmp_path, folder, "calm", "--nnodes", 2, given=given, layers=2)
    faults = ("--fault", "kill-worker:rank=1,step=2,phase=backward", "--fault", "kill-worker:rank=0,step=4")
    struck = job(
        tmp_path,
        folder,
        "struck",
        "--nnodes",
        "2:4",
        *faults,
        given=(*given, *SAVE, "2", f"--checkpoint.folder={tmp_path}/a"),
        layers=2,
    )
    check(struck, calm, STEPS, incidents=2)  # to write changes nothing
    whole, model = model_of(tmp_path / "a" / "step-4")
    assert whole["train_state"]["step"] == 4
    assert "dataloader" not in whole
    exported = weights(tmp_path / "a" / "step-6")
    assert exported
    assert "step-2" in os.listdir(tmp_path / "a")

    # What comes out is what went in, and no other run has it by chance.
    still = (*given, "--training.steps=2", *SAVE, "100", "--checkpoint.enable_first_step_checkpoint")
    for name, source, more in (("b", "step-6", ["--checkpoint.initial_load_in_hf"]), ("c", "step-4", [])):
        load = (
            f"--checkpoint.initial_load_path={tmp_path}/a/{source}",
            f"--checkpoint.folder={tmp_path}/{name}",
        )
        job(tmp_path, folder, name, "--nnodes", 2, given=(*still, *load, *more), layers=2, TITAN_STILL="1")
    assert same(weights(tmp_path / "b" / "step-2"), exported)
    read = model_of(tmp_path / "c" / "step-1")[1]
    assert same({name: x for name, x in read.items() if name in model}, model)
    assert not same(weights(tmp_path / "c" / "step-2"), exported)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.capability("level 2", "kill")
def test_a_worker_that_is_lost_while_torchtitans_checkpoint_is_written_costs_that_checkpoint(
    tmp_path, folder
):
    calm = job(tmp_path, folder, "calm", "--nnodes", 2, layers=2)
    given = (*LLAMA, *WIDE, *SAVE, "2", f"--checkpoint.folder={tmp_path}/a")
    struck = job(
        tmp_path,
        folder,
        "struck",
        "--nnodes",
        "2:4",
        given=given,
        layers=2,
        TITAN_DIES=str(tmp_path / "dead"),
    )
    assert (tmp_path / "dead").exists()
    check(struck, calm, STEPS, incidents=1)
    assert (tmp_path / "a" / "step-2" / ".metadata").exists()
    assert not (tmp_path / "a" / "step-4" / ".metadata").exists()
    assert weights(tmp_path / "a" / "step-6")


def manager(model, folder, **options):
    """torchtitan's for a model of one worker, as a job has it."""
    config = checkpoints.Checkpoints.Config(enable=True, folder=str(folder), **options)
    return config.build(
        dataloader=None,
        model_parts=[model],
        optimizers=None,
        lr_schedulers=None,
        states={},
        sd_adapter=None,
        base_folder="",
    )


def saved(folder, size=3):
    model = torch.nn.Linear(2, size)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        torch.distributed.checkpoint.save(model.state_dict(), checkpoint_id=str(folder), no_dist=True)
    return model


def test_first_weights_are_read_and_those_that_do_not_fit_are_refused_by_name(tmp_path):
    was, model = saved(tmp_path / "fits"), torch.nn.Linear(2, 3)
    saved(tmp_path / "larger", 4)
    manager(model, tmp_path / "x", initial_load_path=str(tmp_path / "fits")).load_first()
    assert torch.equal(model.weight, was.weight)
    assert torch.equal(model.bias, was.bias)
    for name, why in (
        ("larger", "Size mismatch .* for bias"),
        ("nowhere", "initial_load_path is invalid"),
    ):
        with pytest.raises(
            UsageError, match=rf"initial weights of the model cannot be read from {tmp_path}/{name}: .*{why}"
        ):
            manager(model, tmp_path / "x", initial_load_path=str(tmp_path / name)).load_first()
    with pytest.raises(UsageError, match="cannot read Hugging Face's weights"):
        manager(
            model, tmp_path / "x", initial_load_path=str(tmp_path / "fits"), initial_load_in_hf=True
        ).load_first()
    assert torch.equal(model.weight, was.weight)


def test_checkpoints_of_another_training_are_not_written_over(tmp_path):
    of_others, of_one = (
        manager(torch.nn.Linear(2, 3), tmp_path / "x"),
        manager(torch.nn.Linear(2, 3), tmp_path / "y"),
    )
    saved(tmp_path / "x" / "step-12")
    with pytest.raises(
        UsageError, match=r"up to step 12 of a run without Holdfast.*initial_load_path .*/step-12"
    ):
        of_others.claim("a")
    of_one.claim("a")  # nothing is there yet
    saved(tmp_path / "y" / "step-12")
    of_one.claim("a")
    with pytest.raises(UsageError, match="of the job 'a'"):
        of_one.claim("b")
    assert sorted(os.listdir(tmp_path / "y")) == ["job.json", "step-12"]
    manager(torch.nn.Linear(2, 3), tmp_path / "y", load_only=True).claim("b")  # it writes nothing
    (tmp_path / "y" / checkpoints.OWNER).write_text("{")
    with pytest.raises(UsageError, match="up to step 12"):
        of_one.claim("a")
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="file/z cannot be written"):
        manager(torch.nn.Linear(2, 3), tmp_path / "file" / "z").claim("a")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_folder_that_takes_nothing_costs_a_warning(tmp_path, caplog):
    one = manager(torch.nn.Linear(2, 3), tmp_path)
    one.states = {"train_state": torch.nn.Linear(1, 1)}
    (tmp_path / "step-500").touch()  # where its folder would be
    with caplog.at_level("WARNING"):
        one.write(500, last=False)
    assert "torchtitan's checkpoint of step 500 was not written: FileExistsError" in caplog.text


def llama(**changes):
    config = as_holdfast(titan.prepared(ConfigManager()._load_config(LLAMA)[0]))
    for path, value in changes.items():
        *parents, last = path.split("__")
        at = config
        for name in parents:
            at = getattr(at, name)
        setattr(at, last, value)
    return config


def test_a_debug_configuration_is_taken_as_it_is():
    config = llama()
    refusals.refuse(config)
    assert type(config)._owner is HoldfastTrainer
    assert config.debug.seed == 0


STAGES = {
    "parallelism__pipeline_parallel_degree": 2,
    "parallelism__data_parallel_shard_degree": 1,
    "parallelism__pipeline_parallel_schedule": "1F1B",
}


SAVES = {"checkpoint__enable": True}


@pytest.mark.capability("level 2", refused=True)
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (STAGES | {"parallelism__tensor_parallel_degree": 2}, "Combine stages with FSDP2"),
        (STAGES | {"parallelism__context_parallel_degree": 2}, "Combine stages with FSDP2"),
        (STAGES | {"parallelism__expert_parallel_degree": 2}, "Combine stages with FSDP2"),
        (STAGES | {"parallelism__pipeline_parallel_schedule": "Interleaved1F1B"}, "Use 1F1B or GPipe"),
        (STAGES | {"parallelism__pipeline_parallel_schedule_csv": "plan.csv"}, "Use 1F1B or GPipe"),
        (STAGES | {"validator__enable": True}, "--validator.enable"),
        ({"parallelism__data_parallel_replicate_degree": 2}, "Holdfast manages the replicas"),
        ({"training__disable_cuda_graphs": False}, "--training.disable_cuda_graphs"),
        (SAVES | {"checkpoint__load_step": 500}, "--checkpoint.initial_load_path with its folder"),
        (
            SAVES | {"checkpoint__initial_load_path": "/w", "checkpoint__initial_load_model_only": False},
            "Leave the option true",
        ),
        (SAVES | {"checkpoint__create_seed_checkpoint": True}, "create the seed checkpoint with torchtitan"),
        (SAVES | {"checkpoint__async_mode": "async"}, "would not survive the loss of a worker"),
        (SAVES | {"checkpoint__folder": "s3://bucket/x"}, "only file systems are supported"),
        ({"comm__mode": "fake_backend"}, "simulates a world"),
    ],
)
def test_what_does_not_work_is_refused_with_a_sentence(change, why):
    with pytest.raises(UsageError, match=why):
        refusals.refuse(llama(**change))


def test_stages_with_shards_are_taken():
    refusals.refuse(llama(**STAGES | {"parallelism__data_parallel_shard_degree": 2}))


def test_the_workers_of_a_replica_follow_from_the_degrees():
    degrees = {"context_parallel_degree": 1, "tensor_parallel_degree": 2, "data_parallel_shard_degree": -1}
    degrees["pipeline_parallel_degree"] = 1
    assert refusals.row_of(SimpleNamespace(**degrees), 8) == (4, 1, 2, 1)
    assert refusals.row_of(SimpleNamespace(**degrees | {"pipeline_parallel_degree": 2}), 8) == (2, 1, 2, 2)
    assert refusals.row_of(SimpleNamespace(**degrees | {"data_parallel_shard_degree": 3}), 8).workers == 6
    with pytest.raises(UsageError, match="do not divide the 3 workers"):
        refusals.row_of(SimpleNamespace(**degrees), 3)


def test_a_stream_gives_the_batch_of_a_step_to_whoever_asks():
    opened = []

    def open_stream(number):
        opened.append(number)
        return (({"input": (number, step)}, step) for step in range(5))

    read = trainer.Streams(open_stream, 2)
    assert read.batch(1, 0) == read.batch(1, 0) == ({"input": (1, 0)}, 0)  # a step that comes again
    assert read.batch(1, 3)[1] == 3  # others computed what is between
    assert opened == [1]
    assert read.batch(1, 1)[1] == 1  # an older state
    assert opened == [1, 1]
    with pytest.raises(DataError, match=r"stream 0 of 2 ended after 5 batches"):
        read.batch(0, 5)


def test_hooks_that_rewrite_a_state_are_taken_off_and_others_stay():
    from torchtitan.models.common.attention import FusedQKVLinear

    model = torch.nn.Linear(2, 2)
    model.register_state_dict_post_hook(FusedQKVLinear._split_qkv_on_save)
    model.register_load_state_dict_pre_hook(FusedQKVLinear._merge_qkv_on_load)
    model.register_state_dict_post_hook(lambda *args: None)
    hooks = checkpoints.StateHooks([model])
    assert (len(model._state_dict_hooks), len(model._load_state_dict_pre_hooks)) == (1, 0)
    with hooks.back():
        assert (len(model._state_dict_hooks), len(model._load_state_dict_pre_hooks)) == (2, 1)
    assert (len(model._state_dict_hooks), len(model._load_state_dict_pre_hooks)) == (1, 0)


class Mixture(torch.nn.Module):
    """What the adapter knows of torchtitan's."""

    def __init__(self):
        super().__init__()
        self.load_balance_coeff = 0.01
        self.routed_experts = torch.nn.Linear(1, 1)
        self.routed_experts.forward = lambda x, scores, ids, by_expert: x
        self.register_buffer("expert_bias_E", torch.zeros(4))
        self.register_buffer("tokens_per_expert_E", torch.zeros(4), persistent=False)


def mixtures():
    block = torch.nn.Module()
    block.moe_enabled, block.moe = True, Mixture()
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleDict({"0": block})
    return model, block.moe


def test_biases_of_experts_follow_the_counts_as_torchtitans_hook_has_it():
    counted = torch.tensor([5, 1, 0, 2])
    (theirs, as_theirs), (ours, as_ours) = mixtures(), mixtures()
    optimizer = torch.optim.SGD(theirs.parameters())
    dims = SimpleNamespace(get_optional_mesh=lambda name: None, ep_enabled=False, tp=1)
    register_moe_load_balancing_hook(optimizer, [theirs], dims)
    as_theirs.tokens_per_expert_E += counted
    optimizer.step()
    loads = trainer.Loads(trainer.with_biases([ours]))
    as_ours.routed_experts(torch.zeros(1), None, None, counted)
    assert loads.tokens.tolist() == [counted.tolist()]
    loads.update()
    assert torch.equal(as_ours.expert_bias_E, as_theirs.expert_bias_E)
    assert as_ours.expert_bias_E.any()
    assert not loads.tokens.any()


def test_torchtitans_hook_for_biases_is_taken_off_and_another_one_is_refused():
    model, _ = mixtures()
    optimizer = torch.optim.SGD(model.parameters())
    register_moe_load_balancing_hook(optimizer, [model], SimpleNamespace())
    trainer.take_hook_off(optimizer)
    refusals.refuse_hooks(optimizer)
    optimizer.register_step_pre_hook(lambda *args: None)
    with pytest.raises(UsageError, match="a hook that runs before each update"):
        refusals.refuse_hooks(optimizer)


def test_tokens_are_counted_once_where_a_block_is_computed_again():
    model, moe = mixtures()
    loads = trainer.Loads(trainer.with_biases([model]))
    x = torch.ones(1, requires_grad=True)

    def block(x):
        return moe.routed_experts(x * 2, None, None, torch.tensor([1, 0, 0, 0]))

    torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False).backward()
    assert loads.tokens.tolist() == [[1, 0, 0, 0]]


def test_the_seams():
    """What the adapter overrides or copies of torchtitan, as it was when that was written."""
    seams = {
        "_forward_backward_body": "self inputs labels global_valid_tokens extra_kwargs",
        "train_step": "self data_iterator",
        "train": "self",
        "init_distributed": "self",
        "pp_forward_backward_step": "self input_dict_mbs label_mbs global_valid_tokens",
        "post_dataloading_process": "self input_dict labels",
    }
    for name, parameters in seams.items():
        for owner in (Trainer, HoldfastTrainer):
            assert " ".join(inspect.signature(inspect.unwrap(getattr(owner, name))).parameters) == parameters
    body = inspect.getsource(Trainer._forward_backward_body)
    copied = (
        "self.train_context()",
        "self.model_parts[0](inputs, **extra_kwargs)",
        "loss_kwargs",
        "loss.backward()",
    )
    places = [body.index(part) for part in copied]
    assert places == sorted(places)
    assert "distribute_tensor(new_buf, mesh, list(placements))" in inspect.getsource(titan_modules)
    with built_alone():
        assert titan_modules.distribute_tensor.keywords == {"src_data_rank": None}
    assert titan_modules.distribute_tensor is torch.distributed.tensor.distribute_tensor
    assert "if torch.distributed.is_initialized():" in inspect.getsource(dist_utils.init_distributed)
    assert "ParallelDims.from_config(config.parallelism, world_size)" in inspect.getsource(
        Trainer.init_distributed
    )
    assert "if parallel_dims.world_size == 1:" in inspect.getsource(dist_utils.set_determinism)


def test_the_seams_of_a_pipeline():
    """A stage is made by this name, with these arguments; its loss is a sum, divided by what it is given."""
    made = inspect.getsource(titan_pipelines._pipeline_module_split)
    call = made[made.index("stage = PipelineStage(") :]
    assert "model_chunk,stage_idx,num_stages,device,group=" in "".join(call.split())
    built = inspect.getsource(titan_pipelines._build_pipeline_schedule)
    assert built.count("scale_grads=False") == 2
    assert "loss, _ = loss_fn(*args, **kwargs)" in built
    assert 'loss_kwargs = {"global_valid_tokens": global_valid_tokens}' in inspect.getsource(
        Trainer.pp_forward_backward_step
    )
    config, before = llama(**STAGES), titan_pipelines.PipelineStage
    with stages_that_say_their_shapes(config):
        assert titan_pipelines.PipelineStage is not before
    assert titan_pipelines.PipelineStage is before


def test_the_meshes_of_a_pipeline_have_the_runs_order():
    """Shards outside, stages inside: torchtitan's own order is the other way round."""
    made = inspect.getsource(titan_dims.ParallelDims.build_mesh)
    assert 'init_device_mesh(device_type,(self.world_size,),mesh_dim_names=("world",))' in "".join(
        made.split()
    )
    assert '("pp", "batch", "cp", "tp"),\n' in made
    before = titan_dims.init_device_mesh
    with numbered_by_shards(refusals.Row(shard=2, context=1, tensor=1)):
        assert titan_dims.init_device_mesh is before
    given = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "DeviceMesh", lambda kind, order, **names: given.append(order.tolist()))
        with numbered_by_shards(refusals.Row(shard=3, context=1, tensor=1, stage=2)):
            titan_dims.init_device_mesh("cpu", (6,), mesh_dim_names=("world",))
    assert given == [[0, 2, 4, 1, 3, 5]]
    assert titan_dims.init_device_mesh is before
