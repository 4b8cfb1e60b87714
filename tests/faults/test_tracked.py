"""`run --track` and `--notify`: processes beside the job, which end with it and cost it nothing when they fail."""

from __future__ import annotations

import json

import pytest
from harness import HERE, run
from servers import listener


@pytest.mark.long
def test_a_job_is_tracked_until_its_end_through_the_loss_of_its_coordinator(tmp_path):
    target = ["--track", f"jsonl:{tmp_path / 'out.jsonl'}"]
    faults = ["--fault", "kill-worker:rank=1,step=20", "--fault", "kill-coordinator:step=40"]
    ran = run(tmp_path, "--nnodes", 2, *target, *faults, HERE / "train_logging.py", 80, 0.01)
    assert ran.code == 0, ran.output
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [x["step"] for x in lines if x["kind"] == "step"] == list(range(80))
    assert [x["event"] for x in lines if x["kind"] == "event"][-1] == "ended"
    assert not (ran.job_dir / "logs" / "followers.log").read_text()


@pytest.mark.long
def test_a_job_that_fails_tells_people_and_a_tracker_that_fails_costs_nothing(tmp_path):
    lost = tmp_path / "a file"
    lost.touch()
    with listener() as hook:
        (tmp_path / "url").write_text(hook.url)
        options = ["--track", f"jsonl:{lost}/out", "--notify", f"webhook:{tmp_path / 'url'}"]
        fails = ["--max-restarts", 0, "--fault", "kill-worker:rank=0,step=10"]
        ran = run(tmp_path, "--nnodes", 1, *options, *fails, HERE / "train_logging.py", 20, 0.001)
    assert ran.report["outcome"] == "failed"
    [told] = [m for body in hook.bodies for m in json.loads(body)["matters"]]
    assert (told["key"], told["command"]) == ("ended", "holdfast report --job job")
    assert "`holdfast track` ended with exit code 1: see" in ran.output
    assert "a file" in (ran.job_dir / "logs" / "followers.log").read_text()


def test_a_target_that_cannot_be_used_is_refused_before_anything_starts(tmp_path):
    ran = run(tmp_path, "--track", "jsonlines:x", HERE / "train_logging.py", 20, 0.001)
    assert ran.code == 2
    assert "must be jsonl:PATH" in ran.output
    assert not (tmp_path / "jobs").exists()
