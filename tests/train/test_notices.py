"""Notices in a worker: what a script is told, and how often."""

import socket

import pytest

import holdfast
from holdfast.checkpoint import agent_link
from holdfast.errors import UsageError
from holdfast.protocol import messages as m
from holdfast.protocol.machine import notice_board
from holdfast.protocol.machine.notice_board import NoticeBoard
from holdfast.protocol.machine.progress_record import ProgressRecord
from holdfast.protocol.notices import Going, Notice, NoticeCause
from holdfast.protocol.wire.frames import pack
from holdfast.train import worker
from holdfast.train.link import Link, Warnings
from holdfast.train.run import Run


def drained(number=1, deadline_s=None, going=Going.NODE):
    return Notice(
        number=number, going=going, cause=NoticeCause.DRAIN, reason="maintenance", deadline_s=deadline_s
    )


@pytest.fixture
def board():
    return NoticeBoard()


def told_by(warnings):
    return [call() for call in warnings.calls()] if warnings.due() else []


# ---------------------------------------------------------------- what stands


def test_the_time_that_is_left_counts_from_the_question(board, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(notice_board.time, "monotonic", lambda: now[0])
    board.put((drained(deadline_s=60.0),))
    now[0] += 20.0
    assert board.first() == drained(deadline_s=40.0)
    now[0] += 50.0
    assert board.first().deadline_s == 0.0


def test_the_most_urgent_comes_first_and_what_has_no_deadline_last(board):
    board.put((drained(1), drained(2, 60.0), drained(3, 5.0)))
    assert [n.number for n in board.standing()] == [3, 2, 1]


def test_nothing_stands_at_first_and_after_a_withdrawal(board):
    assert board.first() is None
    board.put((drained(),))
    board.put(())
    assert board.first() is None


# ---------------------------------------------------------------- calls


def test_each_function_is_called_once_for_each_notice(board):
    warnings = Warnings(board)
    warnings.add(lambda n: ("a", n.number))
    warnings.add(lambda n: ("b", n.number))
    board.put((drained(1),))
    assert told_by(warnings) == [("a", 1), ("b", 1)]
    assert told_by(warnings) == []
    board.put((drained(1), drained(2)))  # an agent repeats what stands
    assert told_by(warnings) == [("a", 2), ("b", 2)]


def test_a_function_that_comes_later_is_told_what_stands(board):
    board.put((drained(1),))
    warnings = Warnings(board)
    warnings.add(lambda n: ("a", n.number))
    assert told_by(warnings) == [("a", 1)]
    warnings.add(lambda n: ("b", n.number))
    assert told_by(warnings) == [("b", 1)]


def test_what_was_withdrawn_before_the_steps_edge_is_not_told(board):
    warnings = Warnings(board)
    warnings.add(lambda n: n.number)
    board.put((drained(1),))
    board.put(())
    assert told_by(warnings) == []


def test_a_call_that_raises_is_not_made_again(board):
    def fails(notice):
        raise ValueError("in the script")

    warnings = Warnings(board)
    warnings.add(fails)
    board.put((drained(1),))
    with pytest.raises(ValueError, match="in the script"):
        told_by(warnings)
    board.put((drained(1),))
    assert told_by(warnings) == []


# ---------------------------------------------------------------- a script


@pytest.fixture
def coordinator():
    """The other end of a link, which is this process's from now on."""
    ours, theirs = socket.socketpair()
    start = m.Start(
        worker="w", script="", args=(), module=False, env={}, cwd="", log="", page="", stacks="",
        token="", host="127.0.0.1",
    )  # fmt: skip
    record = ProgressRecord()
    link = Link(ours, start, record, "token")
    link.listen()
    agent_link.attach(link)
    yield theirs
    agent_link.detach()
    theirs.close()
    link.close()
    record.close()


def wait_until_taken_in(peer):
    """An order that is answered by another thread than the one that asks: what was sent before it has been read."""
    peer.sendall(pack(m.SnapshotFound(1)))
    assert agent_link.current().wait_found(1, 10.0) is not None


def test_a_script_that_does_not_know_of_steps_asks(coordinator):
    assert holdfast.notice() is None
    coordinator.sendall(pack(m.Notify((drained(1, 60.0),))))
    wait_until_taken_in(coordinator)
    assert isinstance(holdfast.notice(), holdfast.Notice)
    assert holdfast.notice().cause is NoticeCause.DRAIN
    coordinator.sendall(pack(m.Notify(())))
    coordinator.sendall(pack(m.SnapshotFound(2)))
    assert agent_link.current().wait_found(2, 10.0) is not None
    assert holdfast.notice() is None


def test_outside_of_a_job_there_is_nothing_to_be_told():
    assert holdfast.notice() is None


def test_what_cannot_be_called_is_refused_at_once():
    attachment = worker.alone()
    try:
        run = Run(attachment)
        assert run.notice is None
        with pytest.raises(UsageError, match="a str is not callable"):
            run.on_warning("save")
    finally:
        attachment.close()
