"""However a job at level 1 ends, the newest state that its script gave is there for the next start of the same job."""

import os
import signal
import subprocess
import sys

import pytest
from harness import HERE, finish, run, start, wait_for
from test_snapshots import begins, kill_all, memory_of

from holdfast.checkpoint.archive import Archive

ENDS = HERE / "train_ends.py"
OFTEN = HERE / "train_often.py"
LAST = 7
NIGHTLY = pytest.mark.nightly
WAYS = [
    (signal.SIGINT, "stopped"),
    (signal.SIGTERM, "stopped"),
    ("holdfast stop", "stopped"),
    ("end", "finished"),
    ("raise", "failed"),
    ("end", "finished"),
]


@pytest.fixture
def tiers(tmp_path):
    """Two durable tiers that nothing comes to before the end."""
    return [tmp_path / "near", tmp_path / "far"]


@pytest.fixture
def gates(tmp_path):
    """What holds up the last copy of either rank."""
    made = [tmp_path / f"gate-{rank}" for rank in (0, 1)]
    for gate in made:
        os.mkfifo(gate)
    return made


def held_up(gates):
    """Every gate as its copy waits at it; the copy goes on as this is closed."""
    return [gate.open("wb", buffering=0) for gate in gates]


def options(tiers):
    return ["--nnodes", 2, *(o for t in tiers for o in ("--checkpoint", f"{t},every=0"))]


def stop(process, home, how):
    """Ends the job in one of the ways in which people and schedulers do."""
    if how == "holdfast stop":
        env = dict(os.environ, HOLDFAST_HOME=str(home))
        subprocess.run([sys.executable, "-m", "holdfast.cli", "stop", "--job", "job"], env=env, check=True)
    else:
        process.send_signal(how)


