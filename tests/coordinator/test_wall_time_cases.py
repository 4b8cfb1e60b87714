"""Every second of the wall time is in one class, over all starts; what cannot be known is None."""

import random

import msgspec
import pytest
from desk import Desk, copy_of, running
from test_generation_cases import end, launched
from test_step_accounting_cases import fails, gives, loads

from holdfast.coordinator.kernel import events as e
from holdfast.coordinator.kernel.state import CoreState
from holdfast.coordinator.machine import Core
from holdfast.coordinator.membership import wall_time
from holdfast.coordinator.service import job_view
from holdfast.coordinator.service.metrics import metrics_text
from holdfast.coordinator.service.tally import Tally
from holdfast.protocol import messages as m
from holdfast.protocol.phases import Spent, TimeClass

T = TimeClass
AFTER_S = 0.01
"""Between two events of a desk."""
GIVEN_S = 3 * AFTER_S
"""For `gives`: its three words arrive between two steps."""


def spent(desk: Desk) -> dict[TimeClass, float]:
    """The classes, which add up."""
    found = wall_time.classes(desk.state, desk.now)
    assert sum(found.values()) == pytest.approx(desk.now - desk.state.began_s, abs=1e-9)
    assert min(found.values()) > 0
    return found


def told(desk: Desk) -> tuple[float | None, float | None, float | None]:
    """Productive, recomputed, computed: as the report has them; the metrics leave out what is unknown."""
    shown = job_view.goodput_of(desk.state, desk.now)
    assert sum(shown.classes.values()) == pytest.approx(shown.wall_s, abs=1e-3)
    known = shown.productive_s is not None
    assert known == (shown.share is not None) == ("productive" not in shown.unknown)
    text = metrics_text(desk.state, Tally(), desk.now).decode()
    assert known == ('holdfast_time_seconds{class="productive"}' in text)
    return shown.productive_s, shown.recomputed_s, shown.computed_s


def steps(desk: Desk, *took_s: float, since: int = 0) -> None:
    """Rank 0 makes steps that take so long, after `since` steps of this start."""
    for count, seconds in enumerate(took_s, since + 1):
        desk.wait(seconds - AFTER_S)
        word = m.Progress(generation=desk.state.membership.number, committed=count, median_s=0.1)
        desk.says(desk.members()[0], word)


def near(*values: float) -> tuple[object, ...]:
    return tuple(pytest.approx(v, abs=1e-5) for v in values)


# ---------------------------------------------------------------- levels 0 and 1


def test_one_start():
    desk = launched(2)
    launch_s = desk.now
    steps(desk, 3.0, 0.5, 0.25)
    found = spent(desk)
    assert found[T.START] == pytest.approx(launch_s - desk.state.began_s + 3.0)
    assert told(desk) == near(0.75, 0.0, 0.75)
    desk.exits(desk.members()[0], 0)
    desk.wait(5.0)
    desk.exits(desk.members()[1], 0)
    assert desk.state.membership.outcome == "finished"
    assert told(desk) == near(0.75, 0.0, 0.75)
    assert spent(desk)[T.SAVING] == pytest.approx(5.0 + 2 * AFTER_S)


def test_steps_that_a_restart_rolled_back_are_not_productive():
    desk = launched(2)
    loads(desk, None)
    steps(desk, 1.0, 0.5, 0.5)
    gives(desk, 3, 3)
    steps(desk, 0.4, 0.3, since=3)
    began_s = desk.now
    fails(desk)
    found = spent(desk)
    assert (found[T.INTERRUPTED], found[T.DECIDE]) == near(AFTER_S, desk.now - began_s - AFTER_S)
    assert told(desk)[0] is None  # nobody knows yet where the script goes on
    loads(desk, 3)
    assert told(desk) == near(1.0, 0.7 + GIVEN_S, 1.7 + GIVEN_S)
    steps(desk, 2.0, 0.4, 0.3)
    assert spent(desk)[T.RESTART] == pytest.approx(2.0 + AFTER_S)
    assert told(desk) == near(1.7, 0.7 + GIVEN_S, 2.4 + GIVEN_S)
    fails(desk)
    loads(desk, 3)  # what it gave then is rolled back to once more
    assert told(desk) == near(1.0, 1.4 + GIVEN_S, 2.4 + GIVEN_S)


