"""Decisions as pure functions, one by one."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.coordinator.kernel.incidents import ScriptFault, script_fault
from holdfast.coordinator.kernel.state import Failure, RootCause
from holdfast.coordinator.membership.policy import (
    NodeFault,
    Report,
    assign_ranks,
    failure_signature,
    find_culprits,
    gang_fault,
    resolve,
)
from holdfast.protocol.causes import KilledForMemory, ProcessEnded
from holdfast.protocol.machine.progress_record import PageReading, Phase
from holdfast.protocol.messages import Exited, Generation, Member, WorkerView

# ---------------------------------------------------------------- resolve

HOLDS = {
    "nothing": Report(None),
    "dropped": Report(5),
    "prepared": Report(5, prepared=True),
    "committed": Report(6),
}


@pytest.mark.parametrize("states", list(product(HOLDS, repeat=3)), ids="-".join)
def test_settle_for_every_state_of_three_survivors(states):
    """Design, section 5.4, in other words than the code's."""
    names = dict(zip("abc", states, strict=True))
    resolution = resolve({w: HOLDS[s] for w, s in names.items()})
    usable = {w for w, s in names.items() if s != "nothing"}
    prepared = {w for w, s in names.items() if s == "prepared"}
    if not usable:
        assert resolution.start is None
        assert resolution.restore == set("abc")
    elif "committed" in states or prepared == usable:
        assert resolution.start == 6
        assert resolution.apply == prepared
        assert resolution.holders == prepared | {w for w, s in names.items() if s == "committed"}
        assert resolution.restore == {w for w, s in names.items() if s in ("nothing", "dropped")}
    else:
        assert resolution.start == 5
        assert resolution.apply == frozenset()
        assert resolution.holders == usable
        assert resolution.restore == set("abc") - usable


reports = st.builds(Report, st.none() | st.integers(0, 9), st.booleans())


@given(st.dictionaries(st.text("abcdefgh", min_size=1, max_size=2), reports, min_size=1))
def test_settle_loses_no_commit_and_leaves_nobody_without_a_source(held):
    resolution = resolve(held)
    committed = [r.committed for r in held.values() if r.committed is not None]
    if not committed:
        assert resolution.start is None
        return
    assert max(committed) <= resolution.start <= max(committed) + 1
    assert resolution.holders
    assert resolution.holders.isdisjoint(resolution.restore)
    assert resolution.holders | resolution.restore == set(held)
    for worker in resolution.holders:
        report = held[worker]
        assert report.committed + (worker in resolution.apply) == resolution.start
        assert worker not in resolution.apply or report.prepared


# ---------------------------------------------------------------- ranks


def generation(*workers: str) -> Generation:
    return Generation(
        number=1, members=tuple(Member(rank=r, worker=w, node="n", slot=0) for r, w in enumerate(workers))
    )


def test_a_newcomer_takes_the_hole_at_the_same_size():
    assert assign_ranks(generation("a", "b", "c"), ["c", "a"], ["x"]) == ["a", "x", "c"]


def test_survivors_close_ranks_at_another_size():
    assert assign_ranks(generation("a", "b", "c", "d"), ["d", "b"], []) == ["b", "d"]
    assert assign_ranks(generation("a", "b", "c", "d"), ["d", "b"], ["x"]) == ["b", "d", "x"]


def test_the_first_generation_takes_them_as_they_come():
    assert assign_ranks(None, [], ["x", "y"]) == ["x", "y"]


def test_a_survivor_from_outside_the_last_generation_fills_a_hole():
    assert assign_ranks(generation("a", "b", "c"), ["c", "z"], ["x"]) == ["z", "x", "c"]


names = st.lists(st.sampled_from("abcdefgh"), unique=True, min_size=1)


@given(names, st.data())
def test_ranks_are_a_permutation_that_moves_nobody_without_need(before, data):
    survivors = data.draw(st.permutations(data.draw(st.lists(st.sampled_from(before), unique=True))))
    newcomers = data.draw(st.lists(st.sampled_from("uvwxyz"), unique=True))
    if not survivors and not newcomers:
        return
    ranks = assign_ranks(generation(*before), survivors, newcomers)
    assert sorted(ranks) == sorted([*survivors, *newcomers])
    if len(ranks) == len(before):
        assert all(ranks[r] == w for r, w in enumerate(before) if w in survivors)
    else:
        assert [w for w in ranks if w in survivors] == sorted(survivors, key=before.index)


