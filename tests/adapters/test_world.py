"""What the import of an adapter makes of a process."""

from __future__ import annotations

from pathlib import Path

from harness import run

EVALUATE = Path(__file__).parent / "evaluate.py"


def test_a_script_that_trains_nothing_may_end_when_it_likes(tmp_path):
    """It is no member of the job: nobody waits for its first step, and its end is no loss."""
    ran = run(tmp_path, "--nnodes", 2, EVALUATE)
    assert ran.code == 0, ran.output
    assert ran.report["incidents"] == []
