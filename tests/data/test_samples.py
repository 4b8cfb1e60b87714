import itertools

import numpy as np
import pytest

from holdfast.data import samples
from holdfast.data.samples import SUFFIX, SampleLedger, check
from holdfast.errors import DataError, UsageError

SAMPLES, GLOBAL, MICRO = 10, 8, 2


class Job:
    """Workers that write ledgers as a job's would; sample numbers are those of an order that counts up."""

    def __init__(self, folder, monkeypatch, launch="first"):
        self.folder = folder
        monkeypatch.setenv("HOLDFAST_JOB", "job")
        self.workers = [SampleLedger(folder, launch, SAMPLES, GLOBAL, MICRO) for _ in range(3)]

    def compute(self, generation, step, worker, micros):
        position = step * GLOBAL
        given = {m: np.arange(position + m * MICRO, position + (m + 1) * MICRO) % SAMPLES for m in micros}
        self.workers[worker].giving(generation, step, position, given)

    def commit(self, generation, step, *workers):
        for worker in workers:
            self.workers[worker].committed(generation, step)

    def step(self, generation, step):
        self.compute(generation, step, 0, [0, 1])
        self.compute(generation, step, 1, [2, 3])
        self.commit(generation, step, 0, 1)


@pytest.fixture
def job(tmp_path, monkeypatch):
    job = Job(tmp_path, monkeypatch)
    yield job
    for worker in job.workers:
        worker.close()


def test_an_undisturbed_job_sees_each_sample_once_per_epoch(job):
    for step in range(5):
        job.step(1, step)
    seen = check(job.folder)
    assert (seen.samples, seen.steps) == (10, 5)
    assert seen.epochs == {e: dict.fromkeys(range(SAMPLES), 1) for e in range(4)}
    assert seen.repeated() == {}
    assert seen.missing(3) == 0
    assert seen.missing(4) == SAMPLES


def test_a_dropped_step_does_not_count(job):
    job.step(1, 0)
    job.compute(1, 1, 0, [0, 1])  # worker 1 was killed before its gradient was out
    for worker, micros in enumerate(([0], [1, 2], [3])):
        job.compute(2, 1, worker, micros)
    job.commit(2, 1, 0, 1, 2)
    assert check(job.folder).steps == 2


def test_the_step_of_a_worker_that_was_killed_after_its_vote_counts(job):
    job.compute(1, 0, 0, [0, 1])
    job.compute(1, 0, 1, [2, 3])
    job.commit(1, 0, 0)
    job.step(2, 1)
    assert check(job.folder).steps == 2


def test_a_step_that_is_tried_again_in_its_generation_counts_once(job):
    job.compute(1, 0, 0, [0, 1])  # the gradient was not finite
    job.step(1, 0)
    seen = check(job.folder)
    assert (seen.steps, seen.repeated()) == (1, {})


def test_a_commit_that_was_lost_with_all_who_knew_of_it_does_not_count(job):
    job.step(1, 0)
    job.step(1, 1)
    job.step(1, 2)
    job.compute(4, 1, 2, range(4))  # the newest snapshot is that of step 1
    job.commit(4, 1, 2)
    seen = check(job.folder)
    assert seen.steps == 2
    assert seen.repeated() == {}


def test_a_job_that_is_launched_again_counts_its_generations_anew(job, monkeypatch):
    for step in range(4):
        job.step(7, step)
    again = Job(job.folder, monkeypatch, "second")
    again.step(1, 2)
    assert check(job.folder).steps == 3
    again.step(1, 3)
    assert check(job.folder).repeated() == {}
    for worker in again.workers:
        worker.close()


def test_a_micro_batch_from_two_workers_is_found(job):
    job.compute(1, 0, 0, [0, 1, 2])
    job.compute(1, 0, 1, [2, 3])
    job.commit(1, 0, 0)
    with pytest.raises(DataError, match=r"step 0 .*\[0, 1, 2, 2, 3\]"):
        check(job.folder)


def test_a_micro_batch_from_nobody_is_found(job):
    job.compute(1, 0, 0, [0, 1])
    job.commit(1, 0, 0)
    with pytest.raises(DataError, match=r"\[0, 1\]"):
        check(job.folder)