# ---------------------------------------------------------------- hangs


def view(worker: str, phase: Phase, idle_s: float = 10.0, process: str = "S", **place: int) -> WorkerView:
    where = PageReading(**({"generation": 3, "committed": 7, "collectives": 0} | place), phase=int(phase))
    return WorkerView(worker=worker, slot=0, pid=1, formed=3, page=where, process=process, idle_s=idle_s)


def culprits(
    *views: WorkerView, stacks: dict[str, str] | None = None, complete: bool = True
) -> tuple[str, ...]:
    allowed = {v.worker: 3.0 for v in views}
    return find_culprits(views, allowed, stacks or {}, complete).workers


@pytest.mark.parametrize("letter", ["T", "t"])
def test_a_stopped_process_is_at_fault_whatever_it_did(letter):
    assert culprits(view("a", Phase.REDUCE), view("b", Phase.REDUCE, process=letter)) == ("b",)


def test_who_computes_for_too_long_while_others_wait_is_at_fault():
    views = (view("a", Phase.REDUCE), view("b", Phase.BACKWARD), view("c", Phase.VOTE))
    assert culprits(*views) == ("b",)
    assert culprits(*views, complete=False) == ("b",)


def test_who_still_moves_is_not_at_fault():
    assert culprits(view("a", Phase.REDUCE), view("b", Phase.BACKWARD, idle_s=0.2)) == ()


def test_who_waits_at_an_earlier_point_is_at_fault():
    assert culprits(view("a", Phase.VOTE), view("b", Phase.REDUCE), view("c", Phase.VOTE)) == ("b",)
    assert culprits(view("a", Phase.REDUCE, committed=8), view("b", Phase.VOTE)) == ("b",)
    ahead = view("a", Phase.REDUCE, collectives=2)
    assert culprits(
        ahead, view("b", Phase.REDUCE, collectives=1), view("c", Phase.REDUCE, collectives=2)
    ) == ("b",)


def test_nobody_is_called_behind_while_somebody_was_not_seen():
    assert culprits(view("a", Phase.VOTE), view("b", Phase.REDUCE), complete=False) == ()


def test_who_does_not_join_is_at_fault_before_who_waits_for_its_state():
    views = (view("a", Phase.JOIN), view("b", Phase.TRANSFER), view("c", Phase.PARKED, generation=2))
    assert culprits(*views) == ("c",)


def test_alone_and_at_a_standstill():
    assert culprits(view("a", Phase.FORWARD)) == ("a",)
    assert culprits(view("a", Phase.FORWARD, idle_s=1.0)) == ()


def test_who_has_gone_on_while_all_were_looked_at_is_not_at_fault():
    """The stacks of a job that trains differ all the time."""
    stacks = {"a": "poll", "b": "read", "c": "poll"}
    assert culprits(*(view(w, Phase.VOTE, idle_s=0.0) for w in "abc"), stacks=stacks) == ()
    views = (view("a", Phase.VOTE), view("b", Phase.REDUCE, idle_s=0.0), view("c", Phase.VOTE))
    assert culprits(*views, stacks=stacks) == ()


def test_the_odd_stack_is_at_fault_when_all_wait_at_one_point():
    views = [view(w, Phase.REDUCE) for w in "abc"]
    assert culprits(*views, stacks={"a": "poll", "b": "read", "c": "poll"}) == ("b",)
    assert culprits(*views, stacks={"a": "poll", "b": "read", "c": "send"}) == ()
    assert culprits(*views, stacks={"a": "poll", "b": "read"}) == ()
    assert culprits(*views, stacks={"a": "poll", "b": "poll", "c": "poll"}) == ()


def test_two_that_wait_for_each_other_are_a_pair_of_which_one_is_taken():
    ranks = {"a": 0, "b": 1, "c": 2, "d": 3}
    views = [
        view("a", Phase.VOTE, waits_for=1),
        view("b", Phase.REDUCE, waits_for=3),
        view("c", Phase.VOTE, waits_for=1),
        view("d", Phase.REDUCE, waits_for=1),
    ]
    verdict = find_culprits(views, dict.fromkeys(ranks, 3.0), {}, ranks=ranks)
    assert (verdict.workers, verdict.one_of) == (("b", "d"), True)
    assert verdict.reason == "ranks 1 and 3 wait for each other, so the network between them is suspect"
    views[3] = view("d", Phase.REDUCE, waits_for=0)  # no pair: both are behind
    assert find_culprits(views, dict.fromkeys(ranks, 3.0), {}, ranks=ranks).workers == ("b", "d")


