"""Steps over all starts at levels 0 and 1: what is known is counted, what is not is None."""

import msgspec
import pytest
from desk import Desk, copy_of
from test_generation_cases import end, launched

from holdfast.coordinator.service.job_view import build_report, build_status
from holdfast.coordinator.service.metrics import metrics_text
from holdfast.coordinator.service.tally import StepSummary, Tally
from holdfast.protocol import messages as m

FROM_THE_LEDGER = "median_s", "skipped"
"""Of the report's steps: the status has only what the core knows."""


def steps(desk: Desk) -> tuple[int | None, int | None, int | None]:
    """Committed, lost, computed: as report, status and metrics agree on them."""
    told = msgspec.structs.asdict(build_report(desk.state, StepSummary(), desk.now).steps)
    shown = msgspec.structs.asdict(build_status(desk.state, desk.now).steps)
    assert shown == {k: v for k, v in told.items() if k not in FROM_THE_LEDGER}
    text = metrics_text(desk.state, Tally(), desk.now).decode()
    scraped = dict(line.split(" ") for line in text.splitlines() if line.startswith("holdfast_steps_"))
    known = {f"holdfast_steps_{k}_total": float(v) for k, v in shown.items() if v is not None}
    assert {k: float(v) for k, v in scraped.items()} == known
    return told["committed"], told["lost"], told["computed"]


def trains(desk: Desk, count: int) -> None:
    for worker in desk.members():
        desk.says(worker, m.Progress(generation=desk.state.membership.number, committed=count, median_s=0.1))


def gives(desk: Desk, step: int, count: int) -> None:
    """Rank 0's script gives a state, and all ranks' parts of it are in memory."""
    desk.says(desk.members()[0], m.StateServed(desk.state.membership.number, step, count))
    for rank in (0, 1):
        desk.holds(f"n{rank}", copy_of(step, desk.state.membership.number, rank, 2))


def loads(desk: Desk, step: int | None, count: int = 0) -> None:
    desk.says(desk.members()[0], m.Loaded(desk.state.membership.number, step, count))


def fails(desk: Desk, last: int = 0) -> None:
    """A worker is killed, which had made so many steps when it was; all start again."""
    worker = desk.members()[1]
    desk.do(e_exited(worker, -9, last))
    end(desk)


def e_exited(worker: str, code: int, count: int):
    from holdfast.coordinator.kernel import events as e

    return e.NodeSays(worker.partition(".")[0], m.Exited(worker=worker, code=code, steps=count))


def test_one_start_is_counted_and_nothing_was_lost():
    desk = launched(2)
    assert steps(desk) == (None, 0, None)  # it may use no optimizer of torch's
    trains(desk, 7)
    assert steps(desk) == (7, 0, 7)


def test_the_last_steps_of_a_worker_are_counted_though_it_could_not_tell():
    desk = launched(2)
    trains(desk, 7)
    fails(desk, last=9)
    assert desk.state.membership.counted.earlier == 9


def test_after_a_restart_only_the_script_knows_where_it_went_on():
    desk = launched(2)
    trains(desk, 20)
    fails(desk)
    trains(desk, 5)
    assert steps(desk) == (None, None, 25)
    assert [i.lost_steps for i in desk.incidents()] == [None]
    assert build_status(desk.state, desk.now).step is None
    fails(desk)
    trains(desk, 40)
    assert steps(desk) == (None, None, 65)
    assert [i.at_step for i in desk.incidents()] == [20, None]


def test_what_it_loads_tells_what_is_done_again():
    desk = launched(2)
    loads(desk, None)
    trains(desk, 10)
    gives(desk, 10, 10)
    trains(desk, 14)
    fails(desk)
    loads(desk, 10)
    assert steps(desk) == (10, 4, 14)
    trains(desk, 3)
    assert steps(desk) == (13, 4, 17)
    assert [i.lost_steps for i in desk.incidents()] == [4]
    gives(desk, 13, 3)
    trains(desk, 5)
    fails(desk)
    loads(desk, 10)  # the newer one proved to be damaged
    trains(desk, 1)
    assert steps(desk) == (11, 9, 20)
    assert [i.lost_steps for i in desk.incidents()] == [4, 5]
    assert [i.at_step for i in desk.incidents()] == [14, 15]


def test_the_script_s_own_numbers_and_a_run_before_do_not_matter():
    """It counts by thousands of samples, and went on from what a run before had saved."""
    desk = launched(2)
    loads(desk, 5000)
    trains(desk, 4)
    gives(desk, 7000, 4)
    trains(desk, 6)
    fails(desk)
    loads(desk, 7000)
    assert steps(desk) == (4, 2, 6)
    fails(desk)
    loads(desk, 5000)
    assert steps(desk) == (0, 6, 6)


def test_a_load_in_the_middle_is_counted():
    desk = launched(2)
    loads(desk, None)
    trains(desk, 4)
    gives(desk, 4, 4)
    trains(desk, 9)
    loads(desk, 4, 9)  # the loss went up
    trains(desk, 11)
    assert steps(desk) == (6, 5, 11)


@pytest.mark.parametrize("found", [None, 30])
def test_what_was_never_given_is_not_known(found):
    """The script saves in its own way, or loads what no start of this job gave."""
    desk = launched(2)
    loads(desk, None)
    trains(desk, 20)
    fails(desk)
    loads(desk, found)
    trains(desk, 5)
    assert steps(desk) == (None, None, 25)


def test_what_may_still_be_loaded_is_remembered_and_no_more():
    desk = launched(2)
    loads(desk, None)
    for step in range(1, 200):
        gives(desk, step, step)
    assert len(desk.state.membership.counted.given) < 40
    fails(desk)
    loads(desk, 198)
    trains(desk, 1)
    assert steps(desk)[1] == 1


def test_a_word_of_an_earlier_start_is_not_taken_for_this_one():
    desk = launched(2)
    trains(desk, 10)
    gives(desk, 10, 10)
    fails(desk)
    desk.says(desk.members()[0], m.Loaded(1, 10, 0))
    assert steps(desk)[1] is None


def begins_anew(desk: Desk) -> None:
    desk.says(desk.members()[0], m.BeganAnew(desk.state.membership.number))


def test_a_script_that_does_not_resume_is_asked_once_whether_it_does():
    desk = launched(2)
    begins_anew(desk)
    assert desk.records("began-anew") == []  # it is the first start
    trains(desk, 80)
    fails(desk)
    begins_anew(desk)
    assert desk.records("began-anew") == [{"generation": 2, "steps": 80}]
    trains(desk, 5)
    fails(desk)
    begins_anew(desk)
    assert len(desk.records("began-anew")) == 1


@pytest.mark.parametrize("tells", [lambda desk: gives(desk, 5, 5), lambda desk: loads(desk, None)])
def test_one_that_saves_with_holdfast_is_not_asked(tells):
    desk = launched(2)
    tells(desk)
    trains(desk, 8)
    fails(desk)
    begins_anew(desk)
    assert desk.records("began-anew") == []


def test_nor_is_one_whose_start_before_made_no_step():
    desk = launched(2)
    fails(desk)
    begins_anew(desk)
    assert desk.records("began-anew") == []
