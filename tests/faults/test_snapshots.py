"""Snapshots of a running job: what survives when everything is killed at once, and what is left afterwards."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import LENGTH, SAVES, STEPS
from harness import TIERS, TINY, finish, held, leftovers, run, start
from test_life import signal_when_gone, wait_for

from holdfast.checkpoint.archive import Archive

MEMORY = Path("/dev/shm") / f"holdfast-{os.getuid()}"
EVERY = 10
NIGHTLY = pytest.mark.nightly


def send(fd, number):
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(fd, number)


def kill_all(home, process):
    """Launcher, coordinator, agents and workers, all at once."""
    fds = held(home, process.pid)
    process.send_signal(signal.SIGSTOP)
    for fd in fds:
        send(fd, signal.SIGSTOP)  # nobody is to see another one's end
    for fd in fds:
        send(fd, signal.SIGKILL)
    process.kill()
    process.communicate()
    for fd in fds:
        signal_when_gone(fd)


def paused_at(home, step, *options):
    """The tiny job, standing still at a step."""
    fault = f"stop-worker:rank=0,step={step}"
    process = start(home, "--nnodes", 3, "--detection", 60, "--fault", fault, *options, TINY, STEPS)
    wait_for(process, "injecting")
    return process


@pytest.mark.long
@pytest.mark.parametrize("tier", ["memory", pytest.param("disk", marks=NIGHTLY)])
def test_a_job_that_is_killed_whole_goes_on_from_its_newest_snapshot(tmp_path, undisturbed, tier):
    every = f",every={EVERY}" if tier == "disk" else ",every=0"
    options = ["--snapshot-every", EVERY, "--checkpoint", f"{tmp_path / 'saved'}{every}"]
    process = paused_at(tmp_path, 65, *options)
    kill_all(tmp_path, process)
    if tier == "disk":
        remove_memory_of(tmp_path)
    second = run(tmp_path, "--nnodes", 3, *options, TINY, STEPS)
    assert second.code == 0, second.output[-3000:]
    start_step = second.steps()[0]
    assert 65 - 2 * EVERY <= start_step <= 65
    assert second.losses() == undisturbed.losses()[start_step:]
    assert second.report["final"] == undisturbed.report["final"]
    assert not memory_of(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(
    "kind", ["kill-node", *(pytest.param(k, marks=NIGHTLY) for k in ("kill-worker", "deadlock", "stop-node"))]
)
def test_a_fault_in_the_middle_of_a_copy_changes_no_bit(tmp_path, undisturbed, kind):
    """Two faults, in both savers; the copy that was cut off never counts, and later ones do."""
    faults = [
        "--fault",
        f"{kind}:rank=0,phase=snapshot,step=40",
        "--fault",
        f"{kind}:rank=1,phase=snapshot,step=90",
    ]
    options = ["--nnodes", 3, "--spares", 1, "--snapshot-every", EVERY, "--detection", 0.5]
    ran = run(tmp_path, *options, *faults, TINY, STEPS)
    assert ran.code == 0, ran.output[-3000:]
    assert len(ran.report["incidents"]) == 2
    assert ran.report["final"] == undisturbed.report["final"]
    assert ran.losses() == undisturbed.losses()
    whole = ran.fields("snapshot")
    assert len({f["step"] for f in whole} & {100, 110, 120, 130, 140}) >= 2
    assert not memory_of(tmp_path)


def flip(path, at):
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


def newest_slots(home):
    """Slots by the step in their header, the newest first."""
    import struct

    def step(path):
        return struct.unpack_from("<q", path.read_bytes()[:32], 16)[0]

    return sorted(memory_of(home), key=step, reverse=True)


@pytest.mark.long
@pytest.mark.parametrize("where", [4096 + 1000, *(pytest.param(at, marks=NIGHTLY) for at in (0, 20, -5))])
def test_a_bit_that_flipped_in_memory_costs_one_copy(tmp_path, undisturbed, where):
    """In the header, its step, the row, the head: the other node has the snapshot whole."""
    options = ["--snapshot-every", EVERY, "--checkpoint", f"{tmp_path / 'saved'},every=0"]
    process = paused_at(tmp_path, 65, *options)
    kill_all(tmp_path, process)
    damaged = newest_slots(tmp_path)[0]
    flip(damaged, where % damaged.stat().st_size)
    second = run(tmp_path, "--nnodes", 3, *options, TINY, STEPS)
    assert second.code == 0, second.output[-3000:]
    start_step = second.steps()[0]
    assert 65 - 2 * EVERY <= start_step <= 65
    assert second.losses() == undisturbed.losses()[start_step:]
    assert second.report["final"] == undisturbed.report["final"]


def memory_of(home):
    from holdfast.engines import jobs

    before = os.environ.get("HOLDFAST_HOME")
    os.environ["HOLDFAST_HOME"] = str(home)
    try:
        return list(jobs.memory_root().glob("*/*/*.slot"))
    finally:
        os.environ.pop("HOLDFAST_HOME") if before is None else os.environ.update(HOLDFAST_HOME=before)


def remove_memory_of(home):
    for slot in memory_of(home):
        slot.unlink()


@pytest.mark.long
def test_ctrl_c_leaves_no_memory_behind(tmp_path):
    process = start(tmp_path, "--nnodes", 2, "--snapshot-every", EVERY, TINY, 1_000_000)
    wait_for(process, "generation 1")
    wait_for(process, "steps/s")
    assert memory_of(tmp_path)
    process.send_signal(signal.SIGINT)
    assert finish(process, tmp_path).report["outcome"] == "stopped"
    assert not memory_of(tmp_path)


def ends(ran):
    """What every rank ended with, in the order of the ranks."""
    logs = [p.read_text() for p in (ran.job_dir / "logs").glob("*/*.log")]
    return sorted(line for text in logs for line in text.splitlines() if " ends with " in line)


def begins(ran):
    logs = [p.read_text() for p in (ran.job_dir / "logs").glob("*/*.log")]
    return sorted(
        {int(line.split()[-1]) for text in logs for line in text.splitlines() if " begins at " in line}
    )


@pytest.mark.long
@pytest.mark.parametrize("fault", [pytest.param("kill-worker", marks=NIGHTLY), "kill-node"])
def test_two_lines_at_level_0_go_on_from_memory(tmp_path, tiers_undisturbed, fault):
    """A node takes its ranks' shards with it; its buddy has them. (Two ranks: a sum of three depends on how DDP
    cuts its buckets, which it does anew after every start.)"""
    options = ["--nnodes", 2, "--spares", 1, "--fault", f"{fault}:rank=1,step=620"]
    ran = run(tmp_path, *options, TIERS, LENGTH, SAVES)
    assert ran.code == 0, ran.output[-3000:]
    assert ran.report["incidents"][0]["ranks"] == [1]
    first, again = begins(ran)
    assert first == 0
    assert 620 - 3 * SAVES <= again <= 620
    assert ends(ran) == ends(tiers_undisturbed)
    assert not memory_of(tmp_path)
    steps = ran.report["steps"]
    assert steps["committed"] == LENGTH
    assert steps["lost"] == steps["computed"] - LENGTH == ran.report["incidents"][0]["lost_steps"]
    # Nobody asks the lost node how far it was, and the survivor may be one step behind it.
    assert 619 - again <= steps["lost"] <= 622 - again
    goodput = ran.report["goodput"]
    assert goodput["unknown"] == []
    # Of the steps' time as much was spent twice as of the steps, but that not all of them take the same time.
    again_s = goodput["computed_s"] * steps["lost"] / steps["computed"]
    assert again_s / 4 < goodput["recomputed_s"] < 4 * again_s
    assert {"productive", "recomputed", "restart"} <= goodput["classes"].keys()


@pytest.mark.long
def test_a_rack_that_is_lost_takes_no_shard_with_it(tmp_path):
    """Each rank has a shard of its own; both nodes of a rack are killed at once, their memory with them."""
    options = ["--nnodes", 4, "--racks", 2, "--spares", 2, "--detection", 60]
    process = start(tmp_path, *options, "--fault", "stop-worker:rank=1,step=620", TIERS, LENGTH, SAVES)
    wait_for(process, "injecting")
    for pid in [p for p, command in leftovers(tmp_path).items() if re.search(r"--node=node[02]\b", command)]:
        os.kill(pid, signal.SIGKILL)
    ran = finish(process, tmp_path)
    assert ran.code == 0, ran.output[-3000:]
    lost = {f["node"]: f["cause"] for f in ran.fields("node-lost")}
    assert set(lost) == {"node0", "node2"}, f"{lost}\n{ran.output[-3000:]}"
    assert min(begins(ran)[1:]) >= 620 - 3 * SAVES
    # What each rank alone knows: no sum over ranks is in it, which the restart may order otherwise.
    steps = LENGTH * (LENGTH - 1) // 2
    expected = [[f"{(rank + 1) * steps}.0", f"{(rank + 1) * LENGTH}"] for rank in range(4)]
    assert [line.split()[-2:] for line in ends(ran)] == expected


def test_the_memory_of_a_killed_job_can_be_given_back(tmp_path):
    process = paused_at(tmp_path, 65, "--snapshot-every", EVERY)
    kill_all(tmp_path, process)
    assert memory_of(tmp_path)
    command = [sys.executable, "-m", "holdfast.cli", "checkpoint", "free", "--job", "job"]
    env = dict(os.environ, HOLDFAST_HOME=str(tmp_path))
    said = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    assert said.endswith("kB of snapshot memory freed\n"), said
    assert not memory_of(tmp_path)


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(4))
def test_a_random_row_of_disasters_changes_no_bit(tmp_path, undisturbed, seed):
    """Faults in any phase, everything killed at once, memory lost or damaged in between; the seed says which."""
    print(f"seed {seed}")
    draw = random.Random(seed)
    tier = tmp_path / "saved"
    options = ["--snapshot-every", EVERY, "--checkpoint", f"{tier},every={2 * EVERY}", "--spares", 1]
    saved_to = 0
    for step in sorted(draw.sample(range(20, STEPS - 10), 3)):
        kind = draw.choice(["kill-worker", "kill-node", "kill-coordinator"])
        phase = "" if kind == "kill-coordinator" else f",phase={draw.choice(['snapshot', 'vote', 'update'])}"
        where = "" if kind == "kill-coordinator" else f":rank={draw.randrange(2)}{phase},"
        fault = f"{kind}{where or ':'}step={draw.randrange(saved_to // EVERY, step // EVERY) * EVERY}"
        process = paused_at(tmp_path, step, *options, "--fault", fault)
        kill_all(tmp_path, process)
        newest = newest_slots(tmp_path)
        match draw.choice(["nothing", "lost", "flip", "all lost"]):
            case "lost" if newest:
                shutil.rmtree(newest[0].parent)
            case "flip" if newest:
                flip(newest[0], draw.randrange(newest[0].stat().st_size))
            case "all lost":
                remove_memory_of(tmp_path)
            case _:
                pass
        steps = Archive(str(tier)).steps()
        assert all(Archive(str(tier)).verify(s).step == s for s in steps), "what was saved is whole"
        saved_to = max(steps, default=0)
    last = run(tmp_path, "--nnodes", 3, *options, TINY, STEPS)
    assert last.code == 0, last.output[-3000:]
    begin = last.steps()[0]
    assert begin >= saved_to
    assert last.losses() == undisturbed.losses()[begin:]
    assert last.report["final"] == undisturbed.report["final"]
    assert not memory_of(tmp_path)
