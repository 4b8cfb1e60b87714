"""`kill -9` of a build, at each of the things that it does to the file system and within a write; then it goes on."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.data.files import TokenFile
from holdfast.tools.corpora.build import build, verify
from holdfast.tools.corpora.options import BuildOptions

SCRIPT = Path(__file__).with_name("killed_build.py")


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": f"document {n} " * (n % 5)}) + "\n" for n in range(10)))
    return path


@pytest.fixture
def undisturbed(tmp_path, source):
    (tmp_path / "whole").mkdir()
    return built(tmp_path / "whole/out", source)


def built(prefix, source):
    build(BuildOptions(inputs=(str(source),), prefix=prefix, unit_bytes=200))
    return {path.name: path.read_bytes() for path in prefix.parent.iterdir()}


def kill(how, at, prefix, source, workers=1):
    """Whether it was killed; else it was done before."""
    command = [sys.executable, str(SCRIPT), how, str(at), str(workers), str(prefix), str(source)]
    code = subprocess.run(command, check=False).returncode
    assert code in (0, -signal.SIGKILL, -signal.SIGXFSZ)
    if prefix.with_suffix(".idx").exists():
        verify(TokenFile(prefix))  # never a torn one
    return code != 0


@pytest.mark.long
def test_killed_at_any_change_of_the_file_system(tmp_path, source, undisturbed):
    at, killed = 0, True
    while killed:
        at += 1
        prefix = tmp_path / f"event-{at}" / "out"
        prefix.parent.mkdir()
        killed = kill("event", at, prefix, source)
        assert built(prefix, source) == undisturbed, at
    assert set(undisturbed) == {"out.bin", "out.build.json", "out.idx"}
    assert at > 20


@pytest.mark.parametrize("size", [1, 45, 60, 150, 200, 290, 400])
def test_killed_within_a_write(tmp_path, source, undisturbed, size):
    prefix = tmp_path / "torn" / "out"
    prefix.parent.mkdir()
    assert kill("size", size, prefix, source)
    assert any(f.is_file() and f.stat().st_size == size for f in (tmp_path / "torn/out.build").iterdir())
    assert built(prefix, source) == undisturbed


def test_killed_again_and_again(tmp_path, source, undisturbed):
    prefix = tmp_path / "often" / "out"
    prefix.parent.mkdir()
    assert sum(kill("event", at, prefix, source) for at in range(2, 40, 3)) > 5
    assert built(prefix, source) == undisturbed
    assert not os.path.exists(f"{prefix}.build")


@pytest.mark.parametrize("at", [4, 7, 10, 14])
def test_killed_with_processes_at_work(tmp_path, source, undisturbed, at):
    prefix = tmp_path / "pool" / "out"
    prefix.parent.mkdir()
    assert kill("event", at, prefix, source, workers=2)
    assert built(prefix, source) == undisturbed