def test_a_result_that_is_lost_on_its_way_down_a_tree_does_not_accuse_those_below():
    """Ranks 1 and 2 are children of rank 0, and 3 to 6 of those; rank 1 did not get the result of the vote."""
    ranks = {worker: rank for rank, worker in enumerate("abcdefg")}
    ahead = [
        view(w, Phase.REDUCE, committed=8, waits_for=to) for w, to in (("a", 1), ("c", 0), ("f", 2), ("g", 2))
    ]
    below = [
        view("b", Phase.VOTE, waits_for=0),
        view("d", Phase.VOTE, waits_for=1),
        view("e", Phase.VOTE, waits_for=1),
    ]
    verdict = find_culprits([*ahead, *below], dict.fromkeys(ranks, 3.0), {}, ranks=ranks)
    assert verdict.workers == ("b",)
    # A word that is lost on its way up leaves the two ends of one edge waiting for each other, and no other pair.
    there = [
        view(w, Phase.VOTE, waits_for=to) for w, to in zip("abcdefg", (1, 3, 0, 1, 1, 2, 2), strict=True)
    ]
    verdict = find_culprits(there, dict.fromkeys(ranks, 3.0), {}, ranks=ranks)
    assert (verdict.workers, verdict.one_of) == (("b", "d"), True)


def test_who_fetches_its_state_is_not_the_one_that_does_not_serve():
    """Rank 2 fetches from rank 0; both donors wait for it to connect."""
    ranks = {"a": 0, "b": 1, "c": 2}
    views = [
        view("a", Phase.JOIN, waits_for=2),
        view("b", Phase.JOIN, waits_for=2),
        view("c", Phase.TRANSFER, waits_for=0),
    ]
    verdict = find_culprits(views, dict.fromkeys(ranks, 3.0), {}, ranks=ranks)
    assert (verdict.workers, verdict.again) == (("a",), True)  # and only when it happens again


# ---------------------------------------------------------------- the script's fault or the machine's


def failure(
    worker: str, generation: int, step: int | None = 7, error: str = "ValueError@train.py:3"
) -> Failure:
    return Failure(
        step=step, signature=error, worker=worker, node=worker.partition(".")[0], generation=generation
    )


def test_no_failure_is_nobodys():
    assert script_fault([]) is None
    assert gang_fault([]) is None


def test_the_same_step_and_error_again_on_a_second_worker_is_the_scripts():
    assert script_fault([failure("n0.0#1", 1)]) is None
    assert script_fault([failure("n0.0#1", 1), failure("n0.0#1", 2)]) is None
    assert (
        script_fault([failure("n0.0#1", 1), failure("n1.0#2", 1)]) is None
    )  # all ranks at once: one attempt
    fault = script_fault([failure("n0.0#1", 1), failure("n1.0#2", 2)])
    assert fault == ScriptFault("the same error at step 7 in 2 attempts on 2 workers")


@pytest.mark.parametrize("other", [{"step": 8}, {"error": "KeyError@train.py:3"}])
def test_another_step_or_error_is_another_failure(other):
    assert script_fault([failure("n0.0#1", 1), failure("n1.0#2", 2, **other)]) is None


def test_a_signal_must_repeat_three_times():
    deaths = [failure(f"n{i}.0#{i}", i, error="signal 11") for i in range(3)]
    assert script_fault(deaths[:2]) is None
    fault = script_fault(deaths)
    assert fault is not None
    assert fault.reason == (
        "step 7 ended a worker in 3 attempts, on n0, n1 and n2, which have only the script and the samples of that "
        "step in common"
    )


def test_deaths_on_one_node_say_nothing_about_the_samples():
    deaths = [failure(f"n0.0#{i}", i, error="signal 9") for i in range(3)]
    assert script_fault(deaths) == ScriptFault("the same error at step 7 in 3 attempts on 3 workers")


def test_before_the_first_step_two_nodes_must_agree():
    one = failure("n0.0#1", 0, step=None, error="SyntaxError: invalid")
    same_node = failure("n0.0#2", 0, step=None, error="SyntaxError: invalid")
    other_node = failure("n1.0#3", 0, step=None, error="SyntaxError: invalid")
    assert script_fault([one, same_node], nodes=2) is None
    assert script_fault([one, same_node], nodes=1) is not None
    assert script_fault([one, other_node], nodes=2) is not None
    assert script_fault([one, other_node], nodes=2, trained=True) is None


