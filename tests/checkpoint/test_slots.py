"""Slots: the newest whole snapshot is never lost to a newer one, and what outlives its owner is whole or not there."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from blobs_on_tiers import blob_of
from snapshots_in_memory import (
    BLOB_AT,
    BUDGET,
    fill,
    flip,
    flip_file,
    index_of,
    is_right,
    key_of,
    new_folder,
    save,
    slot_files,
    steps_of,
)

from holdfast.checkpoint import memory
from holdfast.checkpoint.layout import CHUNK_BYTES
from holdfast.checkpoint.memory import PAGE, SlotMaps, SlotPool, SlotState, default_budget, hand_on, map_slot
from holdfast.errors import ChecksumError, StateError, TierError
from holdfast.protocol.machine import processes
from holdfast.protocol.machine.processes import Room


@pytest.fixture
def folder():
    folder = new_folder()
    yield folder
    memory.remove_memory(folder)


@pytest.fixture
def pool(folder):
    return SlotPool(folder, BUDGET)


# ---------------------------------------------------------------- a slot's life


def test_a_slot_counts_when_it_is_sealed(pool, folder):
    slot = fill(pool, key_of(10))
    assert [steps_of(pool), pool.writing(), slot.state] == [[], [slot], SlotState.WRITING]
    with pytest.raises(StateError, match="no snapshot of step 10, rank 0"), pool.reading(key_of(10)):
        pass
    pool.seal(slot, index_of(10, 100_000))
    assert [steps_of(pool), pool.writing()] == [[10], []]
    with pool.reading(key_of(10)) as held:
        assert held is slot
        assert is_right(held)
    pool.drop(slot)
    assert [steps_of(pool), slot.state, slot_files(folder)] == [[], SlotState.FREE, 1]


def test_a_slot_that_was_dropped_is_used_again(pool, folder):
    slot = fill(pool, key_of(10))
    pool.drop(slot)
    assert pool.begin(key_of(20), 90_000) is slot
    assert slot_files(folder) == 1


@pytest.mark.parametrize(("step", "nbytes"), [(11, 100_000), (10, 99_999)])
def test_an_index_of_another_blob_is_refused(pool, step, nbytes):
    slot = fill(pool, key_of(10))
    with pytest.raises(StateError, match=f"of step {step}, {nbytes} bytes"):
        pool.seal(slot, index_of(step, nbytes))
    assert [steps_of(pool), slot.state] == [[], SlotState.WRITING]


def test_a_slot_that_was_taken_back_cannot_be_sealed(pool):
    slot = fill(pool, key_of(10))
    pool.drop(slot)
    with pytest.raises(StateError, match="freed in the meantime"):
        pool.seal(slot, index_of(10, 100_000))
    assert steps_of(pool) == []


@pytest.mark.parametrize("nbytes", [0, 1, PAGE, CHUNK_BYTES, 3 * CHUNK_BYTES + 5])
def test_blobs_of_any_size(pool, folder, nbytes):
    slot = save(pool, key_of(10), nbytes)
    assert b"".join(map(bytes, slot.buffers())) == blob_of(10, 0, nbytes)
    assert [is_right(s, nbytes) for s in SlotPool(folder, BUDGET).held()] == [True]


def test_memory_that_went_bad_is_said_and_not_given_out(pool):
    slot = save(pool, key_of(10))
    flip(slot, 70_000)
    with pytest.raises(ChecksumError, match="step 10, rank 0 changed in memory: bytes 65536 to 98304"):
        list(slot.buffers())


# ---------------------------------------------------------------- which slot is used


def test_the_newest_whole_snapshot_is_never_overwritten(pool):
    first = save(pool, key_of(10))
    pool.snapshot_complete(10)
    second = fill(pool, key_of(20))
    assert second is not first
    with pytest.raises(TierError, match=r"steps \[10, 20\] are still being copied"):
        pool.begin(key_of(30), 100_000)
    pool.seal(second, index_of(20, 100_000))
    with pytest.raises(TierError, match=r"steps \[10, 20\] are still being copied"):
        pool.begin(key_of(30), 100_000)
    assert pool.skipped == 2
    pool.snapshot_complete(20)
    assert fill(pool, key_of(30)) is first
    assert [steps_of(pool), is_right(second)] == [[20], True]


def test_two_slots_are_used_in_turn(pool, folder):
    for step in range(10, 200, 10):
        save(pool, key_of(step))
        pool.snapshot_complete(step)
        assert steps_of(pool)[-1] == step
    assert slot_files(folder) == 2


def test_one_more_slot_while_one_is_read(pool, folder):
    save(pool, key_of(10))
    save(pool, key_of(20))
    pool.snapshot_complete(20)
    with pool.reading(key_of(10)) as old:
        save(pool, key_of(30))
        with pytest.raises(TierError, match=r"steps \[20, 30\]"):
            pool.begin(key_of(40), 100_000)
        assert is_right(old)
    assert [slot_files(folder), steps_of(pool)] == [3, [10, 20, 30]]
    save(pool, key_of(40))
    assert [slot_files(folder), steps_of(pool)] == [3, [20, 30, 40]]


def test_a_slot_that_is_read_is_not_used_even_when_it_was_forgotten(pool):
    save(pool, key_of(10))
    with pool.reading(key_of(10)) as slot:
        pool.forget(5)
        assert steps_of(pool) == []
        assert save(pool, key_of(6)) is not slot
        assert bytes(slot.blob) == blob_of(10, 0)
    assert fill(pool, key_of(7)) is slot


def test_each_shard_has_slots_of_its_own(pool, folder):
    for rank in range(3):
        for step in (10, 20):
            save(pool, key_of(step, rank))
    assert slot_files(folder) == 6
    assert all(is_right(s) for s in pool.held())


def test_a_state_that_grows_finds_new_slots_and_gives_the_small_ones_back(pool, folder):
    """An optimizer has no moments before its first step."""
    save(pool, key_of(10), 10_000)
    save(pool, key_of(20), 10_000)
    pool.snapshot_complete(20)
    save(pool, key_of(30))
    assert steps_of(pool) == [20, 30]
    pool.snapshot_complete(30)
    save(pool, key_of(40))
    assert [steps_of(pool), slot_files(folder)] == [[30, 40], 2]


def test_a_slot_that_is_far_too_large_is_not_taken_while_there_is_room(pool):
    large = fill(pool, key_of(10), 1_000_000)
    pool.drop(large)
    assert pool.begin(key_of(20), 10_000) is not large


def test_what_a_broken_generation_left_is_used_again(pool):
    save(pool, key_of(10))
    pool.snapshot_complete(10)
    stale = save(pool, key_of(20))  # never whole
    assert fill(pool, key_of(20, generation=2)) is stale


def test_a_step_that_is_saved_again_takes_its_own_slot(pool):
    save(pool, key_of(10))
    pool.snapshot_complete(10)
    before = save(pool, key_of(30))
    assert fill(pool, key_of(20)) is before
    assert steps_of(pool) == [10]


def test_forget_takes_back_what_never_happened(pool):
    for step, rank in ((10, 0), (20, 0), (20, 1), (30, 1)):
        save(pool, key_of(step, rank))
    pool.snapshot_complete(20)
    pool.forget(20)
    assert steps_of(pool) == [10, 20, 20]
    pool.forget(10)
    assert steps_of(pool) == [10]
    for step in (20, 30, 40, 50):
        if len(pool.writing()) < 3:
            fill(pool, key_of(step))  # in what became free; 10 is the newest whole one now
    with pytest.raises(TierError, match=r"steps \[10, 20, 30, 40\]"):
        pool.begin(key_of(60), 100_000)


def test_several_threads_never_share_a_slot(pool):
    right = []

    def one(rank):
        for step in range(10, 300, 10):
            slot = save(pool, key_of(step, rank), 50_000)
            right.append(is_right(slot, 50_000))
            pool.drop(slot)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert right == [True] * 4 * 29


# ---------------------------------------------------------------- no memory


def test_the_budget_is_kept_and_its_end_is_said_with_the_figures(folder):
    pool = SlotPool(folder, 5 << 20)
    save(pool, key_of(10), 2 << 20)
    save(pool, key_of(20), 2 << 20)
    pool.snapshot_complete(20)
    with pytest.raises(
        TierError, match=r"4 MiB does not fit: the slots take 2 of 5 MiB, and \d+ MiB of memory"
    ):
        pool.begin(key_of(20, rank=1), 3 << 20)
    assert [pool.skipped, steps_of(pool), slot_files(folder)] == [1, [20], 1]  # what is not needed made room


def test_memory_that_the_workers_need_is_left_alone(folder, monkeypatch):
    pool = SlotPool(folder, BUDGET)
    monkeypatch.setattr(memory, "free_bytes", lambda folder: memory.RESERVE_BYTES + (1 << 20))
    save(pool, key_of(10), 500_000)
    with pytest.raises(TierError, match=r"3 MiB does not fit.* and 65 MiB of memory are free"):
        pool.begin(key_of(20), 2 << 20)


def test_slots_that_were_brought_in_before_they_are_wanted(pool, folder):
    pool.prepare(0, 100_000, lambda: False)
    there = set(folder.iterdir())
    assert [len(there), steps_of(pool), pool.writing()] == [2, [], []]
    for step in (10, 20, 30):
        assert is_right(save(pool, key_of(step)))
        pool.snapshot_complete(step)
    pool.prepare(0, 100_000, lambda: False)
    assert set(folder.iterdir()) == there


def test_a_neighbours_copy_leaves_the_slots_that_were_brought_in(pool, folder):
    pool.prepare(0, 100_000, lambda: False)
    there = set(folder.iterdir())
    save(pool, key_of(10))
    save(pool, key_of(10, rank=1))
    before = set(folder.iterdir())
    assert len(before - there) == 1
    save(pool, key_of(20))  # finds its second slot
    assert set(folder.iterdir()) == before


def test_what_is_brought_in_takes_no_memory_from_a_snapshot(folder):
    pool = SlotPool(folder, 3 << 20)
    save(pool, key_of(10), 2 << 20)
    pool.prepare(0, 2 << 20, lambda: False)
    assert [slot_files(folder), pool.skipped] == [1, 0]
    pool.prepare(1, 600_000, lambda: False)
    assert slot_files(folder) == 2  # there is room for one
    pool.prepare(1, 600_000, lambda: False)
    save(pool, key_of(10, rank=2), 700_000)
    assert [steps_of(pool), slot_files(folder)] == [[10, 10], 2]  # which went for what is really there


def test_bringing_in_ends_when_the_job_does(pool, folder):
    answers = iter([False, True, True])
    pool.prepare(0, 100_000, lambda: next(answers))
    assert [slot_files(folder), pool.nbytes, pool.skipped] == [0, 0, 0]


def held_up(monkeypatch, rank_of_caller):
    """Bringing in waits until it is let go, in the threads of `rank_of_caller`; returns (it has begun, let it go)."""
    begun, go = threading.Event(), threading.Event()
    bring_in = memory.bring_in

    def slowly(*args):
        if threading.current_thread().name == rank_of_caller:
            begun.set()
            assert go.wait(30)
        return bring_in(*args)

    monkeypatch.setattr(memory, "bring_in", slowly)
    return begun, go


def test_a_slot_that_is_being_brought_in_is_waited_for(pool, folder, monkeypatch):
    begun, go = held_up(monkeypatch, "prepares")
    prepares = threading.Thread(
        target=pool.prepare, args=(0, 100_000, lambda: False), name="prepares", daemon=True
    )
    prepares.start()
    assert begun.wait(30)
    given = []
    saves = threading.Thread(target=lambda: given.append(fill(pool, key_of(10))), daemon=True)
    saves.start()
    # Another shard, and one of another size, do not wait.
    fill(pool, key_of(10, rank=1))
    fill(pool, key_of(10), 1 << 20)
    assert given == []
    go.set()
    for thread in (saves, prepares):
        thread.join(30)
        assert not thread.is_alive()
    assert [is_right(given[0]), slot_files(folder)] == [True, 3]


def test_who_waits_for_a_slot_that_cannot_be_had_brings_in_its_own(pool, folder, monkeypatch):
    begun, go = held_up(monkeypatch, "prepares")
    prepares = threading.Thread(
        target=pool.prepare, args=(0, 100_000, go.is_set), name="prepares", daemon=True
    )
    prepares.start()
    assert begun.wait(30)
    given = []
    saves = threading.Thread(target=lambda: given.append(fill(pool, key_of(10))), daemon=True)
    saves.start()
    go.set()
    for thread in (saves, prepares):
        thread.join(30)
        assert not thread.is_alive()
    assert [is_right(given[0]), slot_files(folder), pool._coming] == [True, 1, []]


def test_two_shards_are_not_promised_the_same_memory(folder, monkeypatch):
    pool = SlotPool(folder, 3 << 20)
    begun, go = held_up(monkeypatch, "prepares")
    prepares = threading.Thread(
        target=pool.prepare, args=(0, 2 << 20, lambda: False), name="prepares", daemon=True
    )
    prepares.start()
    assert begun.wait(30)
    pool.prepare(1, 2 << 20, lambda: False)
    assert slot_files(folder) == 1  # not even begun
    go.set()
    prepares.join(30)
    assert [pool.nbytes, slot_files(folder)] == [2 << 20, 1]


def test_bringing_in_ends_where_the_machine_becomes_short_of_memory(pool, folder, monkeypatch):
    left = iter([1 << 30])
    monkeypatch.setattr(memory, "free_bytes", lambda folder: next(left, memory.RESERVE_BYTES - 1))
    pool.prepare(0, 100_000, lambda: False)
    assert [slot_files(folder), pool.nbytes, pool._coming] == [0, 0, []]


def test_slots_that_the_state_has_outgrown_are_given_back(pool, folder):
    pool.prepare(0, 100_000, lambda: False)
    save(pool, key_of(10), 1 << 20)
    assert [slot_files(folder), pool.nbytes] == [1, 1 << 20]


@pytest.mark.parametrize("call", ["posix_fallocate", "open"])
def test_a_memory_file_system_that_refuses(folder, monkeypatch, call):
    pool = SlotPool(folder, BUDGET)

    def refuse(*args, **kwargs):
        raise OSError(28, "No space left on device")

    if call == "open":
        monkeypatch.setattr(Path, "open", refuse)
    else:
        monkeypatch.setattr(os, call, refuse)
    with pytest.raises(TierError, match="no memory for a snapshot of 1 MiB: No space left on device"):
        pool.begin(key_of(10), 100_000)
    monkeypatch.undo()
    assert [pool.skipped, slot_files(folder), pool.nbytes] == [1, 0, 0]
    save(pool, key_of(20))


def test_no_memory_for_a_head(pool, monkeypatch):
    slot = fill(pool, key_of(10))

    def refuse(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(TierError, match="head: No space left on device"):
        pool.seal(slot, index_of(10, 100_000))
    pool.drop(slot)
    monkeypatch.undo()
    assert save(pool, key_of(20)) is slot


def test_a_folder_that_somebody_removed_is_said(pool, folder):
    slot = fill(pool, key_of(10))
    memory.remove_memory(folder)
    with pytest.raises(TierError):
        pool.seal(slot, index_of(10, 100_000))
    pool.drop(slot)
    with pytest.raises(TierError, match="cannot be used"):
        pool.begin(key_of(20), 200_000)


def test_half_of_what_is_free_is_the_default(pool, folder):
    before = memory.free_bytes(folder)
    budget = default_budget(folder)
    # Other processes of this machine take memory and give it back meanwhile.
    assert 0 < budget <= max(before, memory.free_bytes(folder)) // 2 + PAGE


# ---------------------------------------------------------------- adoption


def test_sealed_slots_come_back_with_their_bytes_as_of_an_earlier_run(pool, folder):
    for step, rank in ((10, 0), (20, 0), (20, 1)):
        save(pool, key_of(step, rank, generation=3, world=2))
    second = SlotPool(folder, BUDGET)
    held = second.held()
    assert [(s.key.step, s.key.rank, s.key.world) for s in held] == [(10, 0, 2), (20, 0, 2), (20, 1, 2)]
    assert len({s.key.generation for s in held}) == 1
    assert held[0].key.generation < 0
    assert all(is_right(s) for s in held)
    assert second.nbytes >= pool.nbytes
    with second.reading(held[2].key) as slot:
        assert b"".join(map(bytes, slot.buffers())) == blob_of(20, 1)


def test_adopted_slots_of_different_generations_or_runs_are_never_one_snapshot(pool, folder):
    """Each began to count generations anew; mixed, their shards would be a state that never was."""
    save(pool, key_of(10, rank=0, generation=3, world=4))
    second = SlotPool(folder, BUDGET, run=7)
    save(second, key_of(10, rank=1, generation=3, world=4))
    save(second, key_of(10, rank=2, generation=3, world=4))
    third = SlotPool(folder, BUDGET, run=8)
    save(third, key_of(10, rank=3, generation=4, world=4))
    by_rank = {s.key.rank: s.key.generation for s in SlotPool(folder, BUDGET, run=9).held()}
    assert by_rank[1] == by_rank[2]
    assert len(set(by_rank.values())) == 3
    assert {s.key.rank: s.key.generation for s in SlotPool(folder, BUDGET, run=10).held()} == by_rank


def test_an_adopted_slot_of_the_same_run_keeps_its_generation(folder):
    first = SlotPool(folder, BUDGET, run=7)
    save(first, key_of(10, rank=1, generation=3, world=2))
    save(first, key_of(20, rank=1, generation=-5, world=2))  # a copy of what another node had adopted
    second = SlotPool(folder, BUDGET, run=7)
    assert [s.key for s in second.held()] == [s.key for s in first.held()]
    save(second, key_of(30, rank=1, generation=4, world=2))
    assert steps_of(second) == [10, 20, 30]  # nobody has said yet what is whole


def test_an_adopted_slot_keeps_its_file_when_the_new_owner_has_the_old_ones_number(pool, folder):
    """As in containers, where every agent may be process 7."""
    save(pool, key_of(10))
    second = SlotPool(folder, BUDGET)
    save(second, key_of(20))
    assert [steps_of(SlotPool(folder, BUDGET)), slot_files(folder)] == [[10, 20], 2]


def test_an_adopted_slot_is_not_overwritten_before_anybody_says_what_is_whole(pool, folder):
    save(pool, key_of(10))
    second = SlotPool(folder, BUDGET)
    save(second, key_of(20, generation=1))
    assert steps_of(second) == [10, 20]
    second.snapshot_complete(20)
    save(second, key_of(30, generation=1))
    assert [steps_of(second), slot_files(folder)] == [[20, 30], 2]


def test_adopted_slots_of_a_run_that_nobody_continues_make_room(pool, folder):
    for step, rank in ((500, 0), (510, 0), (510, 1)):
        save(pool, key_of(step, rank), 2 << 20)
    second = SlotPool(folder, 7 << 20)
    save(second, key_of(10), 2 << 20)
    save(second, key_of(20), 2 << 20)
    assert {10, 20} <= set(steps_of(second))


@pytest.mark.parametrize("end", ["writing", "dropped", "forgotten"])
def test_slots_that_do_not_count_are_given_back(pool, folder, end):
    slot = fill(pool, key_of(10)) if end == "writing" else save(pool, key_of(10))
    if end == "dropped":
        pool.drop(slot)
    if end == "forgotten":
        pool.forget(5)
    assert [steps_of(SlotPool(folder, BUDGET)), slot_files(folder)] == [[], 0]


@pytest.mark.parametrize(
    "at", [0, 8, 12, 16, 24, 30, 40, 50, 70, 79, BLOB_AT, BLOB_AT + 50_000, BLOB_AT + 99_999, -1, -40, -200]
)
def test_any_flipped_bit_gives_a_slot_back_and_leaves_the_others(pool, folder, at):
    slot = save(pool, key_of(10))
    other = save(pool, key_of(20))
    size = slot.path.stat().st_size
    flip_file(slot.path, at if at >= 0 else size + at)
    again = SlotPool(folder, BUDGET)
    assert [steps_of(again), slot.path.exists(), other.path.exists()] == [[20], False, True]


@pytest.mark.parametrize("left", [0, 7, 50, PAGE, PAGE + 50_000, -1])
def test_a_file_that_is_cut_short_is_given_back(pool, folder, left):
    path = save(pool, key_of(10)).path
    os.truncate(path, left if left >= 0 else path.stat().st_size + left)
    assert [steps_of(SlotPool(folder, BUDGET)), slot_files(folder)] == [[], 0]


def test_other_files_are_not_touched(folder):
    SlotPool(folder, BUDGET)
    (folder / "notes").write_text("x")
    SlotPool(folder, BUDGET)
    assert (folder / "notes").exists()


CHILD = """
import sys
from pathlib import Path
from types import SimpleNamespace
from snapshots_in_memory import BUDGET, fill, key_of, save
from holdfast.checkpoint.memory import SlotPool
from holdfast.checkpoint.memory import map_slot
what, folder = sys.argv[1], Path(sys.argv[2])
if what == "owner":
    pool = SlotPool(folder, BUDGET)
    save(pool, key_of(10)), save(pool, key_of(20))
    fill(pool, key_of(30, rank=1))