def test_a_script_that_never_says_where_it_went_on():
    desk = launched(2)
    steps(desk, 1.0, 0.5, 0.5)
    assert told(desk) == near(1.0, 0.0, 1.0)
    fails(desk)
    steps(desk, 2.0, 0.5)
    assert told(desk) == (None, None, pytest.approx(1.5))
    assert spent(desk)[T.COMPUTED] == pytest.approx(1.5)
    assert job_view.goodput_of(desk.state, desk.now).unknown == ["productive", "recomputed"]


def test_a_script_without_optimizer_steps():
    desk = launched(2)
    desk.wait(40.0)
    assert told(desk) == (None, None, None)
    fails(desk)
    desk.wait(20.0)
    assert told(desk) == (None, None, None)
    found = spent(desk)
    assert found[T.UNEXPLAINED] == pytest.approx(60.0 + AFTER_S)
    assert T.RESTART not in found


def test_a_fault_before_it_was_noticed():
    """The time of an injected fault is known, also if it is heard of after its effect."""
    desk = launched(2)
    steps(desk, 1.0, 0.5)
    worker = desk.members()[1]
    desk.do(
        e.Injected(
            fault="kill-worker:rank=1", kind="kill-worker", node=worker.partition(".")[0], worker=worker
        ),
        0.2,
    )
    desk.do(e.NodeSays(worker.partition(".")[0], m.Exited(worker=worker, code=-9, steps=2)), 0.3)
    assert spent(desk)[T.INTERRUPTED] == pytest.approx(0.5)
    end(desk)
    found = spent(desk)
    assert (found[T.INTERRUPTED], found[T.DETECT]) == near(0.2, 0.3)


def test_a_restart_that_was_planned():
    desk = launched(2)
    loads(desk, None)
    steps(desk, 1.0, 0.5)
    desk.wait(0.3)
    desk.do(e.ResizeRequested(1, "night"))
    end(desk)
    assert desk.state.membership.number == 2
    loads(desk, None)
    found = spent(desk)
    planned_s = desk.now - desk.state.began_s - found[T.START] - 0.5
    assert found[T.PLANNED] == pytest.approx(planned_s)
    steps(desk, 2.0, 0.5)
    assert spent(desk)[T.PLANNED] == pytest.approx(planned_s + 2.0)
    assert {T.RESTART, T.INTERRUPTED, T.DECIDE}.isdisjoint(spent(desk))


def test_words_that_were_long_on_their_way():
    """They waited in an agent, and tell of steps before those that are known."""
    desk = launched(2)
    steps(desk, 1.0, 0.5)
    desk.says(desk.members()[0], m.Progress(generation=1, committed=3, median_s=0.1), age_s=30.0)
    assert told(desk)[0] == pytest.approx(0.5 + AFTER_S)
    spent(desk)
    desk.exits(desk.members()[1], -9)
    steps(desk, 0.4, since=3)  # all are to end, and one has not yet
    desk.wait(0.2)
    found = spent(desk)
    assert found[T.DECIDE] == pytest.approx(0.6)
    assert told(desk)[2] == pytest.approx(0.5)


@pytest.mark.parametrize("seed", range(100))
def test_random_schedules_of_starts(seed):
    """Against an account of its own: one entry for each step that stayed, with its seconds."""
    rng = random.Random(seed)
    desk = launched(2)
    stayed: list[float] = []
    again_s = 0.0
    saved: dict[int | None, int] = {None: 0}
    tells = rng.random() < 0.8
    for start in range(last := rng.randint(1, 6)):
        if tells:
            # Of states that it can have: what was given after the one that it went back to may be given again.
            saved = {k: at for k, at in saved.items() if at <= len(stayed)}
            name = rng.choice(list(saved)) if len(saved) > 1 else None
            loads(desk, name)
            again_s += sum(stayed[saved[name] :])
            del stayed[saved[name] :]
        began_s: float | None = None
        made = rng.randint(0, 8)
        for count in range(1, made + 1):
            steps(desk, rng.uniform(0.02, 3.0), since=count - 1)
            stayed.append(desk.now - began_s if began_s is not None else 0.0)
            began_s = desk.now
            spent(desk)
            if tells and rng.random() < 0.3:
                number = rng.randint(0, 20)  # the script's own, which may be that of a state before
                saved[number] = len(stayed)
                desk.says(desk.members()[0], m.StateServed(desk.state.membership.number, number, count))
        if start + 1 < last:
            desk.wait(rng.uniform(0.0, 2.0))
            fails(desk, last=made)
            desk.wait(rng.uniform(0.0, 2.0))
            spent(desk)
    if (job_view.step_counts(desk.state).computed or 0) == 0:
        assert told(desk) == (None, None, None)
    elif (not tells and last > 1) or desk.state.step is None:
        assert told(desk)[:2] == (None, None)
    else:
        open_s = desk.now - began_s if began_s is not None else 0.0
        assert told(desk)[:2] == near(sum(stayed) + open_s, again_s)


