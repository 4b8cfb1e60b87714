"""A worker is what `python script.py` under torchrun is: all that a process can see of itself, its signals, children and end."""

import json
import os
import re
import signal
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from harness import run
from test_real_scripts import LONG_S, RANKS, place, same

pytestmark = [pytest.mark.timeout(5 * LONG_S), pytest.mark.long]
CLI = [sys.executable, "-P", "-m", "holdfast.cli"]
PAGE = Path(__file__).parents[2] / "docs/reference/process.md"
OTHER_NODES = {
    "environment: " + n
    for n in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "PROBE_KILL")
}
Seen = dict[str, object]


def flat(seen: dict[str, dict[str, object]]) -> Seen:
    return {f"{part}: {name}": value for part, values in seen.items() for name, value in values.items()}


def differences(ours: Seen, theirs: Seen) -> set[str]:
    absent = object()
    return {name for name in {*ours, *theirs} if ours.get(name, absent) != theirs.get(name, absent)}


def explained() -> list[str]:
    """The first column of the page's table."""
    return re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(), re.MULTILINE)


def probed(tmp_path: Path, name: str, command: list[str], **more: str) -> dict[str, Seen]:
    """What each start of each rank saw. command: in a new folder, with an environment as a person's."""
    home = tmp_path / name
    folder = place(home / "work")
    seen = home / "seen"
    seen.mkdir()
    env = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS" and not k.startswith("HOLDFAST_")}
    env |= {"HOLDFAST_HOME": str(home / "home"), "PROBE_OUT": str(seen), "PROBE_KILL": "", **more}
    command = [*command, "probe.py", "--width", "a b", os.fsdecode(b"bild-\xe4.png")]
    ended = subprocess.run(command, env=env, cwd=folder, capture_output=True, timeout=LONG_S)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    # But for the folder each of them has to itself.
    read = {file.stem: file.read_text().replace(str(home), "") for file in seen.iterdir()}
    return {start: flat(json.loads(text)) for start, text in read.items()}


def test_a_worker_sees_what_it_sees_under_torchrun(tmp_path: Path) -> None:
    """Not run in the tests' own preloaded processes: the streams and flags are those of a user's job."""
    ranks = f"--nproc-per-node={RANKS}"
    plain = probed(
        tmp_path, "torchrun", [sys.executable, "-m", "torch.distributed.run", "--standalone", ranks]
    )
    ours = [*CLI, "run", "--no-ui", ranks]
    warm = probed(tmp_path, "warm", ours)
    cold = probed(tmp_path, "cold", [*ours, "--preload", ""])
    # On two nodes, each with one worker.
    killed = probed(
        tmp_path, "killed", [*CLI, "run", "--no-ui", "--nnodes", "2", "--spares", "1"], PROBE_KILL="1"
    )
    assert set(warm) == set(cold) == set(plain) == {"0-0", "1-0"}
    assert set(killed) == {"0-0", "1-0", "0-1", "1-1"}
    page = explained()
    found = set[str]()
    for kind in (warm, cold, killed):
        for start, seen in kind.items():
            different = differences(seen, plain[f"{start[0]}-0"]) - (OTHER_NODES if kind is killed else set())
            found |= different
            unexplained = {name for name in different if not any(fnmatchcase(name, each) for each in page)}
            assert not unexplained, {n: (seen.get(n), plain[f"{start[0]}-0"].get(n)) for n in unexplained}
    # The page explains nothing that is as under torchrun.
    assert not [each for each in page if not any(fnmatchcase(name, each) for name in found)]


@pytest.mark.parametrize("script", [("last_save.py",), ("-m", "last_save")])
def test_what_a_script_leaves_to_its_end_is_done(script, tmp_path, monkeypatch) -> None:
    expected, found = same(tmp_path, monkeypatch, *script)
    assert {"0.pkl", "0.gz", "0.txt", "0.zip"} <= set(expected.files)
    timed = [name for name in expected.files if name.endswith((".gz", ".zip"))]
    for name in timed:  # their heads have the time
        assert len(found.files[name]) == len(expected.files[name])
    assert all(found.files[name] == expected.files[name] for name in expected.files if name not in timed)


def test_a_signal_that_the_script_uses_is_the_scripts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank hangs, and is looked at: no handler of the script's runs for that."""
    monkeypatch.chdir(place(tmp_path / "work"))
    ran = run(tmp_path, "--nnodes", 2, "--detection", 0.5, "own_signals.py", timeout=LONG_S)
    assert ran.code == 0, ran.output[-3000:]
    printed = "".join(log.read_text() for log in (ran.job_dir / "logs").glob("node*/*.log"))
    assert sorted(re.findall(r"rank (\d) trained to the end", printed)) == ["0", "1"]
    assert "preempted" not in printed
    (incident,) = ran.report["incidents"]
    assert incident["ranks"] == [1]


def test_what_a_worker_leaves_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the next attempt, which needs its port, and with the job; what left the session on purpose stays."""
    monkeypatch.chdir(place(tmp_path / "work"))
    faults = ("--fault", "kill-worker:rank=1,step=3", "--fault", "kill-worker:rank=1,step=8")
    ran = run(tmp_path, "--nnodes", 2, *faults, "child_processes.py", timeout=LONG_S)
    assert ran.code == 0, ran.output[-3000:]
    printed = "".join(log.read_text() for log in (ran.job_dir / "logs").glob("node*/*.log"))
    assert sorted(re.findall(r"start (\d): the helper (.*)", printed)) == [
        (str(n), "serves") for n in range(3)
    ]
    assert re.findall(r"zombies: (.*)", printed) == ["[]"] * 3
    daemons = [int(pid) for pid in re.findall(r"daemon (\d+)", printed)]
    assert len(daemons) == 3
    for pid in daemons:
        os.kill(pid, signal.SIGKILL)  # raises where it has ended


def test_a_name_that_is_no_text_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    same(tmp_path, monkeypatch, "odd_names.py")


def test_settings_before_the_import_of_torch_are_heeded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, found = same(tmp_path, monkeypatch, "early_settings.py")
    assert found.lines == {
        "0": ["2 DebugLevel.DETAIL"],
        "1": ["2 DebugLevel.DETAIL"],
    }


def test_a_worker_alone_has_the_threads_that_torchrun_leaves_it(tmp_path: Path) -> None:
    plain = probed(tmp_path, "torchrun", [sys.executable, "-m", "torch.distributed.run", "--standalone"])
    ours = probed(tmp_path, "holdfast", [*CLI, "run", "--no-ui"])
    page = explained()
    different = differences(ours["0-0"], plain["0-0"])
    assert not [name for name in different if not any(fnmatchcase(name, each) for each in page)]


@pytest.mark.parametrize("how", ["os._exit", "return"])
def test_a_rank_that_leaves_early_is_the_cause(how, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place(tmp_path / "work"))
    ran = run(tmp_path, "--nproc-per-node", RANKS, "--max-restarts", 0, "leaves_early.py", how)
    assert ran.code == 1
    (incident,) = ran.report["incidents"]
    assert incident["ranks"] == [1]
    # And what the other one saw of it, which is all that torchrun tells.
    assert incident["cause"].startswith(
        "exited with exit code 0 while others continued to train, and then: RuntimeError: "
    )
