"""Goodput over several starts of one job: what a later start did again is not productive, what is not known is None."""

import msgspec
import pytest
from desk import Desk, running
from test_generation_cases import launched
from test_step_accounting_cases import gives, loads
from test_wall_time_cases import GIVEN_S, steps

from holdfast.coordinator.kernel.state import CoreState
from holdfast.coordinator.service.all_starts import Account, LedgerStart, forget, summed
from holdfast.coordinator.service.job_view import goodput_of


def start(desk: Desk, began_at: int | None = None) -> LedgerStart:
    """As the ledger has it: a copy."""
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(desk.state), type=CoreState)
    return LedgerStart(state=state, now=desk.now, began_at=began_at)


def saving() -> Desk:
    """A script that saves with `holdfast.checkpoint` at step 3, and then makes two steps more, in 0.7 s."""
    desk = launched(2)
    loads(desk, None)
    steps(desk, 1.0, 0.5, 0.5)
    gives(desk, 3, 3)
    steps(desk, 0.4, 0.3, since=3)
    return desk


def going_on(*names: int | None, saves: bool = True) -> Desk:
    """The next start of it."""
    desk = launched(2)
    for name in names:
        loads(desk, name)
    steps(desk, 1.0, 0.25)
    if saves:
        gives(desk, 5, 2)
    return desk


def walls(*desks: Desk) -> float:
    return sum(desk.now - desk.state.began_s for desk in desks)


def check(found: dict, productive_s: float | None, recomputed_s: float | None, *desks: Desk) -> None:
    assert found["starts"] == len(desks)
    assert found["productive_s"] == (None if productive_s is None else pytest.approx(productive_s, abs=1e-5))
    assert found["recomputed_s"] == (None if recomputed_s is None else pytest.approx(recomputed_s, abs=1e-5))
    assert found["wall_s"] == pytest.approx(walls(*desks), abs=1e-5)
    assert sum(found["classes"].values()) == pytest.approx(found["wall_s"], abs=1e-5)
    share = None if productive_s is None else pytest.approx(productive_s / walls(*desks), abs=1e-4)
    assert found["share"] == share


def one_alone(desk: Desk) -> dict:
    return msgspec.to_builtins(goodput_of(desk.state, desk.now))


def test_one_start_is_as_its_own_report_has_it():
    desk = saving()
    alone = one_alone(desk)
    found = summed(Account(), [start(desk)])
    assert {name: found[name] for name in alone if name != "recent"} == {
        name: value for name, value in alone.items() if name != "recent"
    }


def test_steps_that_the_next_start_did_again_are_not_productive():
    first, second = saving(), going_on(3)
    again_s = 0.7 + GIVEN_S
    made_s = one_alone(first)["productive_s"] + one_alone(second)["productive_s"]
    check(summed(Account(), [start(first), start(second)]), made_s - again_s, again_s, first, second)


def test_a_start_that_found_nothing_did_all_of_it_again():
    first, second = saving(), going_on(None)
    again_s = one_alone(first)["productive_s"]
    found = summed(Account(), [start(first), start(second)])
    check(found, one_alone(second)["productive_s"], again_s, first, second)


@pytest.mark.parametrize(
    "second",
    [going_on(), going_on(4), going_on(None, saves=False)],
    ids=["it has not told", "a state that nobody gave", "it saves with something else"],
)
def test_where_the_next_start_went_on_is_not_known(second):
    first = saving()
    found = summed(Account(), [start(first), start(second)])
    check(found, None, None, first, second)
    made_s = one_alone(first)["productive_s"] + one_alone(second)["productive_s"]
    assert found["computed_s"] == pytest.approx(made_s)
    assert found["unknown"] == ["productive", "recomputed"]


def test_a_start_that_never_trained_changes_nothing():
    first, refused = saving(), Desk(2)
    refused.wait(3.0)
    check(
        summed(Account(), [start(first), start(refused)]), one_alone(first)["productive_s"], 0, first, refused
    )


def test_a_start_behind_the_next_went_back_into_the_first():
    first, second, third = saving(), going_on(3), going_on(3)
    made_s = [one_alone(desk)["productive_s"] for desk in (first, second, third)]
    again_s = 0.7 + GIVEN_S + made_s[1]  # all of the second
    found = summed(Account(), [start(first), start(second), start(third)])
    check(found, sum(made_s) - again_s, again_s, first, second, third)


def elastic(*took_s: float, began_at: int) -> tuple[Desk, LedgerStart]:
    """At level 2, from a state of so many steps."""
    desk = running(2, committed=0)
    for step, seconds in enumerate(took_s, began_at + 1):
        desk.wait(seconds)
        desk.commit(step)
    return desk, start(desk, began_at)


def test_a_job_of_level_2_that_lost_its_newest_steps():
    (first, one), (second, two) = elastic(1.0, 1.0, 1.0, 1.0, began_at=0), elastic(1.0, 1.0, began_at=2)
    made_s = one_alone(first)["productive_s"] + one_alone(second)["productive_s"]
    found = summed(Account(), [one, two])
    assert found["recomputed_s"] == pytest.approx(2.0, abs=0.2)
    check(found, made_s - found["recomputed_s"], found["recomputed_s"], first, second)


def test_a_job_of_level_2_that_lost_nothing():
    (first, one), (second, two) = elastic(1.0, 1.0, began_at=0), elastic(1.0, 1.0, began_at=2)
    made_s = one_alone(first)["productive_s"] + one_alone(second)["productive_s"]
    check(summed(Account(), [one, two]), made_s, 0, first, second)


def test_another_script_says_nothing_of_the_first_ones_steps():
    (first, one), second = elastic(1.0, 1.0, began_at=0), going_on(None)
    check(summed(Account(), [one, start(second)]), None, None, first, second)


def test_starts_whose_ledgers_are_gone_stay_in_the_sum():
    desks = [saving(), going_on(3), going_on(5)]
    kept = summed(Account(), [start(desk) for desk in desks])
    account = forget(Account(), 1, start(desks[0]), [start(desk) for desk in desks[1:]])
    account = forget(account, 2, start(desks[1]), [start(desks[2])])
    assert account.through == 2
    assert summed(account, [start(desks[2])]) == kept


def test_a_start_that_goes_back_into_those_that_are_gone():
    """Their seconds are added up: which of them were done again cannot be told any more."""
    (_, one), (_, two), (_, three) = (elastic(1.0, 1.0, 1.0, began_at=n) for n in (0, 3, 1))
    account = forget(Account(), 1, one, [two])
    assert summed(account, [two])["productive_s"] is not None
    assert summed(account, [two, three])["productive_s"] is None


def test_a_ledger_that_cannot_be_read_hides_all():
    found = summed(Account(), [start(saving()), None, start(going_on(3))])
    assert (found["starts"], found["wall_s"], found["productive_s"], found["share"]) == (3, None, None, None)
    assert found["classes"] == {}