def goes_on_at(home, tiers, *args, script=ENDS):
    """Where the ranks of the next start begin."""
    ran = run(home, *options(tiers), script, *args)
    assert ran.code == 0, ran.output[-3000:]
    return begins(ran)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("writer", "ends"),
    [
        pytest.param("save", WAYS[:1] + WAYS[-2:], marks=pytest.mark.long),
        *(pytest.param(w, WAYS, marks=NIGHTLY) for w in ("save", "overlap", "dcp")),
    ],
    ids=["save, the usual ends", "save", "overlap", "dcp"],
)
def test_start_after_start_goes_on_with_the_newest_state(tmp_path, tiers, writer, ends):
    """Stopped in every way, failed for good, and ended by itself; with overlap the copy of the last state is only
    beginning as the script ends."""
    last = 0
    for how, outcome in ends:
        before, last = last, last + 3
        does = how if how in ("raise", "end") else "stand"
        process = start(tmp_path, *options(tiers), "--max-restarts", 0, ENDS, last, does, writer)
        if does == "stand":
            wait_for(process, "rank 0 stands")
            stop(process, tmp_path, how)
        ran = finish(process, tmp_path)
        assert (ran.report["outcome"], begins(ran)) == (outcome, [before]), ran.output[-3000:]
        assert [Archive(str(t)).verify(last).step for t in tiers] == [last, last]
        assert ran.output.count(f"saving the last state, step {last}, to") == 2
        assert ran.report["in_memory"] is None
        assert not memory_of(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(
    "every", ["4", pytest.param("auto", marks=NIGHTLY), pytest.param("0", marks=NIGHTLY)]
)
def test_of_a_script_that_saves_in_every_step_what_is_due_is_kept_and_the_last_state(tmp_path, tiers, every):
    ran = run(tmp_path, *options(tiers), "--snapshot-every", every, OFTEN, 30)
    there = [f["step"] for f in ran.fields("snapshot")]
    assert ran.code == 0, ran.output
    assert [Archive(str(t)).verify(30).step for t in tiers] == [30, 30], ran.output
    # One that finds no room is taken a step later.
    assert len(there) <= {"4": 8, "auto": 30, "0": 1}[every]
    assert there[-1] == 30
    assert ran.report["snapshots"]["complete"] == len(there)
    assert goes_on_at(tmp_path, tiers, 31, script=OFTEN) == [30]


@NIGHTLY
def test_of_ranks_that_saved_different_steps_the_newest_whole_state_counts(tmp_path, tiers):
    process = start(tmp_path, *options(tiers), ENDS, LAST, "ahead")
    wait_for(process, "rank 0 stands")
    process.send_signal(signal.SIGINT)
    finish(process, tmp_path)
    assert goes_on_at(tmp_path, tiers, LAST + 2, "end") == [LAST]


@NIGHTLY
def test_what_the_script_saves_as_it_is_ended_counts(tmp_path, tiers):
    process = start(tmp_path, *options(tiers), ENDS, LAST, "in the handler")
    wait_for(process, "rank 0 stands")
    process.send_signal(signal.SIGINT)
    finish(process, tmp_path)
    assert goes_on_at(tmp_path, tiers, LAST + 1, "end") == [LAST]


def test_a_copy_that_is_under_way_is_completed_before_its_worker_ends(tmp_path, tiers, gates):
    """save(overlap=True) has returned: the script was told that this state is saved."""
    process = start(tmp_path, *options(tiers), ENDS, LAST, "stand", "overlap", tmp_path / "gate")
    pipes = held_up(gates)
    wait_for(process, "rank 0 stands")
    process.send_signal(signal.SIGINT)
    wait_for(process, "stopping: interrupted")
    for pipe in pipes:
        pipe.write(b"1")  # raises where nobody reads any more: its worker has ended
        pipe.close()
    first = finish(process, tmp_path)
    assert [Archive(str(t)).verify(LAST).step for t in tiers] == [LAST, LAST], first.output


@pytest.mark.long
def test_a_state_that_no_tier_takes_stays_in_memory_for_the_next_start(tmp_path, tiers):
    process = start(tmp_path, *options(tiers), ENDS, LAST, "stand")
    wait_for(process, "rank 0 stands")
    for tier in tiers:
        tier.rmdir()
        tier.write_text("no folder any more")
    process.send_signal(signal.SIGINT)
    first = finish(process, tmp_path)
    assert first.report["in_memory"] == {"step": LAST}, first.output
    assert {f["url"] for f in first.fields("tier-failed")} == {str(t) for t in tiers}
    assert f"step {LAST} is only in memory" in first.output
    last = first.output.splitlines()[-1]
    assert (first.code, f"the last state, of step {LAST}, was not saved to a durable tier" in last) == (
        3,
        True,
    )
    assert memory_of(tmp_path)
    for tier in tiers:
        tier.unlink()
    assert goes_on_at(tmp_path, tiers, LAST + 1, "end") == [LAST]
    assert not memory_of(tmp_path)


def only_in_memory(home, gates):
    """A job whose newest state is whole in memory, and which its tier has just refused."""
    tier = f"{home / 'near'},every=1"
    process = start(home, "--nnodes", 2, "--checkpoint", tier, ENDS, LAST, "deaf", "save", home / "gate")
    pipes = held_up(gates)
    (home / "near").rename(home / "away")
    (home / "near").write_text("no folder any more")
    for pipe in pipes:
        pipe.close()
    wait_for(process, "was not saved")
    return process


@NIGHTLY
@pytest.mark.parametrize("how", ["Ctrl-C twice", "kill -9"])
def test_stopped_at_once_the_memory_stays_as_after_a_kill(tmp_path, tiers, gates, how):
    process = only_in_memory(tmp_path, gates)
    if how == "kill -9":
        kill_all(tmp_path, process)
    else:
        process.send_signal(signal.SIGINT)
        wait_for(process, "press Ctrl-C again to stop immediately")
        process.send_signal(signal.SIGINT)
        assert finish(process, tmp_path).report["outcome"] == "killed"
    (tmp_path / "near").unlink()
    assert goes_on_at(tmp_path, tiers, LAST + 1, "end") == [LAST]
    assert not memory_of(tmp_path)
