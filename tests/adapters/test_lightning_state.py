"""What callbacks, the module and the loggers of Lightning keep, through faults: as without them."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from ends import LIMIT_S, ends
from harness import run
from resized import check

SCRIPT = Path(__file__).parent / "train_lightning_state.py"

pytestmark = [pytest.mark.timeout(900), pytest.mark.framework("lightning"), pytest.mark.long]


def in_a_job(home: Path, *options: object, worlds: tuple[int, ...] = (2,)) -> list[dict]:
    (home / "out").mkdir(parents=True)
    ran = run(home, *options, SCRIPT, home / "out", timeout=LIMIT_S)
    check(ran, *worlds)
    return ends(home / "out")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict:
    one, other = in_a_job(tmp_path_factory.mktemp("undisturbed"), "--nnodes", 2)
    assert one == other
    # Of 26 samples each of two workers has 13: four batches, which are two updates.
    assert (one["steps"], one["batches"], one["ended"]) == (12, 24, 24)
    assert one["counts"] == {"start": 24, "end": 24, "zero": 12, "validated": 6, "epochs": 6}
    return one


def one_folder(home: Path) -> Path:
    """Of the logger: there is no second one."""
    (folder,) = (home / "out" / "lightning_logs").iterdir()
    return folder


@pytest.mark.capability("level 2", "kill")
@pytest.mark.parametrize(
    ("phase", "rank"),
    [
        ("commit", 0),
        *(
            pytest.param(phase, rank, marks=pytest.mark.nightly)
            for phase, rank in (("forward", 0), ("forward", 1), ("vote", 0), ("vote", 1), ("commit", 1))
        ),
    ],
)
def test_a_newcomer_takes_it_over(tmp_path, undisturbed, rank, phase):
    fault = f"kill-worker:rank={rank},step=5,phase={phase}"
    ended = in_a_job(tmp_path, "--nnodes", 2, "--spares", 1, "--fault", fault)
    assert ended == [undisturbed, undisturbed]
    folder = one_folder(tmp_path)
    (checkpoint,) = (folder / "checkpoints").glob("*.ckpt")
    assert checkpoint.name == undisturbed["best"]
    with (folder / "metrics.csv").open() as file:
        validated = {int(row["step"]) for row in csv.DictReader(file) if row["val_loss"]}
    # What a killed rank 0 had not written is lost; what another one wrote is not deleted.
    assert {5, 7, 9, 11} <= validated


@pytest.mark.capability("resize")
def test_fewer_workers_do_the_same(tmp_path, undisturbed):
    """The one that is left computes the micro-batches of both, and counts the batches of one."""
    options = ("--nnodes", "1:2", "--fault", "kill-node:node=1,step=5")
    (end,) = in_a_job(tmp_path, *options, worlds=(2, 1))
    assert end == undisturbed