else:
    memory = map_slot(folder, 100_000)
    memory[4096:50_000] = b"y" * (50_000 - 4096)
print("ready", flush=True)
sys.stdin.read()
"""


def killed(what, path):
    """A process that is killed where it stands."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, what, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=env,
    )
    assert child.stdout.readline() == "ready\n"
    child.kill()
    child.communicate()
    assert child.returncode == -signal.SIGKILL


def test_the_memory_of_a_killed_owner_is_adopted(folder):
    killed("owner", folder)
    pool = SlotPool(folder, BUDGET)
    assert [steps_of(pool), slot_files(folder), all(map(is_right, pool.held()))] == [[10, 20], 2, True]


def test_a_worker_that_is_killed_in_the_middle_of_its_copy(pool, folder):
    save(pool, key_of(10))
    slot = pool.begin(key_of(20), 100_000)
    killed("worker", slot.path)
    assert slot.path.exists()
    assert [steps_of(SlotPool(folder, BUDGET)), slot.path.exists()] == [[10], False]


def test_a_workers_mapping_shows_the_slot_and_goes_with_it(pool, folder):
    slot = pool.begin(key_of(10), 100_000)
    maps = SlotMaps()
    with maps.blob(str(slot.path), 100_000) as blob:
        blob[:] = blob_of(10, 0)
    assert is_right(slot)
    slot.path.unlink()
    with pytest.raises(TierError, match="cannot be opened"):
        map_slot(slot.path, 100_000)
    other = pool.begin(key_of(20), 100_000)
    maps.blob(str(other.path), 100_000).release()
    assert list(maps._maps) == [str(other.path)]