def test_what_is_gone_back_to_far_is_known_too():
    """Few of many steps are remembered, and between them they are as long as their mean."""
    desk = launched(2)
    loads(desk, None)
    steps(desk, *[0.1] * 50)
    desk.says(desk.members()[0], m.StateServed(1, 50, 50))
    steps(desk, *[0.1] * 950, since=50)
    assert len(desk.state.membership.wall.told) <= wall_time.KEPT
    fails(desk)
    loads(desk, 50)
    assert told(desk)[:2] == (pytest.approx(4.9, abs=2e-3), pytest.approx(95.01, abs=2e-3))


# ---------------------------------------------------------------- the last hour


@pytest.fixture
def short(monkeypatch):
    """A window of a minute: a desk's nodes say several times in each second that they live."""
    monkeypatch.setattr(wall_time, "WINDOW_S", 60.0)
    monkeypatch.setattr(wall_time, "MARK_EVERY_S", 5.0)


@pytest.mark.usefixtures("short")
def test_the_last_hour_is_the_difference_to_the_account_of_an_hour_before():
    """At an edge of stretches that has a mark it is exact."""
    desk = launched(2)
    loads(desk, None)
    steps(desk, 1.0)
    gives(desk, 1, 1)
    steps(desk, *[0.5] * 100, since=1)
    computed_s = spent(desk)[T.PRODUCTIVE]
    fault_s = desk.now
    fails(desk)
    loads(desk, None)
    desk.wait(3.0)
    at: dict[float, dict[TimeClass, float]] = {}
    for count in range(30):
        steps(desk, 0.5, since=count)
        at[desk.now] = spent(desk)
    # Of what was rolled back, the window has what it had of those steps: they do not take from the new ones.
    found, new_s = wall_time.recent(desk.state, desk.now), desk.now - min(at)
    assert found[T.PRODUCTIVE] == pytest.approx(new_s)
    assert found[T.RECOMPUTED] == pytest.approx(wall_time.WINDOW_S - (desk.now - fault_s), abs=0.1)
    start_s = next(mark.at_s for mark in desk.state.membership.wall.marks if mark.at_s in at)
    assert start_s > fault_s
    steps(desk, start_s + wall_time.WINDOW_S - desk.now, since=30)
    found, now = wall_time.recent(desk.state, desk.now), spent(desk)
    # What was rolled back was spent before the window.
    assert now[T.RECOMPUTED] == pytest.approx(computed_s, abs=0.1)
    grown = {kind: s - at[start_s].get(kind, 0.0) for kind, s in now.items()}
    assert found == pytest.approx({kind: s for kind, s in grown.items() if s})
    assert found == {T.PRODUCTIVE: pytest.approx(wall_time.WINDOW_S)}
    shown = job_view.goodput_of(desk.state, desk.now)
    assert shown.recent.share == pytest.approx(found[T.PRODUCTIVE] / wall_time.WINDOW_S, abs=1e-4)
    text = metrics_text(desk.state, Tally(), desk.now).decode()
    assert f"holdfast_recent_goodput {shown.recent.share}" in text


def test_a_job_younger_than_the_window():
    desk = launched(2)
    steps(desk, 1.0, 0.5)
    assert wall_time.recent(desk.state, desk.now) == pytest.approx(spent(desk))


