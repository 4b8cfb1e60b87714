"""Code after the loop runs only where training reached its end."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from harness import finish, start, wait_for

SCRIPT = Path(__file__).with_name("train_loop_ends.py")


@pytest.mark.parametrize("how", ["fails", "stops", "ends"])
def test_what_stands_after_the_loop_has_a_trained_model(how, tmp_path):
    process = start(tmp_path, "--nnodes", 2, SCRIPT, how)
    if how == "stops":
        wait_for(process, "generation 1")
        process.send_signal(signal.SIGTERM)
    ran = finish(process, tmp_path)
    assert ran.report["outcome"] == {"fails": "failed", "stops": "stopped", "ends": "finished"}[how]
    assert ran.code == {"fails": 1, "stops": 75, "ends": 0}[how]
    logs = [log.read_text() for log in tmp_path.glob("**/logs/**/*.log")]
    assert logs
    for line in ("PAST THE LOOP", "PAST THE RUN"):
        assert sum(line in log for log in logs) == (2 if how == "ends" else 0)
    left = [log for log in logs if "leaves by an error, stopped True" in log]
    # A worker whose script failed may be ended by its agent, to be started anew, before the job is given up.
    assert len(left) in {"fails": (1, 2), "stops": (2,), "ends": (0,)}[how]
    assert all("holdfast: training ends after" in log for log in left)
    assert not any("Traceback" in log for log in logs if how == "stops")
    if how == "fails":
        assert (
            "a bug of the script" in ran.report["reason"]
            or "the same error at step 3" in ran.report["reason"]
        )
