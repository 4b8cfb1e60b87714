"""The engine of docs/engines.md, installed as a package of somebody's, runs a job; broken packages break nothing else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from holdfast import plugins

PAGE = Path(__file__).parents[2] / "docs" / "engines.md"


def block(name: str) -> str:
    found = re.search(
        rf"^```\w+ file={re.escape(name)}\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE
    )
    assert found is not None
    return found[1]


def install(folder: Path, package: str, groups: dict[str, dict[str, str]]) -> None:
    """As pip leaves it."""
    info = folder / f"{package.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [
        line
        for group, names in groups.items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in names.items()), "")
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))


@pytest.fixture
def holdfast(tmp_path):
    """Runs a command where the folder `site` has what was installed."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(tmp_path / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
        return subprocess.run(
            [sys.executable, "-m", "holdfast", *words],
            env={**os.environ, "PYTHONPATH": path, "HOLDFAST_HOME": str(tmp_path / "home")},
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )

    (tmp_path / "train.py").write_text("print('trained', flush=True)\n")
    return run


@pytest.fixture
def command_engine(tmp_path):
    project = tomllib.loads(block("pyproject.toml"))["project"]
    install(tmp_path / "site", project["name"], project["entry-points"])
    (tmp_path / "site" / "command_engine.py").write_text(block("command_engine.py"))


def test_the_engine_of_the_page_runs_a_job(holdfast, command_engine, tmp_path):
    (tmp_path / "train.py").write_text("import os\nprint('trained', os.environ['STARTED'], flush=True)\n")
    wish = ("--engine", "command", "--start-command", "env STARTED=1", "--nnodes", "2", "--job", "theirs")
    done = holdfast("run", "--no-ui", *wish, "train.py")
    assert done.returncode == 0, done.stderr
    assert "trained 1" in done.stdout
    assert "2 workers started" in done.stderr
    assert "outcome    finished" in done.stderr


def test_a_lost_node_of_it_is_replaced(holdfast, command_engine, tmp_path):
    (tmp_path / "train.py").write_text(
        "import os, time\nif not int(os.environ['TORCHELASTIC_RESTART_COUNT']): time.sleep(60)\n"
    )
    wish = ("--engine", "command", "--start-command", "env", "--nnodes", "2", "--wait-for-spare", "--fault")
    done = holdfast("run", "--no-ui", *wish, "kill-node:node=1,after=3s", "train.py")
    assert done.returncode == 0, done.stderr
    assert "node2 joined" in done.stderr


def test_its_options_are_those_of_run(holdfast, command_engine, tmp_path):
    assert "--start-command" in holdfast("run", "--engine", "command", "--help").stdout
    assert "--start-command" not in holdfast("run", "--help").stdout
    assert holdfast("run", "--engine", "command", "train.py").stderr.startswith(
        "holdfast: --engine command needs"
    )
    (tmp_path / "job.yaml").write_text("engine: command\nstart-command: env\nscript: train.py\n")
    planned = holdfast("run", "--dry-run", "-f", "job.yaml").stdout
    assert "engine: command" in planned
    assert "start: env" in planned


def test_what_is_broken_is_one_line_and_breaks_nothing_else(holdfast, tmp_path):
    site = tmp_path / "site"
    install(
        site,
        "broken",
        {
            "holdfast.engines": {"moon": "no_such_module:Moon", "local": "os:path", "odd": "os:path"},
            "holdfast.commands": {"moon": "no_such_module:moon", "run": "os:path"},
            "holdfast.trackers": {"moon": "no_such_module:Moon"},
            "holdfast.checks": {"moon": "no_such_module:check"},
        },
    )
    install(
        site, "other", {"holdfast.engines": {"moon": "os:path"}, "holdfast.commands": {"clash": "os:path"}}
    )
    shown = holdfast("--help")
    assert shown.returncode == 0
    assert "the command 'run' of the package broken is ignored" in shown.stderr
    assert " moon " in shown.stdout
    for words, said in (
        (
            ("moon", "--any", "word"),
            "the command 'moon' of the package broken cannot be used (no_such_module:moon: ",
        ),
        (
            ("run", "--engine", "odd", "train.py"),
            "the engine 'odd' of the package broken cannot be used (os:path: ",
        ),
        (
            ("run", "--engine", "moon", "train.py"),
            "is offered by the packages broken and other: uninstall one",
        ),
        (("run", "--track", "moon:x", "train.py"), "the tracker 'moon' of the package broken cannot be used"),
    ):
        done = holdfast(*words)
        assert done.returncode == 2, done.stderr
        assert said in done.stderr
        assert "Traceback" not in done.stderr
    assert holdfast("ls").returncode == 0
    assert holdfast("run", "--dry-run", "train.py").returncode == 0


@pytest.mark.parametrize("group", [plugins.ENGINES, plugins.TRACKERS, plugins.CHECKS, plugins.COMMANDS])
def test_what_holdfast_declares_is_there(group):
    declared = plugins.ours(group)
    assert declared
    for point in declared.values():
        assert callable(point.load()), point