def test_a_step_that_nobody_committed_is_found(job):
    job.step(1, 0)
    job.step(1, 2)
    with pytest.raises(DataError, match="step 1 was not committed, but step 2"):
        check(job.folder)


def test_wrong_samples_are_found(job):
    job.step(1, 0)
    job.workers[0].giving(1, 1, 8, {m: np.array([0, 0]) for m in range(4)})
    job.commit(1, 1, 0)
    assert check(job.folder).repeated()


def test_a_line_that_was_not_finished_is_left_out(job):
    job.step(1, 0)
    for path in job.folder.glob(f"*{SUFFIX}"):
        with path.open("ab") as file:
            file.write(b'{"g":1,"s":9')
    assert check(job.folder).steps == 1


def test_what_is_written_while_the_record_is_read_is_left_for_the_next_time(job):
    job.step(1, 0)
    job.step(1, 1)
    read = []

    def seen(nbytes):
        if not read:  # the first worker's file is read, and has no line of this step
            job.step(1, 2)
        read.append(nbytes)

    assert check(job.folder, seen=seen).steps == 2
    assert len(read) == 3
    assert check(job.folder).steps == 3


def test_a_later_commit_vouches_for_one_that_came_while_the_sizes_were_taken(job, monkeypatch):
    job.step(1, 0)
    job.compute(1, 1, 0, [0, 1])
    job.compute(1, 1, 1, [2, 3])
    files, calls = samples.files_of, []

    def one_by_one(*folders):
        calls.append(folders)
        for number, path in enumerate(files(*folders)):
            yield path
            if (len(calls), number) == (1, 0):  # the size of the first worker's file is known
                job.commit(1, 1, 0)
                job.compute(2, 2, 2, range(4))
                job.commit(2, 2, 2)

    monkeypatch.setattr(samples, "files_of", one_by_one)
    assert check(job.folder).steps == 3


def test_a_damaged_line_is_named(job):
    job.step(1, 0)
    path = min(job.folder.glob(f"*{SUFFIX}"))
    path.write_bytes(path.read_bytes().replace(b'{"g":1,"s":0}', b'{"g":1,"s":x}'))
    with pytest.raises(DataError, match=rf"{path}, line 3, is damaged"):
        check(job.folder)


def test_every_order_in_which_two_workers_may_die_in_a_step(job, tmp_path, monkeypatch):
    """Worker 0 and 1 each stop after some of: compute, commit. Survivor 2 goes on as the protocol says."""
    for number, (a, b) in enumerate(itertools.product(range(3), repeat=2)):
        job = Job(tmp_path / str(number), monkeypatch)
        done = {0: a, 1: b, 2: 1}
        committed = any(n == 2 for n in done.values())
        if committed and any(n == 0 for n in done.values()):
            continue  # nobody commits without the gradient of all
        for worker, micros in enumerate(([0], [1, 2], [3])):
            if done[worker] >= 1:
                job.compute(1, 0, worker, micros)
            if done[worker] == 2:
                job.commit(1, 0, worker)
        if all(n >= 1 for n in done.values()):
            job.commit(1, 0, 2)
        else:
            job.compute(2, 0, 2, range(4))
            job.commit(2, 0, 2)
        job.compute(2, 1, 2, range(4))
        job.commit(2, 1, 2)
        assert check(job.folder).repeated() == {}
        assert check(job.folder).steps == 2
        for worker in job.workers:
            worker.close()


def test_ledgers_of_two_jobs_are_not_mixed(job, monkeypatch):
    monkeypatch.setenv("HOLDFAST_JOB", "other")
    SampleLedger(job.folder, "first", SAMPLES, GLOBAL, MICRO).close()
    with pytest.raises(UsageError, match="records of job, other"):
        check(job.folder)


def test_no_ledger_and_no_folder(tmp_path):
    with pytest.raises(UsageError, match="no job"):
        check(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="ledger="):
        SampleLedger(tmp_path / "file", "first", SAMPLES, GLOBAL, MICRO)
