"""What changes with a step changes in its commit, exactly once on every replica; a change elsewhere is found without a fault."""

import re
from pathlib import Path

import pytest
from harness import Ran, run, shared

from holdfast.protocol.faults import parse_fault

STEPS = 45
AVERAGE = Path(__file__).with_name("train_average.py")
TRANSACTION = Path(__file__).with_name("train_transaction.py")
PHASES = ("vote", "commit", "update")


def noise(ran: Ran) -> set[str]:
    """What the workers that trained to the end printed."""
    logs = "".join(path.read_text() for path in ran.job_dir.rglob("*.log"))
    return set(re.findall(r"^noise .*$", logs, re.M))


def counted(ran: Ran) -> set[str]:
    """What the workers that trained to the end counted in their commits, and their scaler's state."""
    logs = "".join(path.read_text() for path in ran.job_dir.rglob("*.log"))
    return set(re.findall(r"^counted .*$", logs, re.M))


@pytest.fixture(scope="module")
def average_undisturbed(tmp_path_factory) -> Ran:
    return shared(tmp_path_factory, "average", lambda home: run(home, "--nnodes", 3, AVERAGE, STEPS, "also"))


@pytest.mark.long
def test_what_is_given_to_also_is_done_once_wherever_the_commit_is_made(tmp_path, average_undisturbed):
    faults = [f"kill-worker:rank={i},phase={phase},step={10 + 10 * i}" for i, phase in enumerate(PHASES)]
    given = [part for fault in faults for part in ("--fault", fault)]
    ran = run(tmp_path, "--nnodes", 3, "--spares", 1, *given, AVERAGE, STEPS, "also")
    assert ran.code == 0, ran.output[-3000:]
    assert {parse_fault(i["fault"]) for i in ran.report["incidents"]} == {parse_fault(f) for f in faults}
    assert ran.report["final"] == average_undisturbed.report["final"]
    assert ran.losses() == average_undisturbed.losses()
    assert noise(ran) == noise(average_undisturbed)
    assert len(noise(ran)) == 1
    assert f"noise {STEPS} " in noise(ran).pop()


@pytest.mark.parametrize(
    ("place", "when"),
    [
        ("after-apply", "module.0.weight changed between step 0's commit and step 1"),
        ("before-apply", "n_averaged changed in step 0 before step.apply"),
    ],
)
def test_a_change_outside_of_the_commit_ends_the_job_with_the_line_to_write(place, when, tmp_path):
    ran = run(tmp_path, "--nnodes", 2, "--spares", 1, AVERAGE, STEPS, place)
    assert ran.code != 0
    assert f"average.{when}" in ran.output
    assert "before the first step" not in ran.output
    assert "step.apply(optimizer, also=lambda: average.update_parameters(model))" in ran.output
    assert ran.report["outcome"] == "failed"
    assert ran.kinds().count("formed") == 1  # nobody was started again for it


def test_one_worker_that_changes_it_is_enough(tmp_path):
    ran = run(tmp_path, "--nnodes", 2, "--spares", 1, AVERAGE, STEPS, "after-step", "only=1")
    assert ran.code != 0
    assert "average.module.0.weight changed between step 0's commit and step 1" in ran.output
    assert ran.kinds().count("formed") == 1


@pytest.mark.nightly
@pytest.mark.parametrize(("shard", "reduction"), [(1, "fast"), (1, "exact"), (2, "fast"), (2, "exact")])
def test_weights_that_change_outside_are_found_whatever_the_sum_and_the_shards(shard, reduction, tmp_path):
    # These steps are so short that few of them are looked at.
    script = [TRANSACTION, 5000, "--shard", shard, "--reduction", reduction, "--outside"]
    ran = run(tmp_path, "--nnodes", 2 * shard, *script)
    assert ran.code != 0
    assert re.search(r"model\.0\.weight changed between step \d+'s commit and step", ran.output)
    assert ran.kinds().count("formed") == 1


@pytest.mark.nightly
def test_a_momentum_teacher_is_part_of_the_commit(tmp_path):
    """An average of the weights whose own forward pass is in the loss: what it forgets, the model never learns."""
    quiet = run(tmp_path, "--nnodes", 2, AVERAGE, STEPS, "also", "teach", job="quiet")
    plain = run(tmp_path, "--nnodes", 2, AVERAGE, STEPS, "also", job="plain")
    given = [
        x
        for i, phase in enumerate(PHASES)
        for x in ("--fault", f"kill-worker:rank=1,phase={phase},step={9 + 9 * i}")
    ]
    ran = run(tmp_path, "--nnodes", 2, "--spares", 1, *given, AVERAGE, STEPS, "also", "teach")
    assert (quiet.code, plain.code, ran.code) == (0, 0, 0), ran.output[-3000:]
    assert ran.report["final"] == quiet.report["final"]
    assert ran.losses() == quiet.losses() != plain.losses()


def test_an_error_in_also_is_the_scripts(tmp_path):
    ran = run(tmp_path, "--nnodes", 2, "--spares", 1, AVERAGE, STEPS, "raise")
    assert ran.code != 0
    assert "RuntimeError in update: what the script gave to also" in ran.output
    assert "the same error at step 5" in ran.report["reason"]


@pytest.mark.parametrize(
    ("shard", "reduction"),
    [
        pytest.param(1, "exact", marks=pytest.mark.long),
        pytest.param(1, "fast", marks=pytest.mark.nightly),
        pytest.param(2, "exact", marks=pytest.mark.nightly),
        pytest.param(2, "fast", marks=pytest.mark.nightly),
    ],
)
def test_callbacks_and_skipped_steps_are_part_of_the_commit(shard, reduction, tmp_path):
    """A worker dies in the sum of step 5. Step 13 is skipped, and a survivor commits it after the fault. One fault at a step:
    with two both workers would be lost, and the job would begin anew, which undoes what this test looks for."""
    script = [TRANSACTION, STEPS, "--shard", shard, "--reduction", reduction]
    given = ["--nnodes", 2 * shard, "--spares", 1, "--wait-for-spare"]
    quiet = run(tmp_path, *given, *script, job="quiet")
    assert quiet.code == 0, quiet.output[-3000:]
    told = counted(quiet).pop()
    assert f"'calls': {STEPS}, 'steps': {sum(range(STEPS))}" in told
    skipped = int(re.search(r"'skipped': (\d+)", told).group(1))
    assert 3 < skipped < STEPS / 2
    faults = [
        f"kill-worker:rank={i % 2},phase={phase},step={step}"
        for i, (phase, step) in enumerate([("vote", 10), ("vote", 13), ("update", 16), ("commit", 22)])
    ]
    ran = run(tmp_path, *given, *[part for f in faults for part in ("--fault", f)], *script, "--die")
    assert ran.code == 0, ran.output[-3000:]
    injected = [parse_fault(i["fault"]) for i in ran.report["incidents"] if i["injected"]]
    assert set(injected) == {parse_fault(f) for f in faults}
    assert len(ran.report["incidents"]) == len(injected) + 1
    assert counted(ran) == {told}
    assert ran.report["final"] == quiet.report["final"]
    assert ran.report["final"]["replicas_equal"]
    assert ran.report["final"]["covered"] == ["model", "optimizer", "scaler", "count"]
    assert ran.report["steps"]["lost"] == 0
    assert ran.report["steps"]["skipped"] == skipped
    assert [*map(repr, ran.losses())] == [*map(repr, quiet.losses())]
