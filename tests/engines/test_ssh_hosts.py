"""Which hosts the ssh engine starts, tries again and leaves alone: `engines/ssh/hosts.py`, on a clock of the test's."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.engines.ssh.hosts import FIRST_PAUSE_S, MOST_PAUSE_S, SETTLED_S, Hosts, HostStage


def running(*names: str, reserve: int = 0) -> Hosts:
    """All of them in the job, since the time 0."""
    hosts = Hosts([*names, *(f"r{i}" for i in range(reserve))])
    hosts.use(len(names))
    for name in hosts.due(0.0):
        hosts.greeted(name, f"boot of {name}")
        assert hosts.begun(name)
        hosts.joined(name, 0.0)
    return hosts


def test_the_first_hosts_are_started_and_the_rest_is_kept() -> None:
    hosts = running("a", "b", reserve=1)
    assert hosts.all["r0"].stage is HostStage.RESERVE
    assert hosts.due(1e9) == []
    assert hosts.wake_s() is None


def test_hosts_that_answered_come_first() -> None:
    hosts = Hosts(["a", "b", "c"])
    hosts.order(["b", "c"])
    assert hosts.use(2) == ["b", "c"]


def test_a_connection_that_broke_is_no_lost_node() -> None:
    hosts = running("a")
    hosts.cut("a", 5.0)
    assert hosts.all["a"].stage is HostStage.RUNNING
    assert hosts.due(5.0) == []
    assert hosts.due(5.0 + FIRST_PAUSE_S) == ["a"]
    assert hosts.begun("a")
    assert not hosts.all["a"].fresh


def test_a_lost_node_is_started_afresh_when_its_old_connection_has_ended() -> None:
    hosts = running("a")
    hosts.lost("a", 5.0)
    assert hosts.due(5.0 + FIRST_PAUSE_S) == []
    hosts.cut("a", 7.0)
    assert hosts.due(7.0) == ["a"]
    assert hosts.all["a"].fresh


def test_a_node_that_found_back_by_itself_is_not_ended() -> None:
    hosts = running("a")
    hosts.cut("a", 5.0)
    hosts.lost("a", 6.0)
    hosts.joined("a", 7.0)  # turned away once, it joins as a new one
    assert not hosts.all["a"].fresh


def test_pauses_grow_and_begin_anew_after_a_long_run() -> None:
    hosts = Hosts(["a"])
    hosts.use(1)
    now, pauses = 0.0, []
    for _ in range(10):
        assert hosts.due(now) == ["a"]
        hosts.failed("a", now)
        pauses.append(hosts.all["a"].next_s - now)
        now = hosts.all["a"].next_s
    assert pauses[:3] == [1.0, 2.0, 4.0]
    assert pauses[-1] == MOST_PAUSE_S
    hosts.due(now)
    hosts.begun("a")
    hosts.joined("a", now)
    hosts.ended("a", now + SETTLED_S - 1)
    assert hosts.all["a"].next_s == now + SETTLED_S - 1 + MOST_PAUSE_S
    now = hosts.all["a"].next_s
    hosts.due(now)
    hosts.begun("a")
    hosts.joined("a", now)
    hosts.ended("a", now + SETTLED_S)
    assert hosts.all["a"].next_s == now + SETTLED_S + FIRST_PAUSE_S


def test_a_wish_takes_the_reserve_and_then_what_left_for_size_alone() -> None:
    hosts = running("a", "b", "c", reserve=1)
    assert hosts.provide(1.0) == ""
    assert hosts.due(1.0) == ["r0"]
    hosts.left("a", returns=False)  # drained
    assert "no unused hosts left" in hosts.provide(2.0)
    hosts.left("b", returns=True)  # the job got smaller
    hosts.cut("b", 3.0)
    assert hosts.provide(3.0) == ""
    assert hosts.due(3.0) == ["b"]
    hosts.lost("c", 4.0)
    assert "b, c, r0 are being tried" in hosts.provide(4.0)


def test_a_host_that_is_to_be_rebooted_waits_for_its_boot() -> None:
    hosts = running("a")
    hosts.lost("a", 1.0)
    hosts.cut("a", 1.0)
    hosts.reboot("a", 1.0)
    assert hosts.due(100.0) == ["a"]
    assert "reboot was requested" in hosts.greeted("a", "boot of a")
    hosts.failed("a", 100.0)
    assert hosts.due(1000.0) == ["a"]
    assert hosts.greeted("a", "the next boot") == ""
    assert hosts.begun("a")


def test_a_host_that_left_while_it_was_being_started_is_ended() -> None:
    hosts = Hosts(["a"])
    hosts.use(1)
    hosts.due(0.0)
    hosts.left("a", returns=False)
    assert not hosts.begun("a")


ACTS = "begun", "failed", "cut", "ended", "joined", "lost", "left", "bad", "reboot", "provide", "due"


@settings(max_examples=400)
@given(st.lists(st.tuples(st.sampled_from(ACTS), st.integers(0, 4), st.floats(0, 90)), max_size=60))
def test_whatever_happens_no_host_is_forgotten_or_connected_twice(acts) -> None:
    names = ["a", "b", "c", "d", "e"]
    hosts = Hosts(names)
    hosts.use(3)
    now, connecting = 0.0, set()
    for act, index, pause_s in acts:
        now += pause_s
        host = hosts.all[names[index]]
        gone = {h.name for h in hosts.all.values() if h.stage in (HostStage.BAD, HostStage.LEFT)}
        if act == "due":
            started = set(hosts.due(now))
            assert not started & connecting, "two connections to one host"
            assert not started & gone, "a host that was given up is used"
            connecting |= started
        elif act in ("begun", "failed"):  # an attempt ends once, one way or the other
            if host.name in connecting:
                connecting.discard(host.name)
                hosts.begun(host.name) if act == "begun" else hosts.failed(host.name, now)
        elif act in ("cut", "ended"):
            if host.linked:
                getattr(hosts, act)(host.name, now)
        elif act in ("joined", "lost", "reboot"):
            getattr(hosts, act)(host.name, now)
        elif act == "left":
            hosts.left(host.name, returns=bool(index % 2))
        elif act == "bad":
            hosts.bad(host.name)
        else:
            hosts.provide(now)
        for one in hosts.all.values():
            if one.stage is HostStage.RESTING and not (one.linking or one.linked):
                # Whoever rests is tried again, within the longest pause.
                wake_s = hosts.wake_s()
                assert wake_s is not None
                assert wake_s <= now + MOST_PAUSE_S
            assert not (one.linked and one.linking)
            assert (one.stage is HostStage.STARTING) <= one.linking
            assert (one.name in connecting) == one.linking
    # When nothing goes wrong any more, every host that is wanted runs.
    for _ in range(3):
        now += MOST_PAUSE_S
        for host in hosts.all.values():
            if host.stage is not HostStage.RUNNING:
                hosts.cut(host.name, now)  # of an agent that was ended
        for name in [*connecting, *hosts.due(now)]:
            hosts.greeted(name, "a new boot")
            hosts.begun(name)
        connecting = set()
    left = {h.stage for h in hosts.all.values()}
    assert left <= {HostStage.RUNNING, HostStage.RESERVE, HostStage.LEFT, HostStage.BAD}
    assert all(h.linked for h in hosts.all.values() if h.stage is HostStage.RUNNING)