@pytest.mark.usefixtures("short")
def test_a_stretch_longer_than_the_window():
    """One step took very long: the window has none of before, and no more of it than fits."""
    desk = launched(2)
    loads(desk, None)
    steps(desk, 1.0, *[1.0] * 20)
    desk.wait(2 * wall_time.WINDOW_S)
    assert wall_time.recent(desk.state, desk.now) == {T.PRODUCTIVE: pytest.approx(wall_time.WINDOW_S)}
    fault_s = desk.now + AFTER_S
    fails(desk)
    loads(desk, None)
    steps(desk, 1.0)
    found = wall_time.recent(desk.state, desk.now)
    assert sum(found.values()) == pytest.approx(wall_time.WINDOW_S)
    assert found[T.INTERRUPTED] == pytest.approx(wall_time.WINDOW_S - (desk.now - fault_s))
    assert T.PRODUCTIVE not in found


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("seed", range(20))
def test_the_last_hour_of_random_schedules(seed):
    """Each class of it is its own growth since an hour ago, once that hour's rollbacks are known; marks stay few."""
    rng = random.Random(seed)
    desk = launched(2)
    began_s = desk.state.began_s
    for _ in range(rng.randint(2, 5)):
        loads(desk, rng.choice([None, 1]))
        now = wall_time.classes(desk.state, desk.now)
        recent = wall_time.recent(desk.state, desk.now)
        assert recent.get(T.PRODUCTIVE, 0.0) <= now.get(T.PRODUCTIVE, 0.0) + 1e-6
        for count in range(rng.randint(1, 40)):
            steps(desk, rng.choice([0.1, 0.5, 2.0, 8.0]), since=count)
            gives(desk, 1, count + 1) if rng.random() < 0.1 else None
            found = wall_time.recent(desk.state, desk.now)
            assert sum(found.values()) == pytest.approx(min(wall_time.WINDOW_S, desk.now - began_s))
            whole = spent(desk)
            assert all(0.0 < s <= whole[kind] + 1e-6 for kind, s in found.items())
            assert (
                len(desk.state.membership.wall.marks) <= 2 * wall_time.WINDOW_S / wall_time.MARK_EVERY_S + 2
            )
        fails(desk)
        desk.wait(rng.choice([0.1, 3.0, 20.0]))
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(desk.state), type=CoreState)
    assert wall_time.recent(again, desk.now) == wall_time.recent(desk.state, desk.now)


# ---------------------------------------------------------------- level 2


def test_the_phases_of_a_recovery():
    desk = running(3, spares=1, committed=5)
    desk.do(e.Tick(), 0.5)
    desk.commit(6)
    before = spent(desk)
    desk.lose("n1")
    for worker in ("n0.0#1", "n2.0#3"):
        desk.parks(worker, 6)
    desk.do(e.Tick(), 0.5)
    for worker in desk.members():
        desk.says(worker, m.Joined(desk.state.membership.number, 0.1, 0.3))
    desk.do(e.Tick(), 0.2)
    desk.commit(7)
    found = spent(desk)
    assert found.keys() - before.keys() == {T.INTERRUPTED, T.DECIDE, T.JOIN, T.RESTORE, T.FIRST_STEP}
    assert (found[T.JOIN], found[T.RESTORE]) == near(0.1, 0.3)
    assert found[T.FIRST_STEP] == pytest.approx(0.3 + 4 * AFTER_S)
    assert (found[T.INTERRUPTED], found[T.DECIDE]) == near(AFTER_S + 2 * AFTER_S, 2 * AFTER_S)
    assert told(desk)[1] == 0.0


def test_a_change_of_the_membership_that_was_planned():
    desk = running(3, committed=5)
    first_s = desk.now - 2 * AFTER_S
    desk.do(e.ResizeRequested(2, "night"))
    desk.do(e.Tick(), 0.5)
    first, *others = desk.members()
    desk.parks(first, 6)  # nobody told of this step before
    left_s = desk.now
    assert told(desk)[2] == pytest.approx(left_s - first_s)
    for worker in others:
        desk.parks(worker, 6)
    desk.do(e.Tick(), 0.5)
    assert desk.state.membership.number == 2
    desk.commit(7)
    found = spent(desk)
    assert found[T.PLANNED] == pytest.approx(desk.now - AFTER_S - left_s)
    assert T.INTERRUPTED not in found


