"""DeepSpeed at level 1: a killed training goes on from its newest snapshot, bit by bit.

`tests/adapters/with-version.sh deepspeed==0.19.8` runs these in an environment of their own.
"""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from ends import ends
from gate import KILLED_AT
from killed import killed_and_gone_on, train, two_ranks

from holdfast.adapters.versions import DEEPSPEED
from holdfast.errors import UsageError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its own, of this version of torch
    deepspeed = pytest.importorskip("deepspeed")

from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine

from holdfast.adapters.deepspeed.snapshots import Snapshots

SCRIPT = Path(__file__).parent / "train_deepspeed.py"
STEPS = 12

pytestmark = [pytest.mark.timeout(900), pytest.mark.framework("deepspeed")]


@pytest.mark.nightly
@pytest.mark.capability("level 1")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_killed_training_goes_on(tmp_path, stage):
    undisturbed = tmp_path / "undisturbed"
    assert train(SCRIPT, undisturbed, 0, stage) == 0
    (wanted,) = ends(undisturbed)
    assert wanted["steps"] == STEPS
    assert killed_and_gone_on(SCRIPT, tmp_path / "killed", 7, stage) == [{**wanted, "began": 7}]


@pytest.mark.nightly
@pytest.mark.capability("level 1", "sharded", "kill")
@pytest.mark.parametrize("stage", [2])
def test_partitions_of_ranks_go_on_together(tmp_path, monkeypatch, stage):
    undisturbed, killed, _ = two_ranks(tmp_path, monkeypatch, SCRIPT, 0, stage)
    (began,) = {end["began"] for end in killed}
    assert 0 < began < KILLED_AT
    assert killed == [{**end, "began": began} for end in undisturbed]


def engine(**more):
    no = {"has_moe_layers": False, "zero_nvme_offload_optimizer": lambda: False}
    return SimpleNamespace(**{**no, "load_universal_checkpoint": lambda: False, **more})


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"has_moe_layers": True}, "experts"),
        ({"is_pipe_partitioned": True}, "PipelineEngine"),
        ({"zero_nvme_offload_optimizer": lambda: True}, "NVMe"),
        ({"load_universal_checkpoint": lambda: True}, "load_universal"),
    ],
)
def test_what_is_not_all_in_an_engines_files_is_refused(more, what):
    with pytest.raises(UsageError, match=f"{what}.*engine.save_checkpoint"):
        Snapshots(engine(**more), every=1)


@pytest.mark.capability("resize", refused=True)
def test_a_snapshot_of_another_number_of_ranks_is_refused(monkeypatch):
    snapshots = Snapshots(engine(world_size=2), every=1)

    def load(state, own):
        state["ranks"].load_state_dict(1)
        return 5

    monkeypatch.setattr(snapshots._saver, "load", load)
    with pytest.raises(UsageError, match="of step 5 was made by 1 ranks, but now there are 2"):
        snapshots.newest()


def test_a_version_that_is_not_supported_is_refused():
    with pytest.raises(UsageError, match=r"pip install 'deepspeed>=0\.19,<0\.20'"):
        DEEPSPEED.check("0.18.9", "Snapshots")


def test_the_seams():
    """What is replaced while an engine saves or loads, and what it asks for."""
    assert {"create", "save", "load", "commit", "makedirs"} <= set(dir(CheckpointEngine))
    saving = "".join(
        inspect.getsource(getattr(DeepSpeedEngine, name))
        for name in ("save_checkpoint", "_save_checkpoint", "_save_zero_checkpoint")
    )
    for part in (
        "self.save_non_zero_checkpoint",
        "self.checkpoint_engine.save(",
        "self._copy_recovery_script(",
    ):
        assert part in saving
    loading = inspect.getsource(DeepSpeedEngine._get_all_zero_checkpoint_state_dicts)
    assert "self.checkpoint_engine.load(" in loading
    assert (
        "SDLoaderFactory.get_sd_loader(ckpt_list, checkpoint_engine=self.checkpoint_engine)"
        in inspect.getsource(DeepSpeedEngine._load_checkpoint)
    )
