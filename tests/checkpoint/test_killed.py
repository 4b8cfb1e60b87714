"""SIGKILL, and a full disk, at every single point of saving, committing and pruning, with a process that really dies:
what was saved before is whole, what is reported whole can be read, and the next save goes on from there.
"""

import errno
import os
import signal
import sys

import pytest
from blobs_on_tiers import blob_of, loaded, save
from snapshots_in_memory import BUDGET, is_right, key_of, new_folder
from snapshots_in_memory import save as snapshot

from holdfast.checkpoint.archive import Archive
from holdfast.checkpoint.memory import SlotPool, remove_memory
from holdfast.checkpoint.policy import Retention
from holdfast.errors import TierError

EVENTS = {
    "open",
    "os.rename",
    "os.remove",
    "os.mkdir",
    "os.rmdir",
    "os.scandir",
    "shutil.rmtree",
    "mmap.__new__",
}
CALLS = ("write", "fsync", "posix_fallocate")
MOST_POINTS = 400


def at_point(number, strike):
    """From now on, in this process, the call with this number strikes; of calls that touch files."""
    left = [number]

    def count():
        left[0] -= 1
        if left[0] == 0:
            strike()

    def counted(call):
        def counting(*args):
            count()
            return call(*args)

        return counting

    sys.addaudithook(lambda event, args: count() if event in EVENTS else None)
    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))


def killed_at(number, action):
    """A process that is killed at a point of an action. False: it came to the end before."""
    pid = os.fork()
    if pid == 0:
        try:
            at_point(number, lambda: os.kill(os.getpid(), signal.SIGKILL))
            action()
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) == -signal.SIGKILL


def kill_everywhere(action, check):
    """Kills at the first point, the second, and so on; returns how many there were."""
    for number in range(1, MOST_POINTS):
        if not killed_at(number, action):
            return number - 1
        check(number)
    raise AssertionError("it never comes to an end")


@pytest.fixture
def archive(tmp_path):
    there = Archive(str(tmp_path / "saved"))
    for step in (5, 10):
        save(there, step)
    return there


def whole(archive):
    """Every checkpoint that is said to be there, verified."""
    steps = archive.steps()
    for step in steps:
        assert archive.verify(step).step == step
        assert loaded(archive, step) == [blob_of(step, rank) for rank in range(2)]
    return steps


@pytest.mark.parametrize("fresh", [True, False])
def test_killed_at_every_point_of_a_save(archive, fresh):
    """Each attempt begins anew, or finds what the ones before it left."""
    seen = []

    def check(number):
        seen.append(whole(archive))
        if fresh:
            archive.remove(20)

    points = kill_everywhere(lambda: save(archive, 20), check)
    assert points > (20 if fresh else 10)
    assert all(steps in ([5, 10], [5, 10, 20]) for steps in seen)
    assert [5, 10] in seen
    assert whole(archive) == [5, 10, 20]


def test_killed_at_every_point_of_a_prune(archive):
    save(archive, 20)
    save(archive, 30)

    def prune():
        archive.prune(Retention(keep=1, keep_every=20), unfinished=True)

    def check(number):
        there = whole(archive)
        assert {20, 30} <= set(there)
        for step in (5, 10):  # what went is saved anew, for the next one that is killed
            if step not in there:
                save(archive, step)

    assert kill_everywhere(prune, check) > 5
    assert whole(archive) == [20, 30]
    assert sorted(archive.tier.folders()) == ["step-20", "step-30"]


def test_killed_at_every_point_of_a_copy_into_memory():
    folder = new_folder()
    try:
        with_one = SlotPool(folder, BUDGET)
        snapshot(with_one, key_of(10))

        def take():
            pool = SlotPool(folder, BUDGET)
            pool.snapshot_complete(10)
            snapshot(pool, key_of(20))

        def check(number):
            pool = SlotPool(folder, BUDGET)  # as the next agent finds it
            steps = [slot.key.step for slot in pool.held()]
            assert steps in ([10], [10, 20], [20]), (number, steps)
            assert all(map(is_right, pool.held()))
            if 20 in steps:
                pool.forget(10)
            if 10 not in steps:
                snapshot(pool, key_of(10))

        assert kill_everywhere(take, check) > 3
    finally:
        remove_memory(folder)


def test_a_disk_that_is_full_from_any_point_on(archive, monkeypatch):
    """Whatever is written from the N-th time on does not fit."""
    real = {name: getattr(os, name) for name in ("write", "fsync", "mkdir")}
    said = set()
    for number in range(1, MOST_POINTS):
        left = [number]

        def full(call, left=left):
            def refusing(*args, **more):
                left[0] -= 1
                if left[0] <= 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return call(*args, **more)

            return refusing

        with monkeypatch.context() as patch:
            for name, call in real.items():
                patch.setattr(os, name, full(call))
            try:
                save(archive, 20)
            except TierError as error:
                said.add(str(error))
            else:
                break
        assert whole(archive) in ([5, 10], [5, 10, 20])
        assert not list(archive.tier.folder.rglob(".*")), "nothing half written is left in its way"
        archive.remove(20)
    assert number > 10
    assert all("the disk is full: free some space" in text for text in said)
    assert whole(archive) == [5, 10, 20]
