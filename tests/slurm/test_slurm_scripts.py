"""The batch scripts that are submitted, against golden files."""

from __future__ import annotations

import re
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
    with pytest.raises(UsageError, match=r"--time must be in Slurm's notation"):
        check_options(spec(SlurmOptions(time_limit="soon")))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--array=0-3", "with its own --job"),
        ("--arr=0-3", "with its own --job"),
        ("-a0-3", "with its own --job"),
        ("-N 4", "use --nnodes and --spares"),
        ("--time=10", "use --time"),
        ("--ntasks-per-node=8", "use --nproc-per-node"),
        ("--no-requeue", "remove --requeue"),
        ("--wait", "waits for the job's end"),
    ],
)
def test_an_option_of_sbatch_that_says_otherwise_than_the_script_is_refused(given: str, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)) as told:
        check_options(spec(SlurmOptions(sbatch_args=(given,))))
    assert f"--sbatch-arg {given!r}" in str(told.value)


@pytest.mark.parametrize(
    "given",
    [
        "--qos=high",
        "--nodelist=n1",
        "--time-min=10",
        "--wait-all-nodes=1",
        "--mem=100G",
        "-C h200",
        "--exclude=n7",
    ],
)
def test_other_options_of_sbatch_are_passed_on(given: str) -> None:
    check_options(spec(SlurmOptions(sbatch_args=(given,))))
