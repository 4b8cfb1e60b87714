"""Scripts as people write them, unmodified at level 0: what they print and write under torchrun is what is expected."""

import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness import run

HERE = Path(__file__).parent
RANKS = 2
LONG_S = 100
"""Far more than any of the scripts needs on a loaded machine."""


pytestmark = pytest.mark.timeout(5 * LONG_S)


@dataclass
class Seen:
    code: int
    lines: dict[str, list[str]]
    """What each rank printed, of the lines that begin with its number in brackets."""
    files: dict[str, bytes]
    """What is below the working directory afterwards, by its name there."""


def written(folder: Path) -> dict[str, bytes]:
    paths = (p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    return {str(p.relative_to(folder)): p.read_bytes() for p in paths}


def by_rank(text: str) -> dict[str, list[str]]:
    lines: dict[str, list[str]] = {}
    for rank, line in re.findall(r"^\[(\d+)\] (.*)$", text, re.MULTILINE):
        lines.setdefault(rank, []).append(line)
    return lines


def place(folder: Path) -> Path:
    """A copy of the scripts, from which and beside which a run may write."""
    shutil.copytree(
        HERE, folder, ignore=shutil.ignore_patterns("__pycache__", "test_*", "conftest.py", "level1.py")
    )
    return folder


def by_torchrun(folder: Path, script: str, *args: str, code: int = 0) -> Seen:
    """Each rank has a file for what it prints, since two ranks that write into one pipe cut each other's lines.

    code: with which it has to end. A run of plain torch that ends otherwise says nothing about Holdfast, and is repeated once
    from the same files. In CI one ended with 1; none of 99 did so under load.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    failures = []
    for _ in range(2):
        with tempfile.TemporaryDirectory() as kept:
            before, logs = Path(kept) / "before", Path(kept) / "logs"
            shutil.copytree(folder, before)
            ended = subprocess.run(
                [*command, "--redirects=3", f"--log-dir={logs}", script, *args],
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=LONG_S,
            )
            printed = "".join(log.read_text() for log in sorted(logs.rglob("stdout.log")))
            if ended.returncode == code:
                return Seen(code, by_rank(printed), written(folder))
            said = [ended.stderr, *(log.read_text() for log in sorted(logs.rglob("stderr.log")))]
            failures.append(f"torchrun ended with {ended.returncode}:\n" + "\n".join(s[-3000:] for s in said))
            shutil.rmtree(folder)
            shutil.copytree(before, folder)
    raise AssertionError("\n\n".join(failures))


def by_holdfast(
    folder: Path, home: Path, monkeypatch, script: str, *args: str, faults=(), options=()
) -> Seen:
    monkeypatch.chdir(folder)
    home.mkdir()
    chosen = [word for fault in faults for word in ("--fault", fault)]
    ran = run(home, "--nproc-per-node", RANKS, *options, *chosen, script, *args, timeout=LONG_S)
    logs = sorted((ran.job_dir / "logs").glob("node*/*.log"))
    assert len(ran.report["incidents"]) == len(faults), ran.output[-3000:]
    return Seen(ran.code, by_rank("".join(log.read_text() for log in logs)), written(folder))


def same(tmp_path, monkeypatch, script: str, *args: str) -> tuple[Seen, Seen]:
    expected = by_torchrun(place(tmp_path / "torchrun"), script, *args)
    assert set(expected.lines) == {str(rank) for rank in range(RANKS)}
    found = by_holdfast(place(tmp_path / "holdfast"), tmp_path / "home", monkeypatch, script, *args)
    assert found.code == 0
    assert found.lines == expected.lines
    assert set(found.files) == set(expected.files)
    return expected, found


@pytest.mark.long
def test_a_script_with_a_configuration_and_files_of_its_own(tmp_path, monkeypatch) -> None:
    expected, found = same(tmp_path, monkeypatch, "configured.py", "--set", "steps=4", "--set", "lr=0.1")
    assert "exit-1.txt" in expected.files
    assert "beside-0.txt" in expected.files
    assert found.files == expected.files


@pytest.mark.long
def test_a_script_that_ends_with_an_error_code_fails(tmp_path, monkeypatch) -> None:
    script = ("configured.py", "--set", "code=3")
    by_torchrun(place(tmp_path / "torchrun"), *script, code=1)
    monkeypatch.chdir(place(tmp_path / "holdfast"))
    ran = run(tmp_path, "--nproc-per-node", RANKS, "--max-restarts", 0, *script)
    assert ran.code == 1


@pytest.mark.long
def test_a_character_model_and_its_resumption(tmp_path, monkeypatch) -> None:
    expected, found = same(tmp_path, monkeypatch, "character_model.py")
    assert "out/ckpt.pt" in expected.files
    assert found.files == expected.files
    again = ("character_model.py", "--init-from", "resume", "--max-iters", "20")
    expected = by_torchrun(tmp_path / "torchrun", *again)
    found = by_holdfast(tmp_path / "holdfast", tmp_path / "again", monkeypatch, *again)
    assert (found.code, found.lines) == (0, expected.lines)
    assert len(expected.lines["1"]) < 20


@pytest.mark.long
def test_fully_shard_and_a_distributed_checkpoint(tmp_path, monkeypatch) -> None:
    same(tmp_path, monkeypatch, "sharded_model.py", "dcp")


@pytest.mark.long
def test_an_image_classifier_with_loader_workers(tmp_path, monkeypatch) -> None:
    same(tmp_path, monkeypatch, "image_classifier.py")


@pytest.mark.long
def test_a_trainer_with_snapshots_continues_from_them_after_a_kill(tmp_path, monkeypatch) -> None:
    expected, _ = same(tmp_path, monkeypatch, "snapshot_trainer.py", "6", "snapshot.pt")
    killed = by_holdfast(
        place(tmp_path / "killed"),
        tmp_path / "disturbed",
        monkeypatch,
        *("snapshot_trainer.py", "6", "snapshot.pt"),
        faults=["kill-worker:rank=1,step=14"],
    )
    assert killed.code == 0
    assert "loading snapshot" in killed.lines["0"]
    for rank, lines in expected.lines.items():
        assert set(killed.lines[rank]) - {"loading snapshot"} <= set(lines)
        assert killed.lines[rank][-1] == lines[-1]


@pytest.mark.nightly
def test_lightning_with_ddp(tmp_path, monkeypatch) -> None:
    same(tmp_path, monkeypatch, "lightning_basic.py", "lightning")


@pytest.mark.nightly
def test_fabric_with_ddp(tmp_path, monkeypatch) -> None:
    same(tmp_path, monkeypatch, "fabric_basic.py", "fabric.ckpt")


@pytest.mark.nightly
def test_hugging_face_trainer_and_its_last_checkpoint(tmp_path, monkeypatch) -> None:
    script = (
        "run_clm.py",
        "--output_dir=clm",
        "--use_cpu",
        "--per_device_train_batch_size=4",
        "--logging_steps=1",
    )
    script += ("--gradient_accumulation_steps=2", "--save_steps=2", "--report_to=none", "--disable_tqdm=true")
    expected, found = same(tmp_path, monkeypatch, *script, "--max_steps=4")
    assert "clm/checkpoint-4/trainer_state.json" in expected.files
    assert found.files["clm/model.safetensors"] == expected.files["clm/model.safetensors"]
    expected = by_torchrun(tmp_path / "torchrun", *script, "--max_steps=6")
    found = by_holdfast(tmp_path / "holdfast", tmp_path / "again", monkeypatch, *script, "--max_steps=6")
    assert (found.code, found.lines) == (0, expected.lines)
    assert found.files["clm/model.safetensors"] == expected.files["clm/model.safetensors"]


@pytest.mark.nightly
def test_accelerate_and_its_checkpoints(tmp_path, monkeypatch) -> None:
    expected, found = same(tmp_path, monkeypatch, "run_clm_no_trainer.py")
    assert found.files["clm/model.safetensors"] == expected.files["clm/model.safetensors"]
    again = ("run_clm_no_trainer.py", "--resume_from_checkpoint=clm/step_3")
    expected = by_torchrun(tmp_path / "torchrun", *again)
    found = by_holdfast(tmp_path / "holdfast", tmp_path / "again", monkeypatch, *again)
    assert (found.code, found.lines) == (0, expected.lines)


@pytest.mark.long
def test_what_is_not_seeded_differs_from_rank_to_rank(tmp_path, monkeypatch) -> None:
    expected = by_torchrun(place(tmp_path / "torchrun"), "unseeded.py")
    found = by_holdfast(place(tmp_path / "holdfast"), tmp_path / "home", monkeypatch, "unseeded.py")
    assert found.code == 0
    for seen in (expected, found):
        assert len(seen.lines["0"]) == len(seen.lines["1"]) == 6
        assert all(mine != others for mine, others in zip(seen.lines["0"], seen.lines["1"], strict=True))
