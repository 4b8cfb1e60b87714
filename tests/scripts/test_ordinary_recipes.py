"""The scripts of docs/ordinary.md end with the same line alone and where rank 0 is killed in the middle."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import run

PAGE = Path(__file__).parents[2] / "docs" / "ordinary.md"
FILES = dict(re.findall(r"^```python file=(\S+)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL))
EACH_RUN = ("augment.py", "evaluate.py")
SCRIPTS = sorted(FILES.keys() - {"common.py"})


def last_line(text: str) -> str:
    return re.split(r"[\r\n]+", text.strip())[-1]


@pytest.mark.parametrize(
    "script",
    [pytest.param(s, marks=pytest.mark.long if s in EACH_RUN else pytest.mark.nightly) for s in SCRIPTS],
)
def test_a_killed_rank_0_changes_nothing_of_what_a_recipe_prints(tmp_path, monkeypatch, script):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    alone = subprocess.run(
        [sys.executable, script], capture_output=True, check=True, text=True, timeout=100
    ).stdout
    given = ["--nnodes", 2, "--spares", 1, "--wait-for-spare", "--fault", "kill-worker:rank=0,step=12"]
    ran = run(tmp_path, *given, script)
    assert ran.code == 0, ran.output[-3000:]
    assert [i["injected"] for i in ran.report["incidents"]] == [True]
    ends = [
        last_line(log.read_text()) for log in (ran.job_dir / "logs").glob("node*/*.log") if log.stat().st_size
    ]
    assert last_line(alone) in ends, ends
