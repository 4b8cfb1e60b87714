"""Every process of a job writes its own log, at the level that was asked for, and none of them the job's token."""

import re

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
        "--log-level 'loud': write one of debug, info, warning, error, for example debug or info,json"
        in ran.output
    )
    assert not ran.job_dir.exists()
