"""Lifecycle hooks: what they get, what is kept of them, and how they end."""

import asyncio
import time
from pathlib import Path

from holdfast.agent.hooks import Hooks


def hooks(tmp_path: Path, name: str, text: str) -> Hooks:
    folder = tmp_path / "hooks"
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)
    return Hooks(str(folder), "job", "node3", tmp_path)


def test_a_hook_knows_where_and_why_it_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_TOKEN", "secret")
    ours = hooks(tmp_path, "on-drain", 'echo "$HOLDFAST_JOB $HOLDFAST_NODE $HOLDFAST_REASON"; env >&2')
    run = asyncio.run(ours.run("on-drain", "maintenance"))
    assert run.error == ""
    log = (tmp_path / "hook-on-drain.log").read_text()
    assert log.startswith("job node3 maintenance\n")
    assert "secret" not in log


def test_a_hook_that_is_not_there(tmp_path):
    ours = hooks(tmp_path, "on-drain", "")
    assert asyncio.run(ours.run("after-job", "over")) is None
    assert asyncio.run(Hooks("", "job", "node3", tmp_path).run("on-drain", "over")) is None


def test_a_failing_hook_is_named_with_its_log(tmp_path):
    run = asyncio.run(hooks(tmp_path, "before-join", "echo no disk; exit 3").run("before-join", "new"))
    assert run.told("node3") == (
        f"hook before-join failed on node3: exit code 3; its output is in {tmp_path}/hook-before-join.log"
    )
    assert (tmp_path / "hook-before-join.log").read_text() == "no disk\n"


def test_a_hook_that_hangs_is_ended_with_all_that_it_started(tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_HOOK_TIMEOUT_S", "0.2")
    began_s = time.monotonic()
    run = asyncio.run(hooks(tmp_path, "after-job", "sleep 60 & sleep 60").run("after-job", "over"))
    assert run.error == "it did not end within 0.2 s"
    assert time.monotonic() - began_s < 30


def test_a_hook_that_cannot_be_started(tmp_path):
    ours = hooks(tmp_path, "on-create", "")
    (tmp_path / "hooks" / "on-create").write_text("#!/no/such/shell\n")
    run = asyncio.run(ours.run("on-create", "new"))
    assert "cannot be started" in run.error
