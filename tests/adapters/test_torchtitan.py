"""torchtitan at level 1: a killed training goes on from its newest snapshot, bit by bit.

`tests/adapters/with-version.sh torchtitan==0.3.0` runs these in an environment of their own.
"""

from __future__ import annotations

import inspect
import shutil
import warnings
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from ends import ends
from killed import killed_and_gone_on, train

from holdfast.adapters.versions import TORCHTITAN
from holdfast.errors import UsageError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its own, of this version of torch
    pytest.importorskip("torchtitan")
    from torchtitan.components.checkpointer import BaseCheckpointManager, CheckpointManager
    from torchtitan.trainer import Trainer

    from holdfast.adapters.torchtitan.snapshots import Snapshots

SCRIPT = Path(__file__).parent / "train_torchtitan.py"
STEPS = 10

pytestmark = [pytest.mark.timeout(900), pytest.mark.framework("torchtitan")]


@pytest.mark.nightly
@pytest.mark.capability("level 1")
def test_a_killed_training_goes_on(tmp_path):
    """torchtitan's own checkpoint is of step 4, or there is none."""
    assert train(SCRIPT, tmp_path / "undisturbed", 0) == 0
    (wanted,) = ends(tmp_path / "undisturbed")
    assert wanted["steps"] == wanted["batches"] == STEPS
    for step in (7, 3):
        folder = tmp_path / str(step)
        assert killed_and_gone_on(SCRIPT, folder, step) == [{**wanted, "began": step}]


@pytest.mark.nightly
@pytest.mark.capability("level 1")
def test_a_checkpoint_of_its_own_that_is_newer_is_loaded(tmp_path):
    """Snapshots are gone with the machine, and torchtitan's checkpoint of step 4 is not."""
    assert train(SCRIPT, tmp_path / "undisturbed", 0) == 0
    assert train(SCRIPT, tmp_path / "killed", 6) == 9
    shutil.rmtree(tmp_path / "killed" / "saved")
    assert train(SCRIPT, tmp_path / "killed", 0) == 0
    (wanted,) = ends(tmp_path / "undisturbed")
    assert ends(tmp_path / "killed") == [{**wanted, "began": 4}]


def test_stages_of_a_pipeline_are_refused():
    with pytest.raises(UsageError, match="several stages of a pipeline"):
        Snapshots(SimpleNamespace(every=1, to=None), model_parts=[1, 2])


def test_no_number_of_steps_is_refused():
    with pytest.raises(UsageError, match="every=0"):
        Snapshots(SimpleNamespace(every=0, to=None), model_parts=[1])


def test_a_version_that_is_not_supported_is_refused():
    TORCHTITAN.check(metadata.version("torchtitan"), "Snapshots")
    with pytest.raises(UsageError, match=r"pip install 'torchtitan>=0\.3,<0\.4'"):
        TORCHTITAN.check("0.2.2", "Snapshots")


def test_the_seams():
    seams = {"_save": "self curr_step last_step", "_load": "self step"}
    for name, parameters in seams.items():
        for owner in (BaseCheckpointManager, CheckpointManager):
            assert " ".join(inspect.signature(getattr(owner, name)).parameters) == parameters
    assert CheckpointManager._find_load_step(SimpleNamespace(folder="/nowhere")) == -1
    source = inspect.getsource(Trainer.train)
    places = [source.index(part) for part in ("checkpointer.load(", "self.train_step(", "checkpointer.save(")]
    assert places == sorted(places)
    assert "config.checkpoint.build(" in inspect.getsource(Trainer.__init__)
