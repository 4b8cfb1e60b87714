"""Megatron-Bridge at level 1: a killed training goes on from its newest snapshot, bit by bit.

`tests/adapters/with-version.sh megatron-bridge==0.3.1` runs these in an environment of their own. There is no GPU and no Transformer
Engine: what `megatron_on_cpu` stands for is not tested, and everything else is Megatron's own.
"""

from __future__ import annotations

import inspect
import io
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ends import ends
from gate import KILLED_AT
from killed import killed_and_gone_on, train, two_ranks

from holdfast.adapters.versions import MEGATRON_BRIDGE
from holdfast.errors import StateError, UsageError

pytest.importorskip("megatron.core")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what is not here
    import megatron_on_cpu  # noqa: F401 - before Megatron-Bridge
    from megatron.bridge.training import checkpointing, setup
    from megatron.bridge.training import train as loop
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
    from megatron.core.dist_checkpointing.tensor_aware_state_dict import MCoreTensorAwareStateDict

    from holdfast.adapters.megatron_bridge import snapshots

SCRIPT = Path(__file__).parent / "train_megatron_bridge.py"
STEPS = 12

pytestmark = [pytest.mark.timeout(900), pytest.mark.framework("megatron-bridge")]


@pytest.mark.nightly
@pytest.mark.capability("level 1")
def test_a_killed_training_goes_on(tmp_path):
    undisturbed = tmp_path / "undisturbed"
    assert train(SCRIPT, undisturbed, 0) == 0
    (wanted,) = ends(undisturbed)
    assert wanted["steps"] == STEPS
    (end,) = killed_and_gone_on(SCRIPT, tmp_path / "killed", 7)
    assert end == {**wanted, "began": 7, "losses": wanted["losses"][7:]}


@pytest.mark.nightly
@pytest.mark.capability("level 1", "sharded", "kill")
def test_ranks_that_share_an_optimizer_go_on_together(tmp_path, monkeypatch):
    undisturbed, killed, _ = two_ranks(tmp_path, monkeypatch, SCRIPT, 0)
    (began,) = {end["began"] for end in killed}
    assert 0 < began < KILLED_AT
    assert killed == [{**end, "began": began, "losses": end["losses"][began:]} for end in undisturbed]


def config(**more):
    checkpoint = {"save": "own", "ckpt_format": "torch_dist", "replication": True, "finetune": False}
    checkpoint["pretrained_checkpoint"] = None
    for name in [name for name in more if name in checkpoint]:
        checkpoint[name] = more.pop(name)
    defaults = {
        "checkpoint": SimpleNamespace(**checkpoint),
        "peft": None,
        "optimizer": SimpleNamespace(optimizer="adam"),
    }
    return SimpleNamespace(**{**defaults, **more})


@pytest.fixture
def own(monkeypatch):
    """Bridge's function, which is there again when the test is over."""

    def function(given):
        return {"of": given}

    monkeypatch.setattr(setup, "init_checkpointing_context", function)
    return function


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"save": None}, "checkpoint.save is not set"),
        ({"ckpt_format": "fsdp_dtensor"}, "ckpt_format is 'fsdp_dtensor'.*only for 'torch_dist'"),
        ({"peft": object()}, "with peft; do not call save_snapshots"),
        ({"pretrained_checkpoint": "base"}, "pretrained_checkpoint or finetune.*without the optimizer"),
        ({"finetune": True}, "pretrained_checkpoint or finetune.*without the optimizer"),
        ({"optimizer": SimpleNamespace(optimizer="dist_muon")}, "dist_muon writes files"),
    ],
)
def test_what_bridge_keeps_in_no_local_checkpoint_is_refused(own, more, what):
    wrong = config(**more)
    with pytest.raises(UsageError, match=what):
        snapshots.save_snapshots(wrong, every=1)
    assert setup.init_checkpointing_context is own
    assert not hasattr(wrong.checkpoint, "non_persistent_ckpt_type")


def test_only_the_given_configuration_has_snapshots(own):
    ours, other = config(), config()
    snapshots.save_snapshots(ours, every=50)
    assert (ours.checkpoint.non_persistent_save_interval, ours.checkpoint.replication) == (50, False)
    assert isinstance(
        setup.init_checkpointing_context(ours.checkpoint)[snapshots.MANAGER], snapshots.MegatronSnapshots
    )
    assert setup.init_checkpointing_context(other.checkpoint) == {"of": other.checkpoint}