def test_steps_that_were_lost_at_level_2():
    desk = running(1, committed=0)
    desk.commit(1)
    for step in range(2, 11):
        desk.do(e.Tick(), 0.5 - AFTER_S)
        desk.commit(step)
        if step == 6:
            desk.snapshot(6, "n0")
    desk.stores()
    assert told(desk)[1] == 0.0
    desk.exits(desk.members()[0], -9)
    desk.ready(desk.workers()[0])
    assert desk.state.membership.lost_steps == 4
    # Those after the sixth; the word of its snapshot came in the middle of one.
    assert told(desk)[:2] == near(5 * 0.5, 4 * 0.5 + AFTER_S)
    spent(desk)


def test_work_of_the_script_s_own_is_no_training():
    desk = running(2, committed=5)
    first, second = desk.members()
    desk.says(first, m.OffStep(True))
    computed_s = told(desk)[2]
    desk.do(e.Tick(), 0.4)
    desk.says(second, m.Progress(generation=1, committed=6, median_s=0.1))  # a late word
    desk.says(second, m.OffStep(True))
    desk.do(e.Tick(), 0.4)
    desk.says(first, m.OffStep(False))
    desk.says(first, m.OffStep(False))  # its agent repeats it
    assert told(desk)[2] == computed_s
    desk.says(second, m.OffStep(False))
    assert spent(desk)[T.PAUSED] == pytest.approx(0.8 + 5 * AFTER_S)
    desk.do(e.Tick(), 0.3)
    assert told(desk)[2] == pytest.approx(computed_s + 0.3)
    desk.says(second, m.OffStep(True))
    desk.lose("n1")
    desk.parks(first, 6)
    desk.commit(7)
    desk.do(e.Tick(), 0.3)
    assert told(desk)[2] > computed_s + 0.5  # nobody waits for who is gone


def test_steps_with_fewer_workers_than_wanted():
    desk = running(4, committed=5, min_nodes=1, max_restarts=0)
    desk.lose("n3")
    for worker in desk.members()[:3]:
        desk.parks(worker, 5)
    assert desk.state.membership.generation.strength == 3
    desk.commit(6)
    began_s = desk.now - 2 * AFTER_S  # the first one's word
    desk.do(e.Tick(), 1.0)
    desk.commit(7)
    steps_s = desk.now - 2 * AFTER_S - began_s
    open_s = 2 * AFTER_S
    assert spent(desk)[T.FEWER_WORKERS] == pytest.approx(steps_s / 4)
    assert told(desk)[0] == pytest.approx(steps_s * 3 / 4 + open_s)


def test_steps_that_do_not_divide_evenly():
    desk = running(3, committed=0)
    desk.state.membership.micro_batches = 4  # 2, 1, 1: a third of the time of three workers
    desk.commit(1)
    desk.do(e.Tick(), 1.0)
    desk.commit(2)
    steps_s = 1.0 + 3 * AFTER_S
    assert spent(desk)[T.IDLE_DIVISION] == pytest.approx(steps_s / 3)


def waits(desk: Desk, data_s: dict[str, float], forward_s: dict[str, float], first: int) -> None:
    """A block of steps, as each worker spent it."""
    for worker in desk.members():
        block = Spent(
            first=first,
            micros=1,
            data_s=data_s.get(worker, 0.0),
            forward_s=forward_s.get(worker, 0.1),
            backward_s=0.0,
            wait_s=0.0,
            update_s=0.0,
            aside_s=0.0,
        )
        word = m.Progress(generation=1, committed=first + 5, median_s=0.1, spent=(block,))
        desk.says(worker, word)


def test_waits_for_data_and_for_slow_ranks():
    desk = running(3, committed=0)
    desk.commit(1)
    desk.do(e.Tick(), 1.0)
    worker = desk.members()[1]
    waits(desk, {worker: 0.04}, {}, first=5)
    assert spent(desk)[T.DATA_WAIT] == pytest.approx(0.2)
    # Its data is late, but another computes for longer: without the wait the steps would take as long.
    waits(desk, {worker: 0.04}, {desk.members()[0]: 0.2}, first=10)
    assert spent(desk)[T.DATA_WAIT] == pytest.approx(0.2)
    first = 15
    while not desk.state.health.slow:
        waits(desk, {}, {worker: 0.15}, first)
        first += 5
    before_s = spent(desk).get(T.SLOW_RANKS, 0.0)
    desk.do(e.Tick(), 1.0)
    waits(desk, {}, {worker: 0.15}, first)
    assert spent(desk)[T.SLOW_RANKS] == pytest.approx(before_s + 0.25)
    productive_s = told(desk)[0]
    assert sum(spent(desk).values()) - spent(desk)[T.START] == pytest.approx(
        productive_s + spent(desk)[T.SLOW_RANKS] + 0.2
    )


