"""Every kind of fault in every phase of a step, with real processes.

Each job has three replicas, a spare, and `--nnodes 3`, so that it never trains smaller: its losses and its
final parameters must be those of the undisturbed job, bit by bit.
"""

from collections import Counter

import pytest
from conftest import STEPS
from harness import TINY, run

from holdfast.protocol.faults import MACHINE_FAULTS, FaultKind, parse_fault

PHASES = ("forward", "backward", "reduce", "vote", "update", "commit")


def marked(row):
    if row < BY_DEFAULT:
        return row
    return pytest.param(row, marks=pytest.mark.long if row < LONG else pytest.mark.nightly)


OTHERS = {
    FaultKind.KILL_COORDINATOR,
    FaultKind.PREEMPT_NODE,
    FaultKind.SLOW,
    FaultKind.FLIP_BIT,
    *MACHINE_FAULTS,
}
"""Tested elsewhere: what they do is no loss of a worker in a phase."""

KINDS = [k for k in FaultKind if k not in OTHERS]
STRIDE = len(PHASES) + 1
BY_DEFAULT, LONG = 1, 5


def kinds(row):
    """Of the faults of one job: one for every phase, and one for the transfer. All rows together have every kind in every
    phase; the first five have every kind in three of them or more."""
    return [KINDS[(row * STRIDE + i) % len(KINDS)] for i in range(STRIDE)]


def test_the_rows_have_every_kind_in_every_phase():
    for column in zip(*(kinds(row) for row in range(len(KINDS))), strict=True):
        assert set(column) == set(KINDS)
    often = Counter(kind for row in range(LONG) for kind in kinds(row))
    assert min(often[kind] for kind in KINDS) >= 3


@pytest.mark.parametrize("row", [marked(row) for row in range(len(KINDS))], ids=lambda r: f"row{r}")
def test_a_fault_in_every_phase_changes_no_bit(row, tmp_path, undisturbed):
    *in_phase, in_transfer = kinds(row)
    faults = [
        f"{kind}:rank={i % 3},phase={phase},step={10 + 20 * i}"
        for i, (kind, phase) in enumerate(zip(in_phase, PHASES, strict=True))
    ]
    # the last one strikes while a newcomer fetches its state: during the recovery from another fault
    faults += ["kill-worker:rank=1,phase=backward,step=135", f"{in_transfer}:phase=transfer,step=135"]
    given = [part for fault in faults for part in ("--fault", fault)]
    ran = run(tmp_path, "--nnodes", 3, "--spares", 1, "--detection", 0.5, *given, TINY, STEPS)
    assert ran.code == 0, ran.output[-3000:]
    assert ran.report["final"] == undisturbed.report["final"]
    assert ran.losses() == undisturbed.losses()
    assert ran.report["steps"]["lost"] == 0
    seen = {parse_fault(i["fault"]) for i in ran.report["incidents"]}
    assert seen == {parse_fault(fault) for fault in faults}, ran.output[-3000:]
    for incident in ran.report["incidents"]:
        assert incident["injected"], incident
        assert incident["stall_s"] is not None, incident
        assert incident["full_strength_s"] is not None, incident


@pytest.mark.long
def test_a_step_that_is_committed_without_rank_0_is_in_the_curve(tmp_path, undisturbed):
    """The newcomer that becomes rank 0 never computed it; those tell of it who did."""
    fault = "kill-worker:rank=0,phase=vote,step=7"
    ran = run(tmp_path, "--nnodes", 3, "--spares", 1, "--wait-for-spare", "--fault", fault, TINY, STEPS)
    assert ran.code == 0, ran.output[-3000:]
    assert ran.losses() == undisturbed.losses()
    assert ran.report["steps"]["lost"] == 0


@pytest.mark.long
@pytest.mark.parametrize(
    "phase", ["reduce", *(pytest.param(p, marks=pytest.mark.nightly) for p in ("forward", "vote", "update"))]
)
def test_the_very_first_step(phase, tmp_path, undisturbed):
    ran = run(
        tmp_path,
        "--nnodes",
        3,
        "--spares",
        1,
        "--fault",
        f"kill-node:rank=0,phase={phase},step=0",
        TINY,
        STEPS,
    )
    assert ran.code == 0, ran.output[-3000:]
    assert ran.report["final"] == undisturbed.report["final"]
    assert len(ran.report["incidents"]) == 1


@pytest.mark.long
def test_kill_coordinator_needs_no_new_generation(tmp_path, undisturbed):
    ran = run(tmp_path, "--nnodes", 3, "--fault", "kill-coordinator:step=40", TINY, STEPS)
    assert ran.code == 0, ran.output[-3000:]
    assert ran.kinds().count("formed") == 1
    assert ran.losses() == undisturbed.losses()
    assert [i["fault"] for i in ran.report["incidents"]] == ["kill-coordinator:step=40"]


def test_kill_coordinator_in_the_middle_of_a_recovery(tmp_path, undisturbed):
    faults = ["--fault", "kill-worker:rank=1,step=40", "--fault", "kill-coordinator:phase=transfer"]
    ran = run(tmp_path, "--nnodes", 3, "--spares", 1, *faults, TINY, STEPS)
    assert ran.code == 0, ran.output[-3000:]
    assert ran.report["final"] == undisturbed.report["final"]
