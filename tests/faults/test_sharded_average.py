"""The way of an average of sharded weights that the page on sharded models has, through a kill."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from harness import run

SCRIPT = Path(__file__).with_name("train_sharded_average.py")


def averages(text):
    return [[float(x) for x in line.split()[1:]] for line in text.splitlines() if line.startswith("average ")]


@pytest.mark.long
def test_an_average_of_sharded_weights_is_that_of_whole_ones(tmp_path):
    done = subprocess.run(
        [sys.executable, SCRIPT, "whole"], capture_output=True, text=True, check=True, timeout=100
    )
    (whole,) = averages(done.stdout)
    ran = run(
        tmp_path, "--nnodes", 4, "--spares", 1, "--fault", "kill-worker:rank=1,step=9", SCRIPT, "sharded"
    )
    assert ran.report["outcome"] == "finished", ran.output[-3000:]
    found = [line for log in tmp_path.glob("**/logs/**/*.log") for line in averages(log.read_text())]
    assert len(found) == 4
    assert all(one == found[0] for one in found)
    assert found[0] == pytest.approx(whole, rel=1e-4)
