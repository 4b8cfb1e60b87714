"""`train(resume_from_checkpoint=...)`, as scripts write it for a restart of torchrun."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ends import LIMIT_S
from harness import run

SCRIPT = Path(__file__).with_name("train_resumed.py")


@pytest.mark.long
def test_a_newcomer_ignores_what_the_job_itself_has_written_and_another_job_is_refused(tmp_path, monkeypatch):
    folder = tmp_path / "out"
    monkeypatch.setenv("OUT", str(folder))
    ran = run(
        tmp_path,
        "--nnodes",
        2,
        "--spares",
        1,
        "--fault",
        "kill-worker:rank=1,step=13",
        SCRIPT,
        timeout=LIMIT_S,
    )
    assert ran.report["outcome"] == "finished", ran.output[-3000:]
    assert json.loads((folder / "checkpoint-24" / "holdfast_job.json").read_text()) == {"job": "job"}
    logs = [log.read_text() for log in tmp_path.glob("**/logs/**/*.log")]
    assert sum("trained 24" in log for log in logs) == 2
    assert any("is ignored: this job wrote that checkpoint" in log for log in logs)
    other = run(tmp_path, "--nnodes", 1, SCRIPT, job="other", timeout=LIMIT_S)
    assert other.report["outcome"] == "failed"
    assert "resume_from_checkpoint" in other.output
