import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from holdfast.cli.app import main


@dataclass
class Said:
    """What a command did."""

    code: int
    out: str
    err: str


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A HOLDFAST_HOME of its own, and a working folder with a script in it."""
    home = tmp_path / "home"
    monkeypatch.setenv("HOLDFAST_HOME", str(home))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("raise SystemExit('must never be started')\n")
    return home


@pytest.fixture
def holdfast(home, monkeypatch, capfd):
    """Runs the command line in this process."""

    def call(*args: object) -> Said:
        monkeypatch.setattr(sys, "argv", ["holdfast", *map(str, args)])
        capfd.readouterr()
        try:
            main()
            code = 0
        except SystemExit as leaving:
            code = leaving.code or 0
        out, err = capfd.readouterr()
        return Said(code, out, err)

    return call


@pytest.fixture
def start(home):
    """Starts the command line as a process; ended with the test."""
    started = []

    def call(*args: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "holdfast.cli", *map(str, args)]
        process = subprocess.Popen(
            command, env=os.environ | {"HOLDFAST_HOME": str(home)}, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield call
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def processes_of(home: Path) -> list[int]:
    """Processes other than this one that work in this home."""
    mark = f"HOLDFAST_HOME={home}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environment = (entry / "environ").read_bytes()
        except OSError:
            continue
        if mark in environment.split(b"\0") and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found
