"""What an agent prints of its workers' logs."""

from __future__ import annotations

import asyncio

import pytest

from holdfast.agent.worker_logs import LogFollower


@pytest.fixture
def printed(tmp_path, capfdbinary):
    """Runs calls of a follower of two logs, and gives what it printed."""
    mine, other = tmp_path / "mine.log", tmp_path / "other.log"

    def write(path, text):
        with path.open("a") as log:
            log.write(text)

    async def run(act):
        follower = LogFollower(lambda: None)
        try:
            act(follower, write, mine, other)
        finally:
            follower.close()

    def printed(act):
        asyncio.run(run(act))
        return capfdbinary.readouterr().out.decode()

    return printed


def test_a_log_is_printed_from_its_beginning(printed):
    def act(follower, write, mine, _):
        write(mine, "before\n")
        follower.follow(mine)
        write(mine, "after\n")

    assert printed(act) == "before\nafter\n"


def test_a_log_that_was_left_is_printed_no_further(printed):
    """The worker was taken for rank 0 at its start, and is not: another node's agent prints rank 0."""

    def act(follower, write, mine, _):
        follower.follow(mine)
        write(mine, "while it was rank 0\n")
        follower.leave(mine)
        write(mine, "later\n")

    assert printed(act) == "while it was rank 0\n"


def test_leaving_another_log_changes_nothing(printed):
    def act(follower, write, mine, other):
        follower.follow(mine)
        follower.leave(other)
        write(mine, "rank 0\n")

    assert printed(act) == "rank 0\n"


def test_a_log_that_is_followed_again_goes_on_where_it_was_left(printed):
    def act(follower, write, mine, other):
        follower.follow(mine)
        write(mine, "one\n")
        follower.leave(mine)
        write(mine, "two\n")
        follower.follow(mine)
        write(mine, "three\n")

    assert printed(act) == "one\ntwo\nthree\n"
