"""Every sample exactly once per epoch, through kills and resizes, as the workers themselves recorded it."""

import pytest
from harness import HERE, run, shared, start
from test_life import wait_for
from test_snapshots import kill_all

from holdfast.data import samples

SCRIPT = HERE / "train_samples.py"
STEPS = 120
PHASES = ("forward", "backward", "reduce", "vote", "update", "commit")


def check(ledger, steps=STEPS):
    seen = samples.check(ledger)
    assert seen.steps == steps
    assert seen.repeated() == {}
    whole, rest = divmod(steps * 48, seen.samples)
    assert [seen.missing(epoch) for epoch in range(whole)] == [0] * whole
    assert seen.missing(whole) == seen.samples - rest
    return seen


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    def once(home):
        ran = run(home, "--nnodes", 3, SCRIPT, STEPS, home / "ledger", 0)
        check(home / "ledger")
        return ran

    return shared(tmp_path_factory, "samples", once)


@pytest.mark.nightly
def test_kills_in_every_phase_lose_and_repeat_no_sample(tmp_path, undisturbed):
    faults = [f"kill-worker:rank={i % 3},phase={phase},step={10 + 12 * i}" for i, phase in enumerate(PHASES)]
    given = [part for fault in faults for part in ("--fault", fault)]
    ledger = tmp_path / "ledger"
    ran = run(tmp_path, "--nnodes", 3, "--spares", 1, *given, SCRIPT, STEPS, ledger, 1)
    assert ran.code == 0, ran.output[-3000:]
    assert len(ran.report["incidents"]) == len(faults)
    check(ledger)
    assert ran.losses() == undisturbed.losses()
    assert ran.report["final"] == undisturbed.report["final"]


@pytest.mark.long
def test_smaller_and_larger_worlds_lose_and_repeat_no_sample(tmp_path):
    faults = [
        "kill-node:rank=3,phase=vote,step=20",
        "kill-worker:rank=0,phase=update,step=21",  # before the node is replaced
        "kill-worker:rank=1,phase=vote,step=22",
        "kill-node:rank=2,phase=backward,step=60",
        "kill-worker:rank=0,phase=commit,step=90",
    ]
    given = [part for fault in faults for part in ("--fault", fault)]
    ledger = tmp_path / "ledger"
    ran = run(tmp_path, "--nnodes", "1:4", *given, SCRIPT, STEPS, ledger, 1)
    assert ran.code == 0, ran.output[-3000:]
    check(ledger)
    assert len({fields["world"] for fields in ran.fields("formed")}) >= 3


@pytest.mark.nightly
def test_a_job_that_is_killed_whole_counts_the_steps_that_it_repeats_once(tmp_path, undisturbed):
    ledger = tmp_path / "ledger"
    options = ["--nnodes", 3, "--snapshot-every", 10]
    pause = ["--fault", "stop-worker:rank=0,step=57", "--detection", 60]
    process = start(tmp_path, *options, *pause, SCRIPT, STEPS, ledger, 1)
    wait_for(process, "injecting")
    kill_all(tmp_path, process)
    ran = run(tmp_path, *options, SCRIPT, STEPS, ledger, 1)
    assert ran.code == 0, ran.output[-3000:]
    check(ledger)
    assert ran.report["final"] == undisturbed.report["final"]


@pytest.mark.parametrize("how", [pytest.param("error", marks=pytest.mark.nightly), "break"])
def test_a_script_that_leaves_the_loop_leaves_nothing_behind(tmp_path, how):
    ran = run(tmp_path, "--nnodes", 2, HERE / "train_leaving.py", how)
    assert ran.code == (1 if how == "error" else 0), ran.output[-3000:]
    assert how == "break" or "left in the middle" in ran.output