# ---------------------------------------------------------------- the folder


@pytest.mark.parametrize("mode", [0o750, 0o705, 0o777])
def test_a_folder_that_is_open_to_others_is_refused(folder, mode):
    folder.mkdir(parents=True)
    folder.chmod(mode)
    with pytest.raises(TierError, match="remove it, or set HOLDFAST_MEMORY"):
        SlotPool(folder, BUDGET)


def test_a_link_or_a_file_is_no_folder(folder):
    folder.parent.mkdir(parents=True)
    folder.symlink_to("/dev/shm")
    with pytest.raises(TierError, match="other users have access"):
        SlotPool(folder, BUDGET)
    folder.unlink()
    folder.touch(mode=0o600)
    with pytest.raises(TierError, match="other users have access"):
        SlotPool(folder, BUDGET)
    with pytest.raises(TierError, match="set HOLDFAST_MEMORY"):
        SlotPool(folder / "below", BUDGET)
    folder.unlink()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a folder somebody else's")
def test_a_folder_within_somebody_elses_is_refused(folder):
    folder.parent.mkdir(parents=True)
    os.chown(folder.parent, 12345, 12345)
    with pytest.raises(TierError, match="other users have access"):
        SlotPool(folder, BUDGET)


def test_everything_made_is_for_nobody_elses_eyes(pool, folder):
    save(pool, key_of(10))
    made = [folder, *list(folder.parents)[:2]]
    assert [p.stat().st_mode & 0o077 for p in made] == [0, 0, 0]


