"""`python -m bench.gpu` where there is no GPU."""

import json

import pytest
import torch
from bench.gpu import jobs, steps
from bench.gpu.__main__ import main, options

from holdfast.tensors import staging


def test_without_a_gpu_it_says_so(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 2
    assert "There is no GPU" in capsys.readouterr().out


def test_copies_run_on_the_cpu(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(staging, "FAR", {"cuda"})
    threads = torch.get_num_threads()
    out = tmp_path / "out.json"
    arguments = ["--device", "cpu", "--parts", "copies", "--sizes", "2m", "--repetitions", "2"]
    try:
        assert main([*arguments, "--json", str(out)]) == 0
    finally:
        torch.set_num_threads(threads)
    (found,) = json.loads(out.read_text())["copies"]
    assert found["nbytes"] == 2 << 20
    assert {len(times) for times in found["seconds"].values()} == {2}
    assert len(found["products"]["beside"]) == 2
    assert "through two buffers" in capsys.readouterr().out


@pytest.mark.long
def test_steps_run_on_the_cpu(tmp_path, capsys, monkeypatch):
    small = steps.Size(width=64, layers=1, length=8, vocabulary=64, batch=2, rounds=2, steps=3)
    monkeypatch.setitem(steps.SIZES, "cpu", small)
    monkeypatch.setattr(steps, "CASES", steps.CASES[-1:])
    out = tmp_path / "out.json"
    threads = torch.get_num_threads()
    try:
        assert main(["--device", "cpu", "--parts", "steps", "--json", str(out)]) == 0
    finally:
        torch.set_num_threads(threads)
    (found,) = json.loads(out.read_text())["steps"].values()
    assert found["rounds"] == 2
    assert found["plain_s"] > 0
    assert "exact sums" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [["--sizes", "1x"], ["--parts", "copys"], ["--faults", "0"]])
def test_bad_input_is_refused(wrong, capsys):
    with pytest.raises(SystemExit) as left:
        options(wrong)
    assert left.value.code == 2


def line(t, pid, gen, world, step, loss="0x1", context=7, place=100):
    return {
        "t": t,
        "pid": pid,
        "gen": gen,
        "world": world,
        "step": step,
        "loss": loss,
        "context": context,
        "mark": [place, 43008.0],
    }


def test_what_a_fault_did_is_read_from_the_commits():
    lines = [line(t / 10, pid, 1, 3, t) for t in range(5) for pid in (10, 11, 12)]
    lines += [line(t / 10, pid, 2, 2, t) for t in (8, 9) for pid in (10, 12)]
    lines += [line(t / 10, pid, 3, 3, t) for t in (12, 13) for pid in (10, 12, 13)]
    found = jobs.judge(lines, [(0.45, 11)], world=3)
    assert found.stall_s == [pytest.approx(0.35)]
    assert found.full_s == [pytest.approx(0.75)]
    assert (found.survivors, found.kept) == (2, 2)
    assert found.steps == 9
    assert found.step_s == pytest.approx(0.1)
    moved = [{**each, "context": 8} if each["pid"] == 12 and each["gen"] == 3 else each for each in lines]
    assert jobs.judge(moved, [(0.45, 11)], world=3).kept == 1
    gone = [each for each in lines if each["pid"] != 12 or each["gen"] == 1]
    assert jobs.judge(gone, [(0.45, 11)], world=3).kept == 1
