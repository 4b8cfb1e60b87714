"""What the workers of a training wrote when they came to its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

LIMIT_S = 800.0
"""For a training or a job of these tests: it ends those that hang, and judges none by its time. Where a machine does the work of
four, importing a framework alone takes a minute."""


def ends(folder: Path) -> list[dict]:
    return [json.loads(file.read_text()) for file in sorted(folder.glob("end-*.json"))]


def by_itself(folder: Path, *arguments: object) -> dict:
    """By one process, without a job."""
    folder.mkdir(exist_ok=True)
    env = dict(os.environ, OMP_NUM_THREADS="1")
    command = [sys.executable, *map(str, arguments)]
    ran = subprocess.run(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S
    )
    assert ran.returncode == 0, ran.stdout[-3000:]
    (end,) = ends(folder)
    return end