def test_close_leaves_nothing(pool, folder):
    slot = save(pool, key_of(10))
    pool.close()
    assert not folder.parents[1].exists()
    assert [pool.held(), pool.nbytes] == [[], 0]
    pool.drop(slot)  # whoever comes late does no harm
    assert not folder.parents[1].exists()


def test_close_leaves_what_others_have_there(pool, folder):
    other = SlotPool(folder.parent / "other", BUDGET)
    save(other, key_of(10))
    pool.close()
    assert steps_of(SlotPool(other.folder, BUDGET)) == [10]
    other.close()
    assert not folder.parents[1].exists()


def test_folders_that_others_remove_at_the_same_moment(folder):
    trouble = []

    def one(name):
        try:
            for _ in range(50):
                SlotPool(folder / name, BUDGET).close()
        except TierError as error:
            trouble.append(error)

    threads = [threading.Thread(target=one, args=(name,)) for name in "abc"]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert trouble == []


def test_memory_of_nodes_that_are_not_started_again_is_handed_on(tmp_path):
    for age, name in enumerate(("node9", "node1", "node7", "node0", "node4")):
        (tmp_path / name).mkdir()
        slot = tmp_path / name / "slot"
        slot.write_text(name)
        os.utime(slot, (1000 - age, 1000 - age))
    hand_on(tmp_path, ["node0", "node1", "node2", "node3"])
    found = {d.name: (d / "slot").read_text() for d in tmp_path.iterdir()}
    assert found == {
        "node0": "node0",
        "node1": "node1",
        "node2": "node9",
        "node3": "node7",
    }  # node4 is the oldest
    hand_on(tmp_path, ["node0", "node1", "node2", "node3"])
    assert {d.name: (d / "slot").read_text() for d in tmp_path.iterdir()} == found
    hand_on(tmp_path / "none", ["node0"])


