"""Level 0: a rank that leaves with exit code 0 while the others train on is the cause of what they run into."""

import pytest
from desk import Desk
from test_memory_snapshot_cases import at_level_0

from holdfast.coordinator.kernel import events as e
from holdfast.protocol import causes
from holdfast.protocol import messages as m
from holdfast.protocol.phases import GroupReading

WORLD, PAIR = "0/aa/gloo", "1/bb/gloo"


def entered(**groups: int) -> tuple[GroupReading, ...]:
    names = {"world": WORLD, "pair": PAIR}
    return tuple(
        GroupReading(group=names[name], label=name, size=2, entered=number) for name, number in groups.items()
    )


def exits(
    desk: Desk,
    worker: str,
    code: int,
    script_ended: bool = True,
    groups: tuple[GroupReading, ...] | None = None,
) -> None:
    said = m.Exited(worker=worker, code=code, log="log", script_ended=script_ended, groups=groups)
    desk.do(e.NodeSays(worker.partition(".")[0], said))


def at_work() -> tuple[Desk, str, str]:
    desk = at_level_0(2)
    first, second = desk.workers()
    return desk, first, second


@pytest.mark.parametrize(
    ("left", "failed"),
    [
        ({"script_ended": False}, None),
        ({"groups": entered(world=15)}, entered(world=16)),
        ({"groups": entered(world=20, pair=3)}, entered(world=20, pair=4)),
    ],
    ids=["os._exit", "before a collective", "before one of another group"],
)
def test_it_left_too_early(left, failed):
    desk, first, second = at_work()
    exits(desk, second, 0, **left)
    assert desk.incidents() == []  # it may be done
    exits(desk, first, 1, groups=failed)
    (incident,) = desk.incidents()
    assert incident.cause == causes.LeftEarly("exit code 1")
    assert (incident.node, incident.ranks) == ("n1", [1])
    root_cause = desk.state.membership.root_cause
    assert (root_cause.rank, root_cause.node, root_cause.log) == (1, "n1", "log")


@pytest.mark.parametrize(
    ("left", "failed"),
    [
        (entered(world=16), entered(world=16)),
        (entered(world=16, pair=9), entered(world=16)),
        (None, entered(world=16)),
        (entered(world=16), None),
        (entered(pair=3), entered(world=16)),
    ],
    ids=["after the same collectives", "after more", "unknown", "unknown of the other", "no group in common"],
)
def test_it_was_done(left, failed):
    desk, first, second = at_work()
    exits(desk, second, 0, groups=left)
    exits(desk, first, 1, groups=failed)
    (incident,) = desk.incidents()
    assert incident.cause == causes.ProcessEnded(1)
    assert incident.ranks == [0]


def test_who_was_killed_was_not_ended_by_another():
    desk, first, second = at_work()
    exits(desk, second, 0, script_ended=False)
    exits(desk, first, -9, script_ended=False)
    assert [i.cause for i in desk.incidents()] == [causes.ProcessEnded(-9)]


def test_all_that_leave_at_their_end_have_finished():
    desk, first, second = at_work()
    exits(desk, second, 0, script_ended=False)
    exits(desk, first, 0, script_ended=False)
    assert desk.incidents() == []
    assert desk.state.membership.outcome == "finished"


def test_one_that_leaves_in_each_attempt_loses_its_node():
    """As with any other exit code: on another node it does so again if it is the script's doing."""
    desk, *_ = at_work()
    for _ in range(3):
        assert desk.state.membership.nodes["n1"].alive
        exits(desk, desk.worker_on("n1"), 0, script_ended=False)
        exits(desk, desk.worker_on("n0"), 1)
    assert not desk.state.membership.nodes["n1"].alive
    assert desk.state.membership.nodes["n0"].failures == 0
