"""A token or an identity whose bytes went bad: one refusal that names the file, and nothing is lost for it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import msgspec
import pytest

from holdfast.engines import jobs
from holdfast.engines.client import FolderReach
from holdfast.engines.folders import has_token, prepare_folder
from holdfast.errors import UsageError
from holdfast.protocol.job import JobSpec, Resume
from holdfast.protocol.machine.processes import python_module
from holdfast.protocol.wire.stored import read_stored_word

DAMAGED = (b"", b"\xff\xfe\x00", b"abc\x80", b"\0" * 32, b"two words", b"a\x1b[2J")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HOLDFAST_MEMORY", str(tmp_path / "shm"))
    made = jobs.job_dir("llm")
    made.mkdir(parents=True, mode=0o700)
    spec = JobSpec(name="llm", script="train.py")
    (made / "spec.json").write_bytes(msgspec.json.encode(spec))
    (made / "resume.json").write_bytes(msgspec.json.encode(Resume()))
    (made / "token").write_text("secret")
    (made / "identity").write_text("0123abcd")
    return made


@pytest.mark.parametrize("data", DAMAGED)
def test_what_is_no_word_of_ours_is_refused_by_name(folder: Path, data: bytes) -> None:
    (folder / "token").write_bytes(data)
    with pytest.raises(UsageError, match=f"{folder}/token is damaged"):
        read_stored_word(folder / "token")
    with pytest.raises(UsageError, match=f"{folder}/token is damaged"):
        # A command, which has no launcher to ask.
        FolderReach(folder).__aenter__().send(None)
    assert not has_token(folder, "secret")


@pytest.mark.parametrize("data", DAMAGED)
def test_a_damaged_identity_costs_nobody_s_memory(folder: Path, data: bytes) -> None:
    there = [jobs.memory_root() / name for name in ("llm-0123abcd", "other-1", "gone-2")]
    for each in there:
        each.mkdir(parents=True)
    (other := jobs.job_dir("other")).mkdir()
    (other / "identity").write_text("1")
    (folder / "identity").write_bytes(data)
    with pytest.raises(UsageError, match=f"{folder}/identity is damaged.*remove it to resume"):
        jobs.memory_of(folder)
    jobs.sweep_memory()  # as any start of any job does
    assert [each.exists() for each in there] == [True, True, False]


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("holdfast.coordinator", ("--listen=0",)),
        ("holdfast.agent", ("--node=n0", "--memory=/nowhere")),
    ],
    ids=["coordinator", "agent"],
)
def test_a_process_that_starts_says_one_line(folder: Path, module: str, arguments: tuple[str, ...]) -> None:
    (folder / "token").write_bytes(b"\xff")
    command = python_module(module, f"--job-dir={folder}", *arguments)
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 1
    (line,) = ran.stderr.splitlines()
    assert line.startswith(
        f"holdfast: the {module.partition('.')[2]} cannot start: {folder}/token is damaged"
    )


def test_an_agent_without_a_specification_says_one_line(folder: Path) -> None:
    (folder / "spec.json").write_text("{}")
    command = python_module("holdfast.agent", f"--job-dir={folder}", "--node=n0", "--memory=/nowhere")
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 1
    (line,) = ran.stderr.splitlines()
    assert line.startswith(f"holdfast: the agent cannot start: {folder}/spec.json is damaged")


def test_a_folder_whose_preparation_was_cut_short_is_prepared_again(folder: Path) -> None:
    spec = JobSpec(name="llm", script="other.py")
    (folder / "spec.json").unlink()
    (folder / "spec.json").mkdir()
    with pytest.raises(IsADirectoryError):
        prepare_folder(folder, spec, "new", "1")
    assert not has_token(folder, "new")
    (folder / "spec.json").rmdir()
    prepare_folder(folder, spec, "new", "1")
    assert has_token(folder, "new")
    assert msgspec.json.decode((folder / "spec.json").read_bytes(), type=JobSpec) == spec
