"""What the core decides is what was recorded: a sample of `make golden`."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_the_core_decides_what_was_recorded(tmp_path):
    compare = [sys.executable, HERE / "golden.py", "compare", HERE / "golden.txt", "12"]
    ran = subprocess.run(compare, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, "0 of 28 schedules are decided otherwise\n"), ran.stdout


def test_a_decision_that_is_another_is_named(tmp_path):
    lines = (HERE / "golden.txt").read_text().splitlines()
    (tmp_path / "golden.txt").write_text(lines[0].replace(lines[0].split()[1], "0" * 16))
    compare = [sys.executable, HERE / "golden.py", "compare", tmp_path / "golden.txt", "1"]
    ran = subprocess.run(compare, capture_output=True, text=True)
    assert ran.returncode == 1
    assert "decided otherwise: seed 0\n" in ran.stdout
    assert ran.stdout.endswith("1 of 1 schedules are decided otherwise; 2 others have no record\n")
