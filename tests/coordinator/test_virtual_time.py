"""The real service and the real link in virtual time, against random schedules. See `virtual` for what is simulated.

pytest tests/coordinator/test_virtual_time.py                     a few schedules, and the defects that are planted
pytest tests/coordinator/test_virtual_time.py -m nightly          HOLDFAST_VIRTUAL of them (3,000)
python tests/coordinator/virtual SEED                             one of them, with its story
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from simcluster.checks import Violation
from virtual import run_seed
from virtual.defects import DAMAGED, DEFECTS, planted

NIGHTLY = int(os.environ.get("HOLDFAST_VIRTUAL", "3000"))
BLOCK = 100
HERE = Path(__file__).parent


@pytest.mark.timeout(300)
def test_schedules_of_the_service_hold_and_are_eventful():
    stories = [run_seed(seed) for seed in range(20)]
    assert {"finished"} <= {s.outcome for s in stories}
    assert sum(s.starts for s in stories) > 25
    assert sum(s.generations for s in stories) > 15
    assert sum(s.incidents for s in stories) > 15
    assert sum(s.committed for s in stories) > 300


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", range(-(-NIGHTLY // BLOCK)))
def test_many_schedules_of_the_service(block):
    wrong = []
    for seed in range(BLOCK * block, min(BLOCK * (block + 1), NIGHTLY)):
        try:
            run_seed(seed)
        except Violation as error:
            wrong.append(str(error))
    assert not wrong, "\n\n".join(wrong)


def test_a_seed_is_one_schedule_whatever_the_order_in_sets():
    replay = (
        "import sys; sys.path[0:0] = sys.argv[1:]; from virtual import run_seed; print(run_seed(8).digest)"
    )
    told = {run_seed(8).digest, run_seed(8).digest}
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", replay, str(HERE), str(HERE.parent)],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        told.add(done.stdout.strip())
    assert len(told) == 1


@pytest.mark.timeout(300)
@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_a_planted_defect_is_found(defect):
    with planted(defect.changes), pytest.raises(Violation, match=defect.told):
        run_seed(defect.seed)


@pytest.mark.timeout(300)
def test_a_damaged_difference_costs_nothing_but_a_question():
    with planted(DAMAGED):
        assert run_seed(0).asked_for_whole > 0
