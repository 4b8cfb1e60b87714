"""`holdfast data samples`, and where its answer is shown: once, not once, or not known."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from test_finished_job import write_job

from holdfast.coordinator.service.store import Store
from holdfast.data.samples import SUFFIX, SampleLedger
from holdfast.protocol.verified import NOTE

SAMPLES, BATCH = 10, 4


@pytest.fixture
def job(home, tmp_path) -> Path:
    """A job whose workers named the folder `record`."""
    folder = write_job("done", outcome=None)
    with closing(Store(folder / "job.sqlite")) as store:
        state = store.load()
        assert state is not None
        state.membership.samples = str(tmp_path / "record")
        store.save(state)
    return folder


@pytest.fixture
def record(tmp_path, monkeypatch):
    """Writes the record of one worker: the samples of each step."""

    def write(*steps: list[int], of: str = "done", own_order: bool = False) -> None:
        monkeypatch.setenv("HOLDFAST_JOB", of)
        with closing(SampleLedger(tmp_path / "record", "first", SAMPLES, BATCH, BATCH, own_order)) as ledger:
            for step, ids in enumerate(steps):
                ledger.giving(1, step, step * BATCH, {0: np.array(ids)})
                ledger.committed(1, step)

    return write


def answer(holdfast) -> dict:
    return json.loads(holdfast("report", "--job", "done", "--json").out)["samples"]


def test_each_came_once(holdfast, job, record):
    record([0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1])
    assert answer(holdfast)["once"] is None
    assert "not checked: the samples are recorded in" in holdfast("report").out
    said = holdfast("data", "samples", "--job", "done")
    assert (said.code, said.err) == (0, "")
    words = "3 steps of 10 samples: each sample was trained on once in 1 complete epoch; 2 of epoch 1 so far, none twice"
    assert said.out.splitlines()[0] == words
    found = answer(holdfast)
    assert (found["once"], found["why"], found["steps"]) == (True, words, 3)
    assert found["epochs"][0] == {"epoch": 0, "came": 10, "repeated": 0, "missing": 0}
    assert "(checked 20" in " ".join(holdfast("report").out.split())


def test_one_came_twice_and_another_did_not_come(holdfast, job, record):
    record([0, 1, 2, 3], [4, 5, 5, 7], [8, 9, 0, 1])
    said = holdfast("data", "samples")
    assert said.code == 1
    assert said.out.startswith(
        "NOT ONCE: 3 steps of 10 samples: epoch 0: 1 sample trained on more than once, 1 not at all"
    )
    assert answer(holdfast)["once"] is False
    assert "NOT ONCE" in holdfast("report").out


def test_a_record_that_lacks_a_file_does_not_tell(holdfast, job, record):
    record([0, 1, 2, 3], [4, 5, 6, 7])
    [path] = (job.parents[2] / "record").glob(f"*{SUFFIX}")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(line for line in lines if b'"p":4' not in line))
    said = holdfast("data", "samples", "record", "--job", "done")
    assert said.code == 1
    assert said.out.startswith(
        "the record cannot answer this: step 1 was committed with the micro-batches []"
    )
    assert (answer(holdfast)["once"], answer(holdfast)["steps"]) == (None, None)


def test_a_mixture_repeats_by_its_weights(holdfast, job, record):
    record([0, 0, 2, 3], own_order=True)
    said = holdfast("data", "samples")
    assert said.code == 1
    assert (
        "samples may repeat, so samples are not counted. Every micro-batch of 1 step was trained on once"
        in said.out
    )
    assert answer(holdfast)["once"] is None


def test_what_nobody_recorded_is_not_known(holdfast, home):
    write_job("done")
    found = answer(holdfast)
    assert found["once"] is None
    assert "the job has not reported a record of samples" in found["why"]
    assert "samples " not in holdfast("report").out
    said = holdfast("data", "samples")
    assert said.code == 2
    assert "the job 'done' has not reported a record of samples" in said.err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("nowhere",), "the folder nowhere does not exist on this machine"),
        (("record", "--most", "100"), "more than --most 100 B"),
        (("record", "--job", "other"), "is the record of the job 'done', not of 'other'"),
        (("home",), "records of no job were found"),
    ],
)
def test_what_is_refused_leaves_no_answer(holdfast, job, record, args, said):
    record([0, 1, 2, 3])
    done = holdfast("data", "samples", *args)
    assert (done.code, done.out) == (2, "")
    assert said in done.err
    assert not (job / NOTE).exists()


def test_an_answer_that_is_damaged_is_none(holdfast, job, record):
    (job / NOTE).write_bytes(b"\xff")
    assert answer(holdfast)["once"] is None