def test_level_0_counts_attempts_in_a_row():
    first, second = failure("n0.0#1", 1, None), failure("n1.0#4", 2, None)
    assert gang_fault([first], nodes=2) is None
    assert gang_fault([first, second], nodes=2) == ScriptFault("the same error in 2 attempts in a row")
    assert gang_fault([first, failure("n1.0#4", 3, None)], nodes=2) is None
    assert gang_fault([first, failure("n1.0#4", 2, 9)], nodes=2) is None


def test_level_0_whoever_raised_the_same_is_a_witness():
    twice = [failure(f"n0.0#{i}", i, None) for i in range(2)]
    assert gang_fault(twice, nodes=2) is None
    twice[0].also_on = ("n1",)
    assert gang_fault(twice, nodes=2) == ScriptFault("the same error in 2 attempts in a row")


def test_level_0_two_workers_of_one_attempt_are_one_failure():
    assert gang_fault([failure("n0.0#1", 1, None), failure("n1.0#2", 1, None)], nodes=2) is None


def test_level_0_a_process_that_just_ends_says_less():
    deaths = [failure(f"n{i % 2}.0#{i}", i, None, "exit code 2") for i in range(3)]
    assert gang_fault(deaths[:2], nodes=2) is None
    assert isinstance(gang_fault(deaths, nodes=2), ScriptFault)


def test_level_0_processes_that_had_trained_for_long_just_end():
    """In a job of months, whose script tells of no step, three of them are nobody's."""
    deaths = [failure(f"n{i % 2}.0#{i}", i, None, "signal 9") for i in range(4)]
    deaths[1].lasted_s = 7200.0
    assert gang_fault(deaths, nodes=2) is None
    deaths[1].lasted_s = 60.0
    assert isinstance(gang_fault(deaths, nodes=2), ScriptFault)
    # A node on which they end again and again is at fault all the same.
    there = [failure(f"n0.0#{i}", i, None, "signal 9") for i in range(3)]
    for one in there:
        one.lasted_s = 7200.0
    assert gang_fault(there, nodes=2) == NodeFault("n0")
    # An exception names a line of the script, however long it took to come to it.
    raised = [failure(f"n{i}.0#{i}", i, None) for i in range(2)]
    for one in raised:
        one.lasted_s = 7200.0
    assert isinstance(gang_fault(raised, nodes=2), ScriptFault)


def test_level_0_a_node_that_fails_again_and_again_is_at_fault():
    again = [failure(f"n0.0#{i}", i, None, "CudaError: ECC") for i in range(3)]
    assert gang_fault(again[:2], nodes=2) is None
    assert gang_fault(again, nodes=2) == NodeFault("n0")
    assert isinstance(gang_fault(again, nodes=1), ScriptFault)


def test_level_0_two_bad_nodes_in_turns_are_both_found():
    turns = [failure(f"n{i % 2}.0#{i}", i, None, f"CudaError: ECC on n{i % 2}") for i in range(6)]
    assert gang_fault(turns[:4], nodes=4) is None
    assert gang_fault(turns[:5], nodes=4) == NodeFault("n0")
    assert gang_fault(turns, nodes=4) == NodeFault("n1")


# ---------------------------------------------------------------- how a process ended


def test_exits_in_words():
    assert str(ProcessEnded(-9)) == "killed by signal 9 (SIGKILL)"
    assert str(ProcessEnded(-64)) == "killed by signal 64 (signal)"
    assert str(ProcessEnded(3)) == "exit code 3"
    assert "in its container, whose memory limit is 1.57 GB" in str(KilledForMemory(1500 << 20))
    assert "on its machine" in str(KilledForMemory())


def test_a_signature_is_the_exception_or_how_the_process_ended():
    assert (
        failure_signature(
            RootCause(cause="x", traceback="Traceback\n  ...\nKeyError: 'a'\n"), Exited(worker="w", code=1)
        )
        == "KeyError: 'a'"
    )
    assert failure_signature(RootCause(cause="x"), Exited(worker="w", code=-11)) == "signal 11"
    assert failure_signature(RootCause(cause="x"), Exited(worker="w", code=2)) == "exit code 2"
