"""A pod that is to go while its program still begins. The kernel drops a SIGTERM for which a container's first process has no
handler, and then the pod stays for its whole grace.

Here the programs are not the first process, so a SIGTERM without a handler ends them: with -15, and not with 0.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from holdfast.kubernetes.names import (
    COORDINATOR_VARIABLE,
    HOST_VARIABLE,
    NODE_VARIABLE,
    PLACE_FILE,
    SPEC_FILE,
    TOKEN_FILE,
)
from holdfast.protocol.job import JobSpec

PATIENCE_S = 60.0
NODE = "holdfast.kubernetes.pods.node"
COORDINATOR = "holdfast.kubernetes.pods.coordinator"
AT_IMPORT = """
import os, signal, sys

class Terminated:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r} and {program!r} in sys.orig_argv:
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, Terminated())
"""
"""A sitecustomize module: a SIGTERM comes when a program imports a module."""

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """What the operator gives a pod."""
    (tmp_path / "train.py").write_text("")
    spec = JobSpec(name="job", script=str(tmp_path / "train.py"), cwd=str(tmp_path), preload=("msgspec",))
    folder = tmp_path / "config"
    folder.mkdir()
    (folder / SPEC_FILE).write_bytes(msgspec.json.encode(spec))
    (folder / TOKEN_FILE).write_text("token")
    return folder


@pytest.fixture
def start(tmp_path: Path, config: Path) -> Iterator[Start]:
    """Starts a program of a pod."""
    env = os.environ | {
        "HOLDFAST_HOME": str(tmp_path / "home"),
        "HOLDFAST_MEMORY": str(tmp_path),
        "PYTHONPATH": str(tmp_path),
        NODE_VARIABLE: "job-node-0",
        HOST_VARIABLE: "127.0.0.1",
        COORDINATOR_VARIABLE: "127.0.0.1:9",
    }
    started: list[subprocess.Popen[bytes]] = []

    def program(*command: str) -> subprocess.Popen[bytes]:
        command = (sys.executable, "-m", *command, f"--config={config}")
        started.append(subprocess.Popen(command, env=env, start_new_session=True))
        return started[-1]

    yield program
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_node_that_waits_for_its_place_ends(config: Path, start: Start):
    os.mkfifo(config / PLACE_FILE)
    process = start(NODE)
    with open(config / PLACE_FILE, "w"):  # returns when the program reads it
        process.terminate()
        assert process.wait(PATIENCE_S) == 0


def test_a_node_whose_agent_has_just_begun_ends(tmp_path: Path, start: Start):
    """Between the program that prepares a pod and the agent that takes its place."""
    (tmp_path / "sitecustomize.py").write_text(AT_IMPORT.format(module="asyncio", program="holdfast.agent"))
    assert start(NODE).wait(PATIENCE_S) == 0


def test_a_coordinator_that_still_imports_ends(tmp_path: Path, start: Start):
    (tmp_path / "sitecustomize.py").write_text(AT_IMPORT.format(module="asyncio", program=COORDINATOR))
    assert start(COORDINATOR, "--term=1").wait(PATIENCE_S) == 0
