"""The pure decisions, exhaustively where that is possible."""

from itertools import permutations, product

import pytest

from holdfast.coordinator import policy
from holdfast.coordinator.state import Failure
from holdfast.protocol.messages import Generation, Member, WorkerView
from holdfast.protocol.phases import Phase, Place

REPORTS = [policy.Report(None), *(policy.Report(c, p) for c in (4, 5) for p in (False, True))]


@pytest.mark.parametrize("reports", list(product(REPORTS, repeat=3)))
def test_settle_keeps_every_commit_and_moves_no_more_state_than_needed(reports):
    given = {f"w{i}": r for i, r in enumerate(reports)}
    outcome = policy.settle(given)
    held = {w: r for w, r in given.items() if r.committed is not None}
    if not held:
        assert outcome.start is None
        assert outcome.restore == set(given)
        return
    newest = max(r.committed for r in held.values())
    assert outcome.start in (newest, newest + 1)  # a committed step is never lost
    after = {w: r.committed + (w in outcome.apply) for w, r in held.items()}
    assert all(given[w].prepared for w in outcome.apply)  # nobody applies what it does not have
    assert all(after[w] == outcome.start for w in outcome.holders)
    assert outcome.holders  # someone brings the state
    assert outcome.restore == {w for w in given if after.get(w) != outcome.start}
    if outcome.start == newest + 1:
        assert all(r == policy.Report(newest, True) for r in held.values())


def generation(*workers):
    return Generation(1, tuple(Member(r, w, "n", 0) for r, w in enumerate(workers)))


def test_at_an_unchanged_size_survivors_keep_their_ranks():
    before = generation("a", "b", "c", "d")
    assert policy.assign_ranks(before, ["d", "a", "c"], ["new"]) == ["a", "new", "c", "d"]


def test_at_another_size_survivors_close_ranks():
    assert policy.assign_ranks(generation("a", "b", "c"), ["c", "a"], []) == ["a", "c"]
    assert policy.assign_ranks(generation("a", "b"), ["a", "b"], ["x"]) == ["a", "b", "x"]
    assert policy.assign_ranks(None, [], ["x", "y"]) == ["x", "y"]


@pytest.mark.parametrize("survivors", list(permutations("abc", 2)))
def test_ranks_do_not_depend_on_the_order_of_reports(survivors):
    before = generation("a", "b", "c")
    assert policy.assign_ranks(before, list(survivors), ["n"]) == policy.assign_ranks(
        before, sorted(survivors), ["n"]
    )


def view(worker, phase, idle_s=9.0, process="S", collectives=1, committed=7):
    place = Place(3, committed, int(phase), collectives, 1.0, 2.0, 3.0)
    return WorkerView(worker, 0, 1, 3, place, process, idle_s, attached=True, median_s=0.1)


def culprits(*views, stacks=None):
    allowed = {v.worker: 3.0 for v in views}
    return policy.find_culprits(views, allowed, stacks or {}, complete=True).workers


def test_a_stopped_process_is_named_first():
    assert culprits(view("a", Phase.REDUCE), view("b", Phase.REDUCE, process="T")) == ("b",)


def test_who_computes_while_others_wait_holds_them_up():
    assert culprits(view("a", Phase.REDUCE), view("b", Phase.FORWARD), view("c", Phase.VOTE)) == ("b",)


def test_who_computes_and_moves_is_left_alone():
    assert culprits(view("a", Phase.REDUCE), view("b", Phase.FORWARD, idle_s=0.1)) == ()


def test_who_waits_at_an_earlier_point_is_behind():
    assert culprits(view("a", Phase.REDUCE, collectives=3), view("b", Phase.REDUCE, collectives=1)) == ("b",)


def test_an_odd_stack_tells_who_differs():
    views = [view(w, Phase.REDUCE) for w in "abc"]
    assert culprits(*views, stacks={"a": "wait", "b": "wait", "c": "lock"}) == ("c",)
    assert culprits(*views, stacks={"a": "wait", "b": "wait", "c": "wait"}) == ()


def failure(step, signature, worker, generation):
    return Failure(step, signature, worker, "n", generation)


def test_the_same_error_after_a_retry_in_another_worker_is_the_scripts():
    first = [failure(5, "E@x:1", "a", 1)]
    assert policy.script_fault(first) is None
    assert policy.script_fault([*first, failure(5, "E@x:1", "a", 2)]) is None
    assert policy.script_fault([*first, failure(5, "E@x:1", "b", 1)]) is None  # all ranks at once: try again
    assert policy.script_fault([*first, failure(5, "E@x:1", "b", 2)]) is not None


def test_other_steps_and_other_causes_are_other_faults():
    assert policy.script_fault([failure(5, "E@x:1", "a", 1), failure(6, "E@x:1", "b", 2)]) is None
    assert policy.script_fault([failure(5, "E@x:1", "a", 1), failure(5, "F@x:1", "b", 2)]) is None


def test_a_death_by_signal_must_repeat_three_times():
    twice = [failure(5, "signal 11", "a", 1), failure(5, "signal 11", "b", 2)]
    assert policy.script_fault(twice) is None
    assert policy.script_fault([*twice, failure(5, "signal 11", "c", 3)]) is not None
