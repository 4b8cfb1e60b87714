"""Ray Train at level 1: workers that Ray starts again go on from the newest snapshot, bit by bit.

`tests/adapters/with-version.sh 'ray[train]==2.60.0'` runs these in an environment of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from ends import LIMIT_S, ends

from holdfast.adapters.versions import RAY
from holdfast.errors import UsageError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its own, of this version of Python
    ray = pytest.importorskip("ray")
    pytest.importorskip("ray.train")

from holdfast.adapters.ray import snapshots

SCRIPT = Path(__file__).parent / "train_ray.py"

pytestmark = [pytest.mark.timeout(900), pytest.mark.framework("ray")]


def train(folder: Path, die_at: int) -> list[dict]:
    folder.mkdir()
    paths = os.pathsep.join([*filter(None, sys.path), str(SCRIPT.parent)])
    env = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=paths, RAY_TRAIN_V2_ENABLED="1")
    command = [sys.executable, str(SCRIPT), str(folder), str(die_at)]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    if ran.returncode and "The current node timed out during startup" in ran.stderr:
        pytest.skip("Ray waits for its own processes for 30 s, and they were not there yet")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ends(folder)


@pytest.mark.nightly
@pytest.mark.capability("level 1", "kill")
def test_a_killed_worker_changes_nothing(tmp_path):
    undisturbed = train(tmp_path / "undisturbed", 0)
    assert [end["began"] for end in undisturbed] == [0, 0]
    assert train(tmp_path / "killed", 7) == [{**end, "began": 6} for end in undisturbed]


def test_outside_of_a_worker_it_is_refused():
    with pytest.raises(UsageError, match="the function that a TorchTrainer runs"):
        snapshots.Snapshots({}, every=1)


def test_a_storage_that_is_no_path_is_refused(monkeypatch):
    storage = SimpleNamespace(storage_filesystem=SimpleNamespace(type_name="s3"))
    monkeypatch.setattr(snapshots.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(
        snapshots.ray.train, "get_context", lambda: SimpleNamespace(get_storage=lambda: storage)
    )
    with pytest.raises(UsageError, match=r"storage is s3; pass Snapshots\(\.\.\., to="):
        snapshots.Snapshots({}, every=1)


def test_a_version_that_is_not_supported_is_refused():
    with pytest.raises(UsageError, match=r"pip install 'ray>=2\.60,<2\.61'"):
        RAY.check("2.9.3", "Snapshots")
