"""One job of `chaos.py`, and that no kind of fault is forgotten there. `.ci/nightly` runs it for an hour."""

import random
import time

import pytest
from chaos import DAMAGE, INJECTED, KINDS, ROOT, Job, disturb, fixed
from conftest import STEPS
from harness import end_leftovers

from holdfast.protocol.faults import FaultKind


def test_every_kind_of_fault_is_drawn():
    assert set(FaultKind) - set(INJECTED) == {FaultKind.FLIP_BIT}
    assert set(map(str, INJECTED)) < KINDS.keys()


@pytest.mark.long
@pytest.mark.skipif(not ROOT, reason="only root can fill a disk and tear connections")
def test_a_row_of_faults_changes_no_bit_and_leaves_nothing(tmp_path, undisturbed):
    seed = time.time_ns()
    print(f"seed {seed}")
    job = Job(tmp_path, fixed(STEPS, gap=(2, 15), device_s=0.02, over=30), random.Random(seed), undisturbed)
    try:
        disturb(job, [("kill everything", job.rng.choice(DAMAGE))], count=2)
    finally:
        end_leftovers(tmp_path)
    assert any(name.startswith("kill everything") for name in job.done), job.done
    assert len(job.done) >= 3, job.done