def test_what_was_lost_in_steps_is_never_more_than_they_took():
    desk = running(1, committed=0)
    desk.commit(1)
    desk.do(e.Tick(), 0.1)
    desk.commit(2)
    waits(desk, {desk.members()[0]: 9.0}, {}, first=5)
    desk.snapshot(2, "n0")
    desk.state.storage.totals.stall_s = 5.0
    assert told(desk)[:2] == (0.0, 0.0)
    assert spent(desk).keys() == {T.START, T.DATA_WAIT}


def test_what_was_lost_in_steps_that_are_done_again_is_forgotten():
    desk = running(1, committed=0)
    desk.commit(1)
    desk.snapshot(1, "n0")
    desk.stores()
    desk.do(e.Tick(), 1.0)
    waits(desk, {desk.members()[0]: 0.1}, {}, first=5)
    assert spent(desk)[T.DATA_WAIT] == pytest.approx(0.5)
    desk.snapshot(10, "n0")
    desk.stores()
    desk.do(e.Tick(), 1.0 - 7 * AFTER_S)
    desk.commit(20)
    assert told(desk)[2] == pytest.approx(2.0, abs=0.1)
    desk.exits(desk.members()[0], -9)
    desk.ready(desk.workers()[0])
    assert desk.state.membership.lost_steps == 10
    assert told(desk)[1] == pytest.approx(1.0, abs=0.1)
    assert spent(desk)[T.DATA_WAIT] == pytest.approx(0.5 / 2, abs=0.02)


def test_time_in_which_the_state_was_copied():
    desk = running(1, committed=0)
    desk.commit(1)
    desk.do(e.Tick(), 1.0)
    desk.commit(2)
    desk.do(e.NodeSays("n0", m.SnapshotStored(copy_of(2), 0.3)))
    assert spent(desk)[T.SNAPSHOT_STALL] == pytest.approx(0.3)
    assert told(desk)[2] == pytest.approx(1.0 + 2 * AFTER_S)
    assert told(desk)[0] == pytest.approx(0.7 + 2 * AFTER_S)


def test_going_on_where_it_was_costs_no_step():
    """Time after the word of the newest step is not the time of a step that is done again."""
    desk = running(1, committed=0)
    desk.commit(1)
    desk.do(e.Tick(), 1.0)
    desk.commit(2)
    desk.snapshot(2, "n0")
    desk.stores()
    worker = desk.members()[0]
    desk.says(worker, m.OffStep(True))
    desk.exits(worker, -9)
    desk.ready(desk.workers()[0])
    assert (desk.state.membership.number, desk.state.membership.lost_steps) == (2, 0)
    assert told(desk)[1] == 0.0


# ---------------------------------------------------------------- successors


def test_a_successor_goes_on_counting():
    desk = running(2, committed=5)
    desk.do(e.Tick(), 1.0)
    desk.commit(6)
    desk.crash(away_s=3.0)
    spent(desk)
    desk.back()
    desk.commit(8)
    productive_s, again_s, _ = told(desk)
    assert productive_s == pytest.approx(4.0, abs=0.1)
    assert again_s == 0.0


def test_of_a_state_without_times_they_are_not_known():
    """An older version wrote it: what it did until now nobody can tell, and what follows is counted."""
    desk = running(2, committed=5)
    written = msgspec.msgpack.decode(msgspec.msgpack.encode(desk.state))
    del written["membership"]["wall"]
    desk.core = Core(desk.state.spec, msgspec.convert(written, CoreState))
    assert told(desk) == (None, None, None)
    taken_s = desk.now
    desk.do(e.Tick(), 1.0)
    desk.commit(6)
    desk.do(e.Tick(), 1.0)
    desk.commit(7)
    found = spent(desk)
    assert found[T.UNEXPLAINED] == pytest.approx(taken_s + 1.0 + AFTER_S - desk.state.began_s)
    assert told(desk)[:2] == (None, None)
    assert told(desk)[2] == pytest.approx(1.0 + 3 * AFTER_S)