def test_memory_that_workers_have_taken_is_not_free(tmp_path, monkeypatch):
    """The memory file system says that it has room, and the machine has none."""
    meminfo = tmp_path / "meminfo"
    monkeypatch.setattr(processes, "PROC", tmp_path)
    monkeypatch.setattr(processes, "CGROUP", tmp_path)
    meminfo.write_text("MemTotal:       16000 kB\nMemFree:  10 kB\nMemAvailable:    3000 kB\n")
    assert memory.free_bytes(tmp_path) == (3000 - 1000) << 10
    meminfo.write_text("MemTotal:       16000 kB\nMemAvailable:    300 kB\nHugePages_Total:  0\n")
    assert memory.free_bytes(tmp_path) == 0


def test_memory_beyond_the_container_s_limit_is_not_free(tmp_path, monkeypatch):
    """Neither the machine nor the memory file system knows of the limit, and both have more."""
    monkeypatch.setattr(processes, "PROC", tmp_path)
    monkeypatch.setattr(processes, "CGROUP", tmp_path)
    (tmp_path / "meminfo").write_text(f"MemTotal: {1 << 24} kB\nMemAvailable: {1 << 24} kB\n")
    (tmp_path / "memory.max").write_text(f"{1600 << 10}\n")
    (tmp_path / "memory.current").write_text(f"{500 << 10}\n")
    (tmp_path / "memory.stat").write_text("shmem 5\n")
    assert memory.free_bytes(tmp_path) == (1600 - 500 - 100) << 10
    assert default_budget(tmp_path) == 500 << 10
    # What an agent before this one left there is used, and half of the container is still the workers'.
    assert default_budget(tmp_path, 400 << 10) == 700 << 10
    assert default_budget(tmp_path, 1200 << 10) == 1200 << 10


