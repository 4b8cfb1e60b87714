"""The batch scripts that are submitted, against golden files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from holdfast.engines.slurm.script import follow_up_script, job_script
from holdfast.engines.slurm.submit import check_options
from holdfast.errors import UsageError
from holdfast.protocol.job import JobSpec
from holdfast.protocol.job_options import SlurmOptions

GOLDEN = Path(__file__).parent / "golden"
HOME = Path("/shared/holdfast home")
JOB = HOME / "jobs" / "train"
ASKED = SlurmOptions(
    partition="gpu",
    time_limit="4:00:00",
    account="physics",
    gpus_per_node=8,
    sbatch_args=("--qos=high", "--constraint=h200"),
    requeue=True,
)


def spec(options: SlurmOptions) -> JobSpec:
    return JobSpec(
        name="train", script="train.py", max_nodes=4, spares=1, engine="slurm", cwd="/work", slurm=options
    )


def compare(name: str, script: str) -> None:
    assert script.replace(sys.executable, "PYTHON") == (GOLDEN / name).read_text()


def test_a_job_with_its_spares() -> None:
    compare("job.sh", job_script(spec(ASKED), JOB, HOME))


def test_a_job_that_asks_for_nothing() -> None:
    compare("plain.sh", job_script(spec(SlurmOptions()), JOB, HOME))


def test_one_more_node_for_a_running_job() -> None:
    compare("follow-up.sh", follow_up_script(spec(ASKED), JOB, HOME, ["n2", "n7"], 95))


def test_a_time_limit_must_leave_time_to_stop() -> None:
    check_options(spec(SlurmOptions(time_limit="1-0")))
    check_options(spec(SlurmOptions(time_limit="UNLIMITED")))
    with pytest.raises(UsageError, match=r"--time 3: 180 s is too short"):
        check_options(spec(SlurmOptions(time_limit="3")))
    with pytest.raises(UsageError, match=r"--time 'soon': write it as Slurm does"):
        check_options(spec(SlurmOptions(time_limit="soon")))
