"""`python -m bench.adapters`: what it says of its figures, and its smallest form."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from bench.adapters.__main__ import options, verdicts
from bench.recovery.analyse import Recovery
from bench.recovery.harness import Measured

ROOT = Path(__file__).parents[2]


def measured(name, stalls, steps=(), plain=()):
    recoveries = [Recovery(stall_s=s, full_s=2 * s, new_work_s=s, lost_steps=0) for s in stalls]
    row = Measured(name=name, title=name, note="", recoveries=recoveries)
    row.step_s, row.plain_step_s = list(steps), list(plain)
    return row


def test_the_aims_are_judged_against_rows_of_the_same_run():
    rows = [
        measured("holdfast-2", [0.5, 0.5, 0.9]),
        measured("holdfast-lightning", [0.54, 0.5, 0.56], [1.04, 2.06, 1.0], [1.0, 2.0, 1.0]),
        measured("torchrun-lightning", [5.4]),
    ]
    assert verdicts(rows) == [
        "Lightning, step: 1.030 of one without; aim <=1.03: met",
        "Lightning, stall: 1.08 of a loop with hf.Run; aim <=1.1: met; torchrun 10.0 times as long",
        "Lightning, full strength: 1.08 of a loop with hf.Run; aim <=1.1: met; torchrun 10.0 times as long",
    ]
    rows[1].recoveries[0] = rows[1].recoveries[1] = rows[1].recoveries[2]
    assert "1.12 of a loop with hf.Run; aim <=1.1: MISSED" in verdicts(rows)[1]


def test_a_row_without_figures_meets_nothing():
    rows = [measured("holdfast-2", []), measured("holdfast-transformers", [0.5])]
    assert verdicts(rows) == [
        "Hugging Face's Trainer, stall: no figure",
        "Hugging Face's Trainer, full strength: no figure",
    ]


@pytest.mark.parametrize("wrong", [["--frameworks", "keras"], ["--faults", "0"], ["--workers", "1"]])
def test_bad_input_is_refused(wrong):
    with pytest.raises(SystemExit) as left:
        options(wrong)
    assert left.value.code == 2


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("framework", ["transformers", "lightning"])
def test_the_smallest_form(tmp_path, framework):
    """One fault for each row, and one pair of blocks."""
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "bench.adapters", "--frameworks", framework, "--json", str(out)]
    command += ["--faults", "1", "--blocks", "1", "--steps", "2", "--settle-s", "1", "--timeout-s", "200"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = {row["name"]: row for row in json.loads(out.read_text())["rows"]}
    assert list(rows) == ["holdfast-2", f"holdfast-{framework}", f"torchrun-{framework}"]
    for row in rows.values():
        assert [recovery["full_s"] > 0 for recovery in row["recoveries"]] == [True]
    for name in ("holdfast-2", f"holdfast-{framework}"):
        assert rows[name]["recoveries"][0]["lost_steps"] == 0
        assert len(rows[name]["step_ratios"]) == 1