@pytest.mark.parametrize(("blocks", "free"), [(0, 3000 << 10), (900, 700 << 10)])
def test_a_memory_file_system_bounds_what_is_free_by_its_size_if_it_has_one(
    tmp_path, monkeypatch, blocks, free
):
    monkeypatch.setattr(memory, "rooms", lambda: [Room(0, 3000 << 10)])
    size = SimpleNamespace(f_blocks=blocks, f_bavail=blocks and 700, f_frsize=1024)
    monkeypatch.setattr(os, "statvfs", lambda folder: size)
    assert memory.free_bytes(tmp_path) == free


@pytest.mark.parametrize(("blob_bytes", "head_bytes"), [(2**50, 100), (100_000, 2**35), (100_000, 2**63 - 1)])
def test_a_slot_that_says_more_than_its_file_has_is_given_back(pool, folder, blob_bytes, head_bytes):
    slot = save(pool, key_of(10))
    fields = list(memory._HEADER.unpack(memory._fields(slot)[: memory._HEADER.size]))
    fields[7:9] = blob_bytes, head_bytes
    checked = memory._HEADER.pack(*fields)
    with slot.path.open("r+b") as file:
        file.write(checked + memory.xxhash.xxh3_64_digest(checked))
    assert SlotPool(folder, BUDGET).held() == []
    assert slot_files(folder) == 0
