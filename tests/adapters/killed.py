"""A training by one process without a job, whose snapshots go to its folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ends import ends


def train(script: Path, folder: Path, *arguments: object) -> int:
    """Its exit code: scripts of level 1 end themselves with 9 at the step that they are given."""
    folder.mkdir(exist_ok=True)
    env = dict(os.environ, OMP_NUM_THREADS="1", HOLDFAST_CHECKPOINT=f"{folder / 'saved'},every=1,keep=1")
    command = [sys.executable, script, folder, *arguments]
    return subprocess.run([*map(str, command)], env=env, capture_output=True, timeout=200).returncode


def killed_and_gone_on(script: Path, folder: Path, step: int, *arguments: object) -> list[dict]:
    """The ends of a training that ended itself at a step, without an end, and was started again."""
    assert train(script, folder, step, *arguments) == 9
    assert not ends(folder)
    assert train(script, folder, 0, *arguments) == 0
    return ends(folder)
