"""Where the workers of a replica leave a broken step: the counts of its groups, and the core's word on them."""

import queue
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.coordinator.kernel.state import Halting
from holdfast.coordinator.membership import replicas
from holdfast.errors import CollectiveFault
from holdfast.protocol import messages as m
from holdfast.train.reconnectable_group import CollectiveCounts, ReplicaGroups


def counts(*mine):
    made = CollectiveCounts(lambda name: name in mine)
    said = queue.SimpleQueue()
    made.say = lambda begun, stands: said.put((begun, stands))
    return made, said


def test_a_worker_goes_on_to_where_it_is_told_to():
    here, said = counts("a")
    here.begin("a")
    assert here.halt() == {"a": 1}
    here.run_to({"a": 3, "elsewhere": 7}, 1, True)
    here.begin("a")
    here.begin("a")
    with pytest.raises(CollectiveFault):
        here.begin("a")
    assert here.leave(broken=True) == 1
    assert said.empty()  # the word to leave had come
    here.begin("a")  # the next generation's first
    assert here.halt() == {"a": 4}


def test_a_worker_stands_until_all_do():
    """A limit may grow as long as somebody goes on."""
    here, said = counts("a", "b")
    here.begin("a")
    here.halt()
    here.run_to({"a": 1}, 1, False)
    with ThreadPoolExecutor(1) as pool:
        calls = pool.submit(here.begin, "b")
        assert said.get(timeout=10) == ({"a": 1}, 1)
        here.run_to({"a": 1, "b": 1}, 2, False)
        calls.result(timeout=10)  # another worker has begun it
        left = pool.submit(here.leave, broken=True)
        assert said.get(timeout=10) == ({"a": 1, "b": 1}, 2)
        here.run_to({"a": 1, "b": 1}, 2, True)
        assert left.result(timeout=10) == 2
    assert said.empty()


def test_a_call_on_the_way_to_one_that_others_have_begun_is_begun_and_told():
    """Of two stages one waits in a message from this worker, whose next call is in another group."""
    here, said = counts("a", "b")
    here.halt()
    here.run_to({"a": 1}, 1, False)
    here.begin("b")
    assert said.get() == ({"b": 1}, -1)
    here.begin("a")


def test_what_was_left_too_early_is_of_no_use():
    here, _ = counts("a")
    here.begin("a")
    here.halt()
    here.run_to({"a": 2}, 1, False)
    assert here.leave(broken=True) == -1


def test_a_step_is_left_when_it_is_known_where():
    """The main thread may come before the link's thread has halted the replica."""
    here, _ = counts("a")
    here.begin("a")
    with ThreadPoolExecutor(1) as pool:
        left = pool.submit(here.leave, broken=True)
        here.halt()
        assert not left.done()
        here.run_to({"a": 1}, 1, True)
        assert left.result(timeout=10) == 1
    assert here.leave(broken=False) == 0  # a planned change: nobody has halted


def test_an_abort_frees_who_waits():
    here, _ = counts("a")
    here.halt()
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(here.begin, "a")
        here.abort()
        with pytest.raises(CollectiveFault):
            waits.result(timeout=10)
    assert here.leave(broken=True) == -1
    here.renew()
    here.begin("a")


def test_connections_with_a_message_that_nobody_ends_are_given_back():
    groups = ReplicaGroups(0, 2, "127.0.0.1", lambda begins: None, stages=2)
    groups.connected_in = 4
    groups.messages.complete = lambda: False
    groups.counts.begin("a")
    groups.halt()
    groups.run_to({"a": 1}, 1, True)
    assert groups.leave(broken=True) == -1
    assert groups.connected_in == 0
    assert groups.aborted


# ---------------------------------------------------------------- the core's word


class Answers:
    """Workers of one replica who tell the core where they are; what it tells all of them."""

    def __init__(self, *names):
        self.halting, self.names, self.told = Halting(), names, []

    def say(self, name, begun, stands=-1):
        order = replicas.answered(self.halting, name, m.Halted(7, begun, stands), len(self.names))
        self.told += [] if order is None else [order]
        return order


def test_equal_counts_need_no_second_word():
    answers = Answers("a", "b")
    assert answers.say("a", {"g": 3}) is None
    assert answers.say("b", {"g": 3}) == m.RunTo(7, {"g": 3}, 1, True)
    assert answers.say("b", {"g": 3}, 1) is None  # told again


def test_all_stand_before_any_leaves():
    answers = Answers("first", "last")
    answers.say("first", {"1>0": 2, "0>1": 4})
    assert answers.say("last", {"1>0": 3, "0>1": 3}) == m.RunTo(7, {"1>0": 3, "0>1": 4}, 1, False)
    assert answers.say("first", {"1>0": 3, "0>1": 4}, 1) is None
    # On its way to the fourth message the last one sends another.
    grown = answers.say("last", {"1>0": 4, "0>1": 3})
    assert grown == m.RunTo(7, {"1>0": 4, "0>1": 4}, 2, False)
    assert answers.say("last", {"1>0": 4, "0>1": 4}, 2) is None
    assert answers.say("first", {"1>0": 4, "0>1": 4}, 2) == m.RunTo(7, {"1>0": 4, "0>1": 4}, 2, True)


def test_a_group_that_one_worker_alone_has_begun_is_no_agreement():
    answers = Answers("a", "b")
    answers.say("a", {"g": 1})
    assert answers.say("b", {"g": 1, "h": 1}) == m.RunTo(7, {"g": 1, "h": 1}, 1, False)
