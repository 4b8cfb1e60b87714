"""Single checks: what they call healthy, faulty and unknown."""

import asyncio
import errno
import os
from pathlib import Path

import pytest
import torch

from holdfast.agent.checks import NodeChecks
from holdfast.health.checks import basic
from holdfast.health.checks.basic import Needs, run_basic
from holdfast.health.checks.check import CannotCheck, CheckProgress, Task, attempt, failed
from holdfast.health.checks.child import check_in_child
from holdfast.protocol import messages as m
from holdfast.protocol.health import CheckResult, Condition
from holdfast.tools.checks import cpu, disk, memory

CPU = torch.device("cpu")


def test_basic_checks_pass_here_and_name_what_they_looked_at(tmp_path):
    results = run_basic(Needs("127.0.0.1", 2, tmp_path, tmp_path / "memory" / "node0"))
    assert not failed(results)
    assert {"memory", "shm", "disk", "files", "clock", "port", "cpus"} <= {r.name for r in results}
    assert list(tmp_path.iterdir()) == []


def test_an_address_of_another_machine(tmp_path):
    (result,) = basic.check_port("192.0.2.1")
    assert result.condition is Condition.FAULTY
    assert "192.0.2.1" in result.detail


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "open", refuse)
    (result,) = basic.check_disk(tmp_path)
    assert (result.condition, result.detail) == (Condition.FAULTY, f"{tmp_path} is read-only")


def test_a_clock_that_is_off_is_nobodys_fault(tmp_path, monkeypatch):
    now = basic.time.time()
    monkeypatch.setattr(basic.time, "time", lambda: now + 3600)
    (result,) = basic.check_clock(tmp_path)
    assert result.condition is Condition.UNKNOWN
    assert "differ by 3600 s" in result.detail


@pytest.mark.parametrize(("answering", "condition"), [(2, Condition.HEALTHY), (1, Condition.FAULTY)])
def test_every_gpu_must_answer(tmp_path, answering, condition):
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    (result,) = basic.check_gpus(tmp_path, lambda: ["GPU-1", "GPU-2"][:answering])
    assert (result.condition, result.value, result.floor) == (condition, answering, 2)


def test_too_little_memory_is_said_with_both_figures(monkeypatch):
    monkeypatch.setattr(basic, "available_bytes", lambda: 100 << 20)
    (result,) = basic.check_memory()
    assert (result.condition, result.detail) == (
        Condition.FAULTY,
        "105 MB free memory, but at least 268 MB are needed",
    )


def test_no_gpu_is_no_result(tmp_path):
    assert list(basic.check_gpus(tmp_path)) == []


def test_a_driver_that_does_not_answer_is_unknown():
    import threading

    never = threading.Event()
    try:
        with pytest.raises(CannotCheck, match="did not answer"):
            basic.in_time(lambda: [str(never.wait())], 0.01, "NVML")
    finally:
        never.set()


def test_a_check_that_fails_by_itself_blames_nobody():
    def broken(task):
        yield CheckResult(name="a", condition=Condition.HEALTHY)
        raise ValueError("oh")

    results = attempt("b", broken, Task())
    assert [(r.name, r.condition) for r in results] == [("a", Condition.HEALTHY), ("b", Condition.UNKNOWN)]
    assert results[1].detail == "ValueError: oh"


# ---------------------------------------------------------------- processor


def test_a_core_works_alike_in_every_round():
    run = cpu.run_core(0, cpu.operands_for(32), 0.02)
    assert run.rounds > 1
    assert run.wrong == 0


def test_a_core_with_other_bits_is_named():
    good = [cpu.CoreRun(core=n, digest="aa", rounds=10, seconds=1.0) for n in range(3)]
    assert cpu.judge_cores(good, "x").condition is Condition.HEALTHY
    bad = cpu.judge_cores([*good, cpu.CoreRun(core=3, digest="ab", rounds=10, seconds=1.0)], "x")
    assert (bad.condition, bad.digest) == (Condition.FAULTY, "aa")
    assert "core 3" in bad.detail
    wrong = cpu.judge_cores([*good, cpu.CoreRun(core=7, digest="aa", rounds=10, seconds=1.0, wrong=2)], "x")
    assert "core 7 (2 of 10 rounds)" in wrong.detail


# ---------------------------------------------------------------- memory


def test_memory_that_keeps_everything():
    result = memory.check_patterns("memory-patterns", CPU, 1 << 20, 1.0)
    assert (result.condition, result.value) == (Condition.HEALTHY, 1 << 20)


@pytest.mark.parametrize("stuck", [0, 1])
def test_a_bit_that_is_stuck_is_found(stuck):
    def damage(words):
        bit = 1 << 13
        words[1234] = int(words[1234]) | bit if stuck else int(words[1234]) & ~bit

    result = memory.check_patterns("memory-patterns", CPU, 1 << 20, 1.0, damage)
    assert result.condition is Condition.FAULTY
    assert "word 1234" in result.detail
    assert "(1 bits differ)" in result.detail


def test_addresses_that_are_mixed_up_are_found():
    def damage(words):
        words[5] = words[77].clone()

    result = memory.check_patterns("memory-patterns", CPU, 1 << 20, 1.0, damage)
    assert "pattern address: word 5" in result.detail


# ---------------------------------------------------------------- disk


def test_a_disk_that_gives_back_what_it_got(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "MOST_BYTES", 3 * disk.BLOCK_BYTES)
    wrote, read = disk.check_disk(Task(folder=str(tmp_path)))
    assert (wrote.condition, read.condition) == (Condition.HEALTHY, Condition.HEALTHY)
    assert wrote.value > 0
    assert list(tmp_path.iterdir()) == []


def test_a_block_that_came_back_changed(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "MOST_BYTES", 3 * disk.BLOCK_BYTES)
    results = disk.check_disk(Task(folder=str(tmp_path)))
    next(results)
    (path,) = tmp_path.iterdir()
    with path.open("r+b") as file:
        file.seek(disk.BLOCK_BYTES + 17)
        file.write(b"\x00\x01\x02")
    (read,) = results
    assert read.condition is Condition.FAULTY
    assert "1 of 3 blocks of 4 MiB came back changed, the first is number 1" in read.detail
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "condition"), [(errno.EIO, Condition.FAULTY), (errno.EDQUOT, Condition.UNKNOWN)]
)
def test_errors_of_a_disk(tmp_path, monkeypatch, number, condition):
    def refuse(*args):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(disk, "_open", refuse)
    (result,) = attempt("disk", disk.check_disk, Task(folder=str(tmp_path)))
    assert result.condition is condition


# ---------------------------------------------------------------- in a child process


def test_checks_in_a_child(tmp_path):
    said: list[CheckProgress] = []
    task = Task(folder=str(tmp_path), seconds=0.05, only=("disk",))
    results = asyncio.run(check_in_child(task, said.append))
    assert [r.name for r in results] == ["disk-write", "disk-read"]
    assert said[0] == CheckProgress(running="disk")
    assert [s.result for s in said if s.result] == results


def test_an_order_that_is_repeated_meanwhile_is_carried_out_once(tmp_path):
    sent = []

    async def ask():
        ours = NodeChecks("n", "127.0.0.1", 1, tmp_path, tmp_path, sent.append)
        await asyncio.gather(*(ours.answer(m.RunChecks(request=n)) for n in (1, 1, 2)))

    asyncio.run(ask())
    assert [s.request for s in sent] == [1, 2]
    assert {r.name for r in sent[0].results} >= {"memory", "port"}