@pytest.fixture
def group():
    """Megatron asks all ranks what they have."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class Tier:
    """Keeps what was saved last."""

    def __init__(self):
        self.saved = None

    def save(self, state, step):
        self.saved = step, {name: kept.value for name, kept in state.items()}

    def load(self, state):
        if self.saved is None:
            return None
        for name, kept in state.items():
            kept.value = self.saved[1][name]
        return self.saved[0]


def part(key, data):
    return ShardedTensor.from_rank_offsets(key, data)


def test_a_state_is_filled_into_the_running_model(group):
    tier = Tier()
    manager = snapshots.MegatronSnapshots(tier)
    assert manager.find_latest() == -1
    numel = {(torch.bfloat16, torch.float32): [7]}
    random = [{"numpy": np.arange(3, dtype=np.uint32), "python": (3, (1, 2), None)}]
    state, _ = MCoreTensorAwareStateDict.from_state_dict(
        {
            "model": {"weight": part("weight", torch.arange(4.0))},
            "numel": ShardedObject("numel", numel, (1,), (0,)),
            "random": ShardedObject("random", random, (1,), (0,)),
            "extra": ShardedObject("extra", io.BytesIO(b"scales"), (1,), (0,)),
            "iteration": 7,
        },
        algo="atomic",
    )
    assert manager.save(state, 7) is None
    assert manager.save(state, 7, is_async=True).async_fn is None

    template = {
        "model": {"weight": part("weight", torch.zeros(4))},
        "numel": ShardedObject("numel", None, (1,), (0,)),
        "random": ShardedObject("random", None, (1,), (0,)),
        "extra": ShardedObject("extra", None, (1,), (0,)),
    }
    again = snapshots.MegatronSnapshots(tier)
    assert again.find_latest() == again.find_latest() == 7
    loaded, name = again.load()
    assert "7" in name
    filled = loaded.to_state_dict(template, algo="atomic", validate_access_integrity=False)
    assert filled["iteration"] == 7
    assert torch.equal(filled["model"]["weight"], torch.arange(4.0))
    assert filled["numel"] == numel
    assert filled["extra"].getvalue() == b"scales"
    assert filled["random"][0]["python"] == random[0]["python"]
    assert filled["random"][0]["numpy"].dtype == np.uint32
    assert filled["random"][0]["numpy"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("key", "data", "what"),
    [
        ("bias", torch.zeros(4), "has no bias .*another model"),
        ("weight", torch.zeros(5), r"weight is \(4,\) torch.float32, but the model's is \(5,\)"),
        ("weight", torch.zeros(4, dtype=torch.bfloat16), "another model"),
    ],
)
def test_a_state_of_another_model_is_refused(group, key, data, what):
    tier = Tier()
    state, _ = MCoreTensorAwareStateDict.from_state_dict(
        {"weight": part("weight", torch.ones(4))}, algo="atomic"
    )
    snapshots.MegatronSnapshots(tier).save(state, 3)
    manager = snapshots.MegatronSnapshots(tier)
    manager.find_latest()
    with pytest.raises(StateError, match=what):
        manager.load()[0].to_state_dict(
            {key: part(key, data)}, algo="atomic", validate_access_integrity=False
        )


@pytest.mark.capability("resize", refused=True)
def test_a_snapshot_of_another_number_of_ranks_is_refused():
    tier = Tier()
    tier.saved = 5, {"megatron": {"common": {}, "tensors": {}, "objects": {}}, "ranks": 4}
    with pytest.raises(UsageError, match="of iteration 5 was made by 4 ranks, but now there are 1; start 4"):
        snapshots.MegatronSnapshots(tier).find_latest()


def test_a_version_that_is_not_supported_is_refused():
    with pytest.raises(UsageError, match=r"pip install 'megatron-bridge>=0\.3,<0\.4'"):
        MEGATRON_BRIDGE.check("0.5.0", "save_snapshots")


def test_the_seams():
    """Where Bridge makes, asks and loads its keeper of local checkpoints, and when it saves one."""
    made = inspect.getsource(setup.setup)
    assert "checkpointing_context = init_checkpointing_context(cfg.checkpoint)" in made
    assert '["local_checkpoint_manager"].find_latest() != -1' in made
    saving = inspect.getsource(checkpointing.save_checkpoint)
    for part_of_it in (
        'save_dir = checkpointing_context["local_checkpoint_manager"].local_ckpt_dir',
        'async_save_request = checkpointing_context["local_checkpoint_manager"].save(',
        "state_dict_for_save, train_state.step, is_async=bool(ckpt_cfg.async_save)",
    ):
        assert part_of_it in saving
    loading = inspect.getsource(checkpointing._load_non_persistent_base_checkpoint)
    assert 'checkpointing_context["local_checkpoint_manager"].load()' in loading
    assert "intermediate_state_dict.to_state_dict(" in loading
    assert "non_persistent_save_interval" in inspect.getsource(loop.checkpoint_and_decide_exit)
    assert "self._insert_sharded_data(" in inspect.getsource(MCoreTensorAwareStateDict.to_state_dict)
