"""What the workers of a training wrote when they came to its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def ends(folder: Path) -> list[dict]:
    return [json.loads(file.read_text()) for file in sorted(folder.glob("end-*.json"))]


def by_itself(folder: Path, *arguments: object) -> dict:
    """By one process, without a job."""
    folder.mkdir(exist_ok=True)
    env = dict(os.environ, OMP_NUM_THREADS="1")
    command = [sys.executable, *map(str, arguments)]
    subprocess.run(command, env=env, check=True, capture_output=True, timeout=200)
    (end,) = ends(folder)
    return end
