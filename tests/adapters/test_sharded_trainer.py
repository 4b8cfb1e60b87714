"""Hugging Face's Trainer with a model that transformers shards over the workers of a replica."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from ends import LIMIT_S, by_itself, ends
from harness import Ran, run, shared
from transformers import TrainingArguments
from transformers.distributed import DistributedConfig

from holdfast.adapters.huggingface import sharded
from holdfast.errors import UsageError

SCRIPT = Path(__file__).parent / "train_sharded_trainer.py"
STEPS = 18

pytestmark = [pytest.mark.timeout(900), pytest.mark.framework("transformers")]
DEALT = hasattr(DistributedConfig, "efsdp_size")
"""Whether this version deals experts over workers with samples of their own: from 5.21 on or later."""
KINDS = {
    "dense": (2,),
    "experts": (2, "--experts", 4),
    "tensor": (1, "--tensor", 2),
    "both": (2, "--tensor", 2),
}
"""Shards, and what else is dealt over a replica."""
REPLICA = {"both": 4}
TENSOR = [pytest.param("tensor", marks=pytest.mark.nightly), pytest.param("both", marks=pytest.mark.nightly)]
EXPERTS = pytest.param(
    "experts", marks=[pytest.mark.nightly, pytest.mark.skipif(not DEALT, reason="an older version")]
)


def in_a_job(home: Path, kind: str, *options: object) -> Ran:
    """By replicas of two workers, or four."""
    ran = run(home, *options, SCRIPT, home / "out", *KINDS[kind], timeout=LIMIT_S)
    assert ran.code == 0, ran.output
    return ran


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """By one replica."""

    def of(kind: str) -> Ran:
        name = f"sharded-trainer-{kind}"
        return shared(
            tmp_path_factory, name, lambda home: in_a_job(home, kind, "--nnodes", REPLICA.get(kind, 2))
        )

    return of


def check(home: Path, ran: Ran, wanted: Ran) -> None:
    assert ran.losses() == wanted.losses()
    for what in ("params_xxh3", "state_xxh3"):
        assert ran.report["final"][what] == wanted.report["final"][what]
    assert ran.report["final"]["replicas_equal"] is True
    first, *others = [{**end, "parameters": "", "shard": 0} for end in ends(home / "out")]
    assert others
    assert all(end == first for end in others)  # also a newcomer's logs
    assert first["steps"] == STEPS


@pytest.mark.long
@pytest.mark.capability("sharded", "kill")
@pytest.mark.parametrize("kind", [pytest.param("dense", marks=pytest.mark.nightly), EXPERTS, *TENSOR])
def test_a_killed_worker_and_a_newcomer_change_nothing(tmp_path, undisturbed, kind):
    fault = ("--fault", "kill-worker:rank=1,step=8,phase=backward")
    nodes = ("--nnodes", 2 * REPLICA.get(kind, 2), "--spares", 1)
    check(tmp_path, in_a_job(tmp_path, kind, *nodes, *fault), undisturbed(kind))


@pytest.mark.nightly
@pytest.mark.capability("sharded", "kill")
@pytest.mark.parametrize("phase", ["forward", "reduce", "vote", "update", "commit"])
def test_a_kill_in_any_phase(tmp_path, undisturbed, phase):
    fault = ("--fault", f"kill-worker:rank=2,step=7,phase={phase}")
    check(tmp_path, in_a_job(tmp_path, "dense", "--nnodes", 4, "--spares", 1, *fault), undisturbed("dense"))


@pytest.mark.nightly
@pytest.mark.capability("sharded", "resize")
def test_a_job_that_gets_smaller(tmp_path, undisturbed):
    """Of both replicas one worker is lost, of different shards: the two others become one replica."""
    faults = [x for node in (0, 3) for x in ("--fault", f"kill-node:node={node},step=5")]
    ran = in_a_job(tmp_path, "dense", "--nnodes", "2:4", *faults)
    assert 2 in {world for _, world in ran.report["world"]["history"]}
    check(tmp_path, ran, undisturbed("dense"))


@pytest.mark.nightly
@pytest.mark.capability("sharded")
@pytest.mark.parametrize("kind", ["dense", EXPERTS, *TENSOR])
def test_the_sharded_model_trains_what_a_whole_one_trains(tmp_path, undisturbed, kind):
    """But for the last bits: within a replica, sums have another order."""
    whole = by_itself(tmp_path, SCRIPT, tmp_path, 1, *(KINDS[kind][1:] if kind == "experts" else ()))
    losses = [logs["loss"] for logs in whole["history"] if "loss" in logs]
    norms = [logs["grad_norm"] for logs in whole["history"] if "grad_norm" in logs]
    (end, *_) = ends(undisturbed(kind).job_dir.parents[1] / "out")
    assert [logs["loss"] for logs in end["history"] if "loss" in logs] == pytest.approx(losses, rel=1e-5)
    assert [logs["grad_norm"] for logs in end["history"] if "grad_norm" in logs] == pytest.approx(
        norms, rel=1e-4
    )


def trainer(tmp_path, distributed=True, config=(), **arguments):
    config = {
        "tp_size": 1,
        "fsdp_size": 2,
        "pp_size": 1,
        "dp_replicate_size": 1,
        "fsdp_cpu_offload": False,
        **dict(config),
    }
    given = {"save_strategy": "no", "use_cpu": True, **arguments}
    return SimpleNamespace(
        args=TrainingArguments(output_dir=str(tmp_path), report_to="none", **given),
        model=SimpleNamespace(
            is_distributed_loading_by_transformers=distributed,
            config=SimpleNamespace(distributed_config=SimpleNamespace(**config)),
        ),
    )


class Meshed:
    """Stands for a run."""

    def __init__(self, sharded: bool) -> None:
        self.sharded, self.replicated = sharded, []

    def mesh(self, shard, tensor) -> None:
        if (shard, tensor) != (2, 1):
            raise UsageError("run.mesh() was already called with shard=2, tensor=1")

    def replicate(self, model) -> None:
        self.replicated.append(model)


def test_a_sharded_model_is_connected_to_the_sum_over_replicas(tmp_path):
    mine, run = trainer(tmp_path), Meshed(True)
    sharded.join(run, mine)
    assert run.replicated == [mine.model]


def test_a_whole_model_is_as_before(tmp_path):
    run = Meshed(False)
    sharded.join(run, trainer(tmp_path, distributed=False, save_strategy="epoch"))
    sharded.refuse_saving(trainer(tmp_path, distributed=False).model)
    assert run.replicated == []


@pytest.mark.parametrize(
    ("meshed", "distributed", "words"),
    [
        (True, False, r"from_pretrained\(folder, distributed_config="),
        (False, True, r"call run\.mesh\(shard=N\) before"),
    ],
)
def test_one_of_the_two_lines_alone_is_refused(tmp_path, meshed, distributed, words):
    with pytest.raises(UsageError, match=words):
        sharded.join(Meshed(meshed), trainer(tmp_path, distributed=distributed))


@pytest.mark.parametrize(
    ("config", "arguments", "words"),
    [
        ({"pp_size": 2}, {}, "pp_size=2"),
        ({"tp_size": 2}, {}, "use 5.24"),
        (
            {"fsdp_size": 4},
            {},
            r"needs run\.mesh\(shard=4, tensor=1\): run\.mesh\(\) was already called with shard=2",
        ),
        ({"dp_replicate_size": 2}, {}, "dp_replicate_size=2"),
        ({"fsdp_cpu_offload": True}, {}, "fsdp_cpu_offload"),
        ({}, {"eval_strategy": "epoch"}, 'eval_strategy="no"'),
        ({}, {"save_strategy": "steps"}, 'save_strategy="no"'),
        ({}, {"fp16": True}, "bf16=True"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path, config, arguments, words):
    run = Meshed(True)
    with pytest.raises(UsageError, match=words):
        sharded.join(run, trainer(tmp_path, config=config, **arguments))
    assert not run.replicated


def test_all_that_cannot_work_is_named_at_once(tmp_path):
    with pytest.raises(UsageError) as refused:
        sharded.join(Meshed(True), trainer(tmp_path, config={"pp_size": 2}, eval_strategy="epoch"))
    assert "pp_size" in str(refused.value)
    assert "eval_strategy" in str(refused.value)
    with pytest.raises(UsageError, match="holdfast checkpoint export"):
        sharded.refuse_saving(trainer(tmp_path).model)
