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

from holdfast.errors import DataError, UsageError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its own, of this version of torch
    pytest.importorskip("torchtitan")
    from torchtitan.config import ConfigManager
    from torchtitan.distributed import utils as dist_utils
    from torchtitan.trainer import Trainer

    from holdfast import titan
    from holdfast.adapters.torchtitan import refusals, streams
    from holdfast.adapters.torchtitan.trainer import HoldfastTrainer, as_holdfast, keep_as_it_lies

SCRIPT = Path(__file__).parent / "titan_cpu.py"
STEPS = 6
OPTIONS = f"""--module llama3 --config llama3_debugmodel --training.steps {STEPS} --training.seq_len 64
--training.local_batch_size 1 --training.global_batch_size 4 --holdfast.reduction exact
--parallelism.data_parallel_shard_degree 2 --parallelism.spmd_backend partial_dtensor""".split()

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


def job(home, folder, name, *options):
    """What a job with these options of `holdfast run` ended as."""
    environment = os.environ | {
        "HOLDFAST_HOME": str(home),
        "HF_HOME": str(home / "hf"),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "holdfast", "run", "--no-ui", "--job", name]
    command += ["--report", home / f"{name}.json", *options, SCRIPT, folder, *OPTIONS]
    ran = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stdout[-3000:]
    return json.loads((home / f"{name}.json").read_text())


@pytest.mark.nightly
@pytest.mark.capability("level 2", "kill", "resize", "sharded")
def test_a_killed_worker_and_a_lost_node_change_no_bit(tmp_path, folder):
    """FSDP2 in two replicas of two workers, and at last in one."""
    calm = job(tmp_path, folder, "calm", "--nnodes", 2)
    faults = ("--fault", "kill-worker:rank=1,step=2", "--fault", "kill-node:rank=0,step=4")
    struck = job(tmp_path, folder, "struck", "--nnodes", "2:4", *faults)
    assert len(struck["incidents"]) == 2
    assert calm["steps"]["committed"] == struck["steps"]["committed"] == STEPS
    for name in ("loss", "params_xxh3", "state_xxh3"):
        assert struck["final"][name] == calm["final"][name]


def llama(**changes):
    config = as_holdfast(titan.prepared(ConfigManager()._load_config(OPTIONS[:4])[0]))
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


@pytest.mark.capability("level 2", refused=True)
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"parallelism__pipeline_parallel_degree": 2}, "stages of a pipeline"),
        ({"parallelism__data_parallel_replicate_degree": 2}, "replicas are the job's"),
        ({"parallelism__expert_parallel_degree": 2}, "expert_parallel_degree has not been tried"),
        ({"parallelism__context_parallel_degree": 2}, "context_parallel_degree has not been tried"),
        ({"training__disable_cuda_graphs": False}, "--training.disable_cuda_graphs"),
        ({"checkpoint__enable": True}, "holdfast run --checkpoint DIR"),
        ({"comm__mode": "fake_backend"}, "simulates a world"),
    ],
)
def test_what_does_not_work_is_refused_with_a_sentence(change, why):
    with pytest.raises(UsageError, match=why):
        refusals.refuse(llama(**change))


def test_the_workers_of_a_replica_follow_from_the_degrees():
    degrees = {"context_parallel_degree": 1, "tensor_parallel_degree": 2, "data_parallel_shard_degree": -1}
    assert refusals.row_of(SimpleNamespace(**degrees), 8) == (4, 1, 2)
    assert refusals.row_of(SimpleNamespace(**degrees | {"data_parallel_shard_degree": 3}), 8).workers == 6
    with pytest.raises(UsageError, match="do not divide the 3 workers"):
        refusals.row_of(SimpleNamespace(**degrees), 3)


def test_a_stream_gives_the_batch_of_a_step_to_whoever_asks():
    opened = []

    def open_stream(number):
        opened.append(number)
        return (({"input": (number, step)}, step) for step in range(5))

    read = streams.Streams(open_stream, 2)
    assert read.batch(1, 0) == read.batch(1, 0) == ({"input": (1, 0)}, 0)  # a step that comes again
    assert read.batch(1, 3)[1] == 3  # others computed what is between
    assert opened == [1]
    assert read.batch(1, 1)[1] == 1  # an older state
    assert opened == [1, 1]
    with pytest.raises(DataError, match=r"stream 0 of 2 ended after 5 batches"):
        read.batch(0, 5)


def test_hooks_that_rewrite_a_state_are_taken_off_and_others_stay():
    import torch
    from torchtitan.models.common.attention import FusedQKVLinear

    model = torch.nn.Linear(2, 2)
    model.register_state_dict_post_hook(FusedQKVLinear._split_qkv_on_save)
    model.register_load_state_dict_pre_hook(FusedQKVLinear._merge_qkv_on_load)
    model.register_state_dict_post_hook(lambda *args: None)
    keep_as_it_lies(model)
    assert (len(model._state_dict_hooks), len(model._load_state_dict_pre_hooks)) == (1, 0)


def test_a_hook_that_updates_biases_of_experts_is_refused():
    refusals.refuse_hooks(SimpleNamespace(_optimizer_step_pre_hooks={}))
    with pytest.raises(UsageError, match="biases of experts"):
        refusals.refuse_hooks(SimpleNamespace(_optimizer_step_pre_hooks={0: print}))


def test_the_seams():
    """What the adapter overrides or copies of torchtitan, as it was when that was written."""
    seams = {
        "_forward_backward_body": "self inputs labels global_valid_tokens extra_kwargs",
        "train_step": "self data_iterator",
        "train": "self",
        "init_distributed": "self",
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
    assert "if torch.distributed.is_initialized():" in inspect.getsource(dist_utils.init_distributed)
    assert "ParallelDims.from_config(config.parallelism, world_size)" in inspect.getsource(
        Trainer.init_distributed
    )
    assert "if parallel_dims.world_size == 1:" in inspect.getsource(dist_utils.set_determinism)
