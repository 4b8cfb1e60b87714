"""Every process of a job writes its own log, at the level that was asked for, and none of them the job's token."""

import os
import re
import subprocess
import sys

import pytest
from harness import run

SCRIPT = """
import logging, os
print("root:", logging.getLogger().handlers, "level:", os.environ["HOLDFAST_LOG"])
logging.getLogger("holdfast").debug("seen at debug", extra={"rank": int(os.environ["RANK"])})
"""


@pytest.mark.long
def test_every_process_logs_and_no_line_has_the_token(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    ran = run(tmp_path, "--nnodes", 2, "--preload", "json", "--log-level", "debug", tmp_path / "script.py")
    assert ran.code == 0, ran.output
    logs = ran.job_dir / "logs"
    said = {str(path.relative_to(logs)): path.read_text() for path in logs.rglob("*.log")}
    started = {name: text for name, text in said.items() if re.search("started a (coordinator|worker)", text)}
    assert sorted(started) == ["agents/node0.log", "agents/node1.log", "launcher.log"]
    assert "msg=serving job=job url=http://127.0.0.1:" in said["coordinator.log"]
    assert "level=debug" in said["coordinator.log"]
    workers = {name: text for name, text in said.items() if name.startswith("node")}
    for rank in (0, 1):
        (text,) = [t for t in workers.values() if f"rank={rank}" in t]
        assert "root: [] level: debug" in text
        assert re.search(f'msg="seen at debug" job=job node=node. worker=node.*#. rank={rank}$', text, re.M)
    token = (ran.job_dir / "token").read_text().strip()
    assert not [name for name, text in said.items() if token in text]
    assert token not in ran.output


def test_a_level_that_does_not_exist_is_refused_before_anything_starts(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    ran = run(tmp_path, "--log-level", "loud", tmp_path / "script.py")
    assert ran.code == 2
    assert (
        "--log-level must be one of debug, info, warning, error, with or without ,json (got 'loud'), for example debug or info,json"
        in ran.output
    )
    assert not ran.job_dir.exists()


TALKS = """
import os, sys
BYTES = 100 << 20
block = b"".join(b"line of a flood\\n" for _ in range(1 << 16))
written = 0
while written < BYTES:
    written += os.write(1, block)
print("flooded", flush=True)
while os.fstat(1).st_blocks * 512 > 16 << 20:  # until its agent has looked
    os.sched_yield()
size = os.fstat(1).st_size
assert size >= BYTES, "bytes are gone from the disk, and no offset moves"
print("held to the limit at", size, flush=True)
"""


@pytest.mark.long
def test_a_worker_that_prints_without_end_fills_no_disk(tmp_path):
    (tmp_path / "script.py").write_text(TALKS)
    ran = run(tmp_path, "--log-limit", "16M", tmp_path / "script.py", preload="json")
    assert ran.code == 0, ran.output[-3000:]
    assert "held to the limit at" in ran.output[-100_000:]
    env = dict(os.environ, HOLDFAST_HOME=str(tmp_path))
    command = [sys.executable, "-m", "holdfast.cli", "logs", "--job", "job", "--rank", "0", "-n", "0"]
    shown = subprocess.run(command, env=env, capture_output=True, check=True)
    assert b"of this log were deleted (--log-limit)" in shown.stderr
    assert b"\0" not in shown.stdout
    assert len(shown.stdout) < 16 << 20
    assert b"held to the limit at" in shown.stdout


def test_a_limit_that_readers_could_not_live_with_is_refused(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    ran = run(tmp_path, "--log-limit", "1M", tmp_path / "script.py")
    assert ran.code == 2
    assert "must be at least 16M" in ran.output
